"""The parity check: the real engine against the real trainer, on the same and on another model or adapter."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment.artifacts.specs import check_adapter
from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.describe import describe_folder
from alignment.trainer.base_probe import BEYOND_WINDOW, MAX_TOKENS, BaseProbe, random_sequences
from alignment.trainer.trainer import Trainer
from app.core.settings import Settings
from app.inference.engine import EngineClient
from app.inference.transport import EngineUnavailable
from app.models import Engine
from app.ops.diagnostics import Level, check_parity
from app.training.base_parity import ParityRecord, read_parity
from tests.support.adapters import make_adapter
from tests.support.engine_model import make_tiny_model
from workers import parity
from workers.context import WorkerContext
from workers.parity import MAX_FAILURES, ParityCheck, compare_with_engine, prepare_random_adapter
from workers.training.commands import ProbeBaseModel


def probe_of(base_model: Path, folder: Path) -> BaseProbe:
    trainer = Trainer(base_model, TrainerConfig(lora=LoRAConfig(), device="cpu"))
    probe = trainer.probe_base_model(folder / "random", 2048)
    assert trainer.adapter_spec is not None
    check_adapter(probe.directory, trainer.adapter_spec)
    return probe


@pytest.fixture
def settings(tmp_path: Path, engine_model: Path) -> Settings:
    home = tmp_path / "home"
    home.mkdir()
    return Settings(home=home, model=str(engine_model))


@pytest.mark.engine
async def test_same_model_and_adapter_pass_and_any_other_is_refused(
    settings: Settings, engine_client: EngineClient, engine_model: Path, tmp_path: Path
) -> None:
    loaded, probe = await engine_client.list_adapters(), probe_of(engine_model, tmp_path)
    moved = [abs(a - b) for a, b in zip(probe.base_logprobs[0], probe.adapter_logprobs[0], strict=True)]
    assert max(moved) > 0.1  # an adapter that is not attached would be noticed
    record = await compare_with_engine(settings, engine_client, probe, probe.directory)
    assert record.reason is None and record.base < 1e-4 and record.adapter < 1e-3
    assert await engine_client.list_adapters() == loaded

    make_adapter(tmp_path / "other", engine_model, seed=3)
    record = await compare_with_engine(settings, engine_client, probe, tmp_path / "other")
    assert record.reason and "with a random adapter the engine's log-probs differ" in record.reason

    other = probe_of(make_tiny_model(tmp_path / "model", seed=5), tmp_path / "of-another-model")
    record = await compare_with_engine(settings, engine_client, other, other.directory)
    assert record.reason and "without an adapter the engine's log-probs differ" in record.reason
    assert str(engine_model) in record.reason


@pytest.mark.engine
async def test_engine_that_does_not_see_the_storage_gets_the_adapter_in_the_request(
    settings: Settings, engine_client: EngineClient, engine_model: Path, tmp_path: Path
) -> None:
    probe = probe_of(engine_model, tmp_path)
    by_memory = settings.replace({"engine.adapter_delivery": "memory"})
    adapter = prepare_random_adapter(by_memory, probe.directory)
    shutil.rmtree(probe.directory)
    record = await compare_with_engine(by_memory, engine_client, probe, adapter)
    assert record.reason is None and record.adapter < 1e-3

    loaded = await engine_client.list_adapters()
    record = await compare_with_engine(
        settings, engine_client, probe, prepare_random_adapter(settings, probe.directory)
    )
    assert record.reason and "the engine fails at a random adapter" in record.reason
    assert await engine_client.list_adapters() == loaded


def test_sequences_are_longer_than_the_shortest_window(engine_model: Path) -> None:
    model = describe_folder(engine_model)
    window = replace(model, windows=(512, None), max_position_embeddings=100_000)
    assert {len(ids) for ids in random_sequences(window, None)} == {512 + BEYOND_WINDOW}
    assert {len(ids) for ids in random_sequences(window, 128)} == {127}
    wide = replace(window, windows=(50_000,))
    assert {len(ids) for ids in random_sequences(wide, None)} == {MAX_TOKENS - 1}
    assert all(0 <= token < model.vocab_size for ids in random_sequences(model, None) for token in ids)


class ScriptedGroup:
    """Answers the command of the check, and counts its calls."""

    def __init__(self) -> None:
        self.calls, self.loaded_version_dir = 0, None

    def run(self, command: ProbeBaseModel) -> BaseProbe:
        self.calls += 1
        return BaseProbe(((1, 2),), ((-1.0,),), ((-2.0,),), command.directory)


@pytest.fixture
def make_check(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ParityCheck]:
    """Return a factory of checks whose engines' answers are scripted; without answers no engine is ready."""

    def make(*records: ParityRecord | EngineUnavailable, **values: Any) -> ParityCheck:
        answers = list(records)

        async def ready(context: WorkerContext) -> list[Engine]:
            return [Engine(name="engine-0", url="http://127.0.0.1:1")] if answers else []

        async def compare(settings: Settings, engines: Sequence[Engine], probe: BaseProbe) -> ParityRecord:
            answer = answers.pop(0)
            if isinstance(answer, EngineUnavailable):
                raise answer
            return answer

        monkeypatch.setattr(parity, "_ready_engines", ready)
        monkeypatch.setattr(parity, "compare_with_engines", compare)
        group: Any = ScriptedGroup()
        return ParityCheck(group, WorkerContext(settings.replace(values)))

    return make


PASSED = ParityRecord(None, 1e-6, 1e-5)
REFUSED = ParityRecord("they differ", 3.1, 0.0)


def test_check_runs_until_it_has_passed(make_check: Callable[..., ParityCheck]) -> None:
    check = make_check(REFUSED, PASSED)
    group: Any = check.group
    assert not check.allows_training()
    assert read_parity(check.context.settings) == REFUSED
    [finding] = check_parity(check.context.settings)
    assert finding.level == Level.PROBLEM and finding.found == "they differ"
    assert check.allows_training() and check.allows_training()
    assert group.calls == 2 and read_parity(check.context.settings) == PASSED
    assert [finding.level for finding in check_parity(check.context.settings)] == [Level.OK]
    assert group.loaded_version_dir == "unknown"  # the next update restores its parent


def test_without_an_engine_it_is_left_for_later(make_check: Callable[..., ParityCheck]) -> None:
    check = make_check()
    assert check.allows_training() and not check.has_passed
    assert read_parity(check.context.settings) is None


def test_while_an_engine_does_not_answer_it_is_left_for_later(make_check: Callable[..., ParityCheck]) -> None:
    check = make_check(EngineUnavailable("gone"), REFUSED)
    group: Any = check.group
    assert check.allows_training() and check.allows_training(), "the second time it is not due"
    assert group.calls == 1 and read_parity(check.context.settings) is None
    check.due_at = 0.0
    assert not check.allows_training()


def test_engine_that_crashes_at_an_adapter_is_not_tried_for_ever(make_check: Callable[..., ParityCheck]) -> None:
    crashed = ParityRecord("it ends", 0.0, 0.0, has_engine_failed=True)
    check = make_check(*[crashed] * (MAX_FAILURES + 2))
    group: Any = check.group
    assert not any(check.allows_training() for _ in range(MAX_FAILURES + 2))
    assert group.calls == MAX_FAILURES


@pytest.mark.parametrize("setting", [{"trainer.parity_check": False}, {"trainer.adaptation": "full"}])
def test_it_can_be_turned_off(make_check: Callable[..., ParityCheck], setting: dict[str, Any]) -> None:
    check = make_check(REFUSED, **setting)
    assert check.allows_training()
    assert read_parity(check.context.settings) is None


async def test_engine_that_ends_at_the_adapter_is_told_from_one_that_does_not_answer(
    settings: Settings, tmp_path: Path
) -> None:
    class Client:
        url = "http://127.0.0.1:1"

        def __init__(self, ends_at: str, is_up: bool = False) -> None:
            self.ends_at, self.is_up = ends_at, is_up

        async def score(self, adapter: str | None, ids: Any) -> list[list[float]]:
            if self.ends_at == ("base" if adapter is None else "adapter"):
                raise EngineUnavailable("gone")
            return [[-1.0]]

        async def load_adapter(self, name: str, directory: Path) -> None: ...

        async def is_ready(self) -> bool:
            return self.is_up

    probe = BaseProbe(((1, 2),), ((-1.0,),), ((-1.0,),), tmp_path)
    at_adapter: Any = Client("adapter")
    record = await compare_with_engine(settings, at_adapter, probe, tmp_path)
    assert record.reason and record.has_engine_failed
    is_slow: Any = Client("adapter", is_up=True)
    with pytest.raises(EngineUnavailable):
        await compare_with_engine(settings, is_slow, probe, tmp_path)
    at_base: Any = Client("base")
    with pytest.raises(EngineUnavailable):
        await compare_with_engine(settings, at_base, probe, tmp_path)
