"""The matrix of model families: build → walk → train two versions → serve them → compare with transformers."""

from pathlib import Path

import pytest

from alignment.config.trainer import TrainerConfig
from alignment.trainer.trainer import Trainer
from app.core.settings import Settings
from app.inference.model_support import unsupported_reason
from tests.families.checkpoints import BY_NAME, FAMILIES, WINDOW, Family, build
from tests.families.matrix import BEGIN, END, PAGE, read_results, run_family, table
from tests.families.serving import EngineFailed, running_engine
from tests.families.training import LORA, train_family
from tests.support.engine_fixture import require_engine_environment
from workers.parity import compare_with_engine

SERVED_BY_DEFAULT = {"glm4"}  # layers of other names than in Llama, and some of them fused
TRAINED_BY_DEFAULT = ("granite", "qwen3-moe")  # scaled logits; experts
pytestmark = pytest.mark.timeout(600)


def marked(family: Family) -> object:
    marks = [pytest.mark.engine] if family.name in SERVED_BY_DEFAULT else [pytest.mark.engine, pytest.mark.slow]
    return pytest.param(family, id=family.name, marks=marks)


@pytest.mark.parametrize("family", [marked(family) for family in FAMILIES])
def test_family_is_served_as_it_is_trained_or_refused(family: Family, tmp_path: Path) -> None:
    require_engine_environment()
    result = run_family(family, tmp_path)
    assert result.refused_by == family.refused_by, result.reason
    assert family.reason in result.reason


@pytest.mark.parametrize("name", TRAINED_BY_DEFAULT)
def test_trainer_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    trained = train_family(build(BY_NAME[name], tmp_path / "model"), tmp_path / "versions")
    base, *versions = (version.distance for version in trained.versions)
    assert base < 1e-5 and max(versions) < 1e-4
    before, after = trained.versions[0].logprobs[0], trained.versions[2].logprobs[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1  # the updates changed something


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_windows_that_engines_get_wrong_are_refused_before_anything_is_loaded(family: Family) -> None:
    config = {"model_type": family.model_type, "max_position_embeddings": 2048, **family.settings}
    is_known = family.name in {"mistral-window", "phi3-window", "cohere2"}
    assert (unsupported_reason(config, None) is not None) == is_known
    assert unsupported_reason(config, WINDOW) is None


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral-window", "without an adapter the engine's log-probs differ from the trainer's"),
        ("glm4", None),
    ],
)
async def test_parity_check_refuses_what_the_matrix_refuses(name: str, reason: str | None, tmp_path: Path) -> None:
    require_engine_environment()
    checkpoint = build(BY_NAME[name], tmp_path / "model")
    trainer = Trainer(checkpoint, TrainerConfig(lora=LORA, device="cpu"))
    probe = trainer.probe_base_model(tmp_path / "random", 1024)
    assert trainer.adapter_spec is not None
    async with running_engine(checkpoint, trainer.adapter_spec, tmp_path) as client:
        record = await compare_with_engine(Settings(model=name), client, probe, probe.directory)
    assert (record.reason is None) if reason is None else (record.reason and reason in record.reason)
    assert not record.has_engine_failed


@pytest.mark.slow
@pytest.mark.engine
async def test_engine_that_fails_at_its_warm_up_is_never_ready(tmp_path: Path) -> None:
    require_engine_environment()
    family = BY_NAME["smollm3"]
    checkpoint = build(family, tmp_path / "model")
    adapter = Trainer(checkpoint, TrainerConfig(lora=LORA, device="cpu")).adapter_spec
    assert adapter is not None
    with pytest.raises(EngineFailed, match=family.reason):
        async with running_engine(checkpoint, adapter, tmp_path):
            pass


def test_page_shows_the_results() -> None:
    """`python -m tests.families.matrix` writes both."""
    results = read_results()
    assert results.keys() == BY_NAME.keys()
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(results)
    for family in FAMILIES:
        assert results[family.name].refused_by == family.refused_by, family.name
        assert family.reason in results[family.name].reason
