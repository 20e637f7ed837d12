"""Release gates: metrics, user functions, held-out prompts."""

from typing import Any

import pytest

from alignment.release.gates import Candidate
from alignment.signals.verifiers import VerifierInput
from app.inference.transport import EngineRefused
from app.models import Dataset, DatasetKind, DatasetRow, LearningMode, Policy, Version, VersionState, new_id
from app.policies.overrides import set_own_values
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import create_trained_version, evaluate_and_publish

PROMPTS = {"type": "prompts", "name": "hours", "dataset": "hours", "verifier": {"type": "contains"}}


def user_gate(candidate: Candidate) -> str | None:
    """An example of a user's gate function."""
    assert (candidate.policy, candidate.parent, candidate.adapter_path != "") == ("shop", 0, True)
    return "it feels wrong" if candidate.metrics.get("mood") == "low" else None


def broken_gate(candidate: Candidate) -> str | None:
    raise RuntimeError("no network")


async def run_gates(harness: Harness, *gates: dict[str, Any], **values: Any) -> Version:
    """Evaluate a version with these gates."""
    settings = harness.settings.replace({"release.gates": gates})
    version = await create_trained_version(harness)
    async with harness.db.write() as session:
        for name, value in values.items():
            setattr(await session.get_one(Version, version.id), name, value)
    await evaluate_and_publish(Harness(settings, harness.db, harness.key, harness.api))
    row: Version = await harness.get(Version, version.id)
    return row


async def create_prompts(harness: Harness, *rows: dict[str, Any]) -> None:
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
        session.add_all(DatasetRow(dataset_id=dataset.id, row_number=at, content=row) for at, row in enumerate(rows))


def prompt_row(question: str, reference: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "reference": reference}


@pytest.mark.parametrize(("entropy", "state"), [(0.5, VersionState.LIVE), (0.05, VersionState.REJECTED)])
async def test_metric_out_of_bounds_rejects_the_version(
    harness: Harness, scripted: ScriptedEngine, entropy: float, state: VersionState
) -> None:
    gate = {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    version = await run_gates(harness, gate, metrics={"actor/entropy": entropy})
    assert version.state == state
    if state == VersionState.REJECTED:
        assert version.reason == "gate entropy: actor/entropy is 0.05, below 0.1"
        policy = await harness.policy()
        assert policy.head_version_id == (await harness.serving()).id
        assert (policy.mode, policy.kl_alarms) == (LearningMode.SYNCHRONOUS, 1), "three alarms in a row halt training"


@pytest.mark.parametrize(
    ("function", "mood", "reason"),
    [
        (f"{__name__}:user_gate", "high", None),
        (f"{__name__}:user_gate", "low", "gate mine: it feels wrong"),
        (f"{__name__}:broken_gate", "high", "gate mine: its function failed: RuntimeError: no network"),
        ("nowhere:gate", "high", "gate mine: its function failed: UnknownExtension"),
    ],
)
async def test_user_function_decides_and_a_failing_one_rejects(
    harness: Harness, scripted: ScriptedEngine, function: str, mood: str, reason: str | None
) -> None:
    version = await run_gates(
        harness, {"type": "function", "name": "mine", "function": function}, metrics={"mood": mood}
    )
    assert version.state == (VersionState.LIVE if reason is None else VersionState.REJECTED)
    assert reason is None or (version.reason or "").startswith(reason)


async def test_held_out_prompts_are_answered_by_candidate_and_serving_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await create_prompts(harness, prompt_row("When?", "nine to six"), prompt_row("Where?", "Main Street"))
    version = await run_gates(harness, PROMPTS | {"at_least": 0.5, "max_drop": 0.1})
    assert (version.state, version.metrics["gate/hours"]) == (VersionState.LIVE, 0.5)
    requests = [body for body in scripted.requests if "messages" in body]
    assert [body.get("lora_path") for body in requests] == ["shop-v1", "shop-v1", None, None]
    assert {body["priority"] for body in requests} == {-1}
    assert "gates" in version.timings


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([prompt_row("Where?", "Main Street")], "gate hours: 0.0% of 1 replies are right, less than 50.0%"),
        ([], "gate hours: there is no dataset of prompts named 'hours'"),
    ],
)
async def test_wrong_answers_and_missing_prompts_reject_the_version(
    harness: Harness, scripted: ScriptedEngine, rows: list[dict[str, Any]], reason: str
) -> None:
    await create_prompts(harness, *rows)
    version = await run_gates(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.reason) == (VersionState.REJECTED, reason)


def user_verifier(attempt: VerifierInput) -> Any:
    """An example of a user's verifier that reads other columns of the row."""
    return 1.0 if attempt.details == {"shop": "north"} else "yes"


@pytest.mark.parametrize(("details", "share"), [({"shop": "north"}, 1.0), ({}, 0.0)])
async def test_verifier_sees_other_columns_and_its_invalid_score_is_wrong(
    harness: Harness, scripted: ScriptedEngine, details: dict[str, str], share: float
) -> None:
    await create_prompts(harness, prompt_row("When?", "nine to six") | {"details": details})
    gate = PROMPTS | {"verifier": {"type": "custom", "name": "odd"}, "at_least": 0.0}
    rollouts = {"verifiers": {"odd": f"{__name__}:user_verifier"}}
    harness.settings = harness.settings.replace({"rollouts": rollouts})
    assert (await run_gates(harness, gate)).metrics["gate/hours"] == share


async def test_prompt_that_the_engine_refuses_rejects_the_version(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: Any) -> Any:
        raise EngineRefused(400, "the prompt is longer than the context")

    await create_prompts(harness, prompt_row("When?", "nine to six"))
    monkeypatch.setattr("app.inference.sglang.client.SGLangClient.complete", refuse)
    version = await run_gates(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.reason) == (
        VersionState.REJECTED,
        "gate hours: the request failed: the prompt is longer than the context",
    )


async def test_engine_failure_does_not_decide_about_the_version(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompts(harness, prompt_row("When?", "nine to six"))
    scripted.drop_after_tokens = 2
    version = await run_gates(harness, PROMPTS | {"at_least": 0.5})
    assert (version.state, version.lease_owner) == (VersionState.TRAINED, None)


@pytest.mark.parametrize(
    ("entropy", "kl", "reason"),
    [(0.5, 0.4, None), (0.01, 0.4, "gate entropy"), (0.5, 0.6, "`kl_guard` is 0.5")],
)
async def test_a_policys_own_gates_and_guard_replace_the_deployments(
    harness: Harness, scripted: ScriptedEngine, entropy: float, kl: float, reason: str | None
) -> None:
    gate = {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    async with harness.db.write() as session:
        policy = await session.get_one(Policy, (await harness.policy()).id)
        set_own_values(policy, {"release": {"gates": [gate]}, "trainer": {"kl_guard": 0.5}})
    version = await run_gates(harness, metrics={"actor/entropy": entropy, "guard/kl": kl})
    assert version.state == (VersionState.LIVE if reason is None else VersionState.REJECTED)
    assert (reason or "") in (version.reason or "")
