"""Gates between a proven version and the people: metrics, functions of one's own, held-out prompts."""

from typing import Any

import pytest

from alignment.release.gates import Candidate
from alignment.signals.verifiers import Attempt
from app.core.settings import Settings
from app.inference.errors import EngineRefused
from app.models import Dataset, DatasetKind, DatasetRow, LearningMode, Version, VersionState, new_id
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import come_home, trained

PROMPTS = {"type": "prompts", "name": "hours", "dataset": "hours", "verifier": {"type": "contains"}}


def cautious(candidate: Candidate) -> str | None:
    """As somebody else would write one."""
    assert (candidate.policy, candidate.parent, candidate.adapter_path != "") == ("shop", 0, True)
    return "it feels wrong" if candidate.metrics.get("mood") == "low" else None


def broken(candidate: Candidate) -> str | None:
    raise RuntimeError("no network")


async def tried(harness: Harness, *gates: dict[str, Any], **values: Any) -> Version:
    """A version that has been before these gates."""
    told = harness.settings.model_dump(exclude={"gates"}) | {"gates": gates}
    settings = Settings.model_validate(told)
    version = await trained(harness)
    async with harness.db.write() as session:
        for name, value in values.items():
            setattr(await session.get_one(Version, version.id), name, value)
    await come_home(Harness(settings, harness.db, harness.key, harness.api))
    row: Version = await harness.get(Version, version.id)
    return row


async def prompts(harness: Harness, *rows: dict[str, Any]) -> None:
    policy = await harness.policy()
    async with harness.db.write() as session:
        dataset = Dataset(
            id=new_id("ds"),
            project_id=policy.project_id,
            name="hours",
            kind=DatasetKind.PROMPTS,
            num_rows=len(rows),
            sha256="0" * 64,
        )
        session.add(dataset)
        await session.flush()
        session.add_all(DatasetRow(dataset_id=dataset.id, number=at, content=row) for at, row in enumerate(rows))


def row(question: str, reference: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "reference": reference}


@pytest.mark.parametrize(("entropy", "state"), [(0.5, VersionState.LIVE), (0.05, VersionState.REJECTED)])
async def test_a_metric_out_of_bounds_keeps_a_version_in(
    harness: Harness, scripted: ScriptedEngine, entropy: float, state: VersionState
) -> None:
    gate = {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    version = await tried(harness, gate, metrics={"actor/entropy": entropy})
    assert version.state == state
    if state == VersionState.REJECTED:
        assert version.reason == "gate entropy: actor/entropy is 0.05, below 0.1"
        policy = await harness.policy()
        assert policy.head_version_id == (await harness.serving()).id
        assert (policy.mode, policy.kl_alarms) == (LearningMode.SYNCHRONOUS, 1), "three in a row halt learning"


@pytest.mark.parametrize(
    ("function", "mood", "said"),
    [
        (f"{__name__}:cautious", "high", None),
        (f"{__name__}:cautious", "low", "gate mine: it feels wrong"),
        (f"{__name__}:broken", "high", "gate mine: it could not be asked: RuntimeError: no network"),
        ("nowhere:gate", "high", "gate mine: it could not be asked: UnknownFunction"),
    ],
)
async def test_a_function_of_ones_own_decides_and_one_that_fails_lets_nothing_through(
    harness: Harness, scripted: ScriptedEngine, function: str, mood: str, said: str | None
) -> None:
    version = await tried(harness, {"type": "function", "name": "mine", "function": function}, metrics={"mood": mood})
    assert version.state == (VersionState.LIVE if said is None else VersionState.REJECTED)
    assert said is None or (version.reason or "").startswith(said)


async def test_held_out_prompts_are_asked_of_the_candidate_and_of_what_serves(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await prompts(harness, row("When?", "nine to six"), row("Where?", "Main Street"))
    version = await tried(harness, PROMPTS | {"at_least": 0.5, "most_drop": 0.1})
    assert (version.state, version.metrics["gate/hours"]) == (VersionState.LIVE, 0.5)
    asked = [body for body in scripted.heard if "messages" in body]
    assert [body.get("lora_path") for body in asked] == ["shop-v1", "shop-v1", None, None]
    assert {body["priority"] for body in asked} == {-1}
    assert "gates" in version.timings


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("Where?", "Main Street")], "gate hours: 0.0% of 1 replies are right, less than 50.0%"),
        ([], "gate hours: there is no dataset of prompts named 'hours'"),
    ],
)
async def test_wrong_answers_and_missing_prompts_keep_it_in(
    harness: Harness, scripted: ScriptedEngine, rows: list[dict[str, Any]], said: str
) -> None:
    await prompts(harness, *rows)
    version = await tried(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.reason) == (VersionState.REJECTED, said)


def odd(attempt: Attempt) -> Any:
    """A verifier of somebody's own, which looks at the row's other columns."""
    return 1.0 if attempt.details == {"shop": "north"} else "yes"


@pytest.mark.parametrize(("details", "share"), [({"shop": "north"}, 1.0), ({}, 0.0)])
async def test_a_verifier_sees_the_rows_other_columns_and_its_nonsense_is_wrong(
    harness: Harness, scripted: ScriptedEngine, details: dict[str, str], share: float
) -> None:
    await prompts(harness, row("When?", "nine to six") | {"details": details})
    gate = PROMPTS | {"verifier": {"type": "custom", "name": "odd"}, "at_least": 0.0}
    rollouts = {"verifiers": {"odd": f"{__name__}:odd"}}
    harness.settings = Settings.model_validate(harness.settings.model_dump() | {"rollouts": rollouts})
    assert (await tried(harness, gate)).metrics["gate/hours"] == share


async def test_a_prompt_that_the_engine_refuses_keeps_it_in(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*given: Any) -> Any:
        raise EngineRefused(400, "the prompt is longer than the context")

    await prompts(harness, row("When?", "nine to six"))
    monkeypatch.setattr("workers.release.gates.EngineClient.complete", refuses)
    version = await tried(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.reason) == (
        VersionState.REJECTED,
        "gate hours: it could not be asked: the prompt is longer than the context",
    )


async def test_an_engine_that_breaks_off_is_no_verdict(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, row("When?", "nine to six"))
    scripted.die_after = 2
    version = await tried(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.lease_owner) == (VersionState.TRAINED, None)
