"""The training API: status, control, updates and rewards."""

from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.policy_gradient_algorithms import GRPOConfig
from app.core.database import now
from app.core.settings import Settings
from app.models import Audit, LearningMode, Policy, Sample, SampleState, VersionState
from app.training import sample_totals, service
from app.training.sample_columns import fill_columns
from app.training.waits import explain_wait
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.statement_work import count_work
from tests.support.trained_versions import create_batch, create_version
from tests.support.waiting_samples import add_samples, analyze

ROOT = "/v1/policies/shop"
JUDGE = {"type": "judge", "name": "judge", "url": "https://judge.example/v1", "model": "m"}
EXPLICIT = {"type": "explicit", "name": "explicit"}


async def read_status(harness: Harness) -> dict[str, Any]:
    answer = await harness.api.get(f"{ROOT}/training")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def create_sample(harness: Harness, **values: Any) -> None:
    turn = await harness.turn()
    defaults = {"policy_id": turn.policy_id, "version_id": turn.version_id, "reward": 1.0, "ready_at": 0.0}
    async with harness.db.write() as session:
        session.add(Sample(**{"turn_id": turn.id, **defaults, **values}))
        await session.flush()
        await fill_columns(session, turn.policy_id, 1)  # as the assembly does at once


async def test_pause_and_resume_are_audited_with_their_reason(harness: Harness) -> None:
    assert (await read_status(harness))["mode"] == "asynchronous"
    paused = await harness.api.post(f"{ROOT}/training/pause", json={"reason": "an incident"})
    assert (paused.json()["mode"], paused.json()["reason"]) == ("halted", "an incident")
    assert paused.json()["since"] is not None
    assert paused.json()["waiting_for"] == "Learning is halted until an operator resumes it."
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).kl_alarms = 3
    resumed = await harness.api.post(f"{ROOT}/training/resume", json={"reason": "fixed"})
    assert (resumed.json()["mode"], resumed.json()["kl_alarms"]) == ("asynchronous", 0)
    audits = [(row.actor, row.action, row.reason) for row in await harness.all(Audit)]
    assert audits == [
        (harness.key[:16], "training.halted", "an incident"),
        (harness.key[:16], "training.asynchronous", "fixed"),
    ]


async def test_waiting_samples_are_counted_by_state(harness: Harness) -> None:
    for rater in ("HUMAN/ada", "HUMAN/ada", "HUMAN/bob", None, None):
        await create_sample(harness, rater=rater)
    await create_sample(harness, ready_at=1e12, rater="HUMAN/eve")
    await create_sample(harness, state=SampleState.QUARANTINED)
    await create_sample(harness, state=SampleState.DROPPED)
    body = await read_status(harness)
    assert body["samples"] == {"open": 5, "not_ready": 1, "quarantined": 1}
    assert body["raters"] == 4


async def test_status_says_what_the_next_batch_waits_for(harness: Harness) -> None:
    await create_sample(harness, rater="HUMAN/ada")
    assert (await read_status(harness))["waiting_for"] == "1 more ready samples."
    async with harness.db.read() as session:
        policy = await harness.policy()

        async def describe_wait(**settings: Any) -> str:
            configured = Settings().replace(by_path({"batch_size": 8, "max_rater_share": 1.0, **settings}))
            counts = await service.count_samples(session, policy, configured)
            at_10 = counts._replace(now=10.0)
            return (await explain_wait(session, policy, at_10, configured, triggered=False)).sentence

        for reward in (1.0, 1.0, -1.0):
            await create_sample(harness, rater="HUMAN/ada", reward=reward)
        assert await describe_wait(min_raters=3) == "2 more raters."
        not_yet = "4 more ready samples; in 290 s fewer are enough."
        assert await describe_wait(max_wait_seconds=300) == not_yet
        assert (await describe_wait(max_wait_seconds=5)).startswith("Nothing")
        assert (await describe_wait(batch_size=4)).startswith("Nothing")
    batch = await create_batch(harness)
    assert (await read_status(harness))["waiting_for"] == f"An update is running: {batch.id}."


async def test_samples_beyond_a_cap_are_not_counted(harness: Harness) -> None:
    """Six samples of one rater and one of another; in a batch of eight a rater may have two."""
    for _ in range(6):
        await create_sample(harness, rater="HUMAN/ada")
    await create_sample(harness, rater="HUMAN/bob")
    async with harness.db.read() as session:
        policy = await harness.policy()

        async def describe_wait(**settings: Any) -> str:
            configured = Settings().replace(
                by_path({"batch_size": 8, "max_conversation_share": 1.0, "max_cluster_share": 1.0, **settings})
            )
            counts = await service.count_samples(session, policy, configured)
            at_10 = counts._replace(now=10.0)
            return (await explain_wait(session, policy, at_10, configured, triggered=False)).sentence

        too_few = await describe_wait(max_rater_share=0.25, min_batch_size=4)
        assert too_few.startswith("At least 1 more ready samples of other raters: of the 7 ready samples at most 3 may")
        assert "raters.max_rater_share" in too_few
        below_size = await describe_wait(max_rater_share=0.25, min_batch_size=2)
        assert below_size.startswith("5 more ready samples of other raters; in ")
        assert (await describe_wait(max_rater_share=1.0, min_batch_size=4)).startswith("1 more ready samples; in ")


async def test_next_batch_waits_for_a_version_that_is_not_published(harness: Harness) -> None:
    await create_version(harness, await harness.turn(), state=VersionState.TRAINED)
    assert (await read_status(harness))["waiting_for"] == "shop@v1 is not published yet."


async def test_only_samples_of_the_head_count_in_synchronous_mode(harness: Harness) -> None:
    await create_sample(harness)
    await create_version(harness, await harness.turn())
    assert (await read_status(harness))["samples"]["open"] == 1
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).mode = LearningMode.SYNCHRONOUS
    assert (await read_status(harness))["samples"]["open"] == 0


async def test_trigger_applies_until_a_batch_is_frozen(harness: Harness) -> None:
    for reward in (1.0, -1.0):
        await create_sample(harness, ready_at=now(), reward=reward)
    assert (await read_status(harness))["waiting_for"].startswith("6 more ready samples")
    body = (await harness.api.post(f"{ROOT}/training/trigger", json={"reason": "show it"})).json()
    assert body["triggered"] is True and body["waiting_for"].startswith("Nothing")
    batch = await create_batch(harness)
    assert (await read_status(harness))["triggered"] is False
    assert [row["id"] for row in (await read_status(harness))["updates"]] == [batch.id]


async def test_halted_policy_cannot_be_triggered(harness: Harness) -> None:
    await harness.api.post(f"{ROOT}/training/pause")
    answer = await harness.api.post(f"{ROOT}/training/trigger")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "learning_halted")


async def test_updates_are_listed_with_their_results(harness: Harness) -> None:
    for _ in range(3):
        await create_version(harness, await harness.turn())
    refused = await create_batch(harness, state="refused", reason="nothing to learn", metrics={"a": 1.0})
    updates: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = (await harness.api.get(f"{ROOT}/updates", params={"limit": 2, **after})).json()
        updates += page["data"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert [row["version"] for row in updates] == [None, "shop@v3", "shop@v2", "shop@v1"]
    assert (updates[0]["id"], updates[0]["reason"], updates[0]["metrics"]) == (
        refused.id,
        "nothing to learn",
        {"a": 1.0},
    )
    assert [row["parent"] for row in updates] == ["shop@v3", "shop@v2", "shop@v1", "shop@v0"]
    assert (await harness.api.get(f"{ROOT}/updates", params={"after": "bat-nobody"})).status_code == 404


async def test_rewards_are_set_shown_and_reset(harness: Harness) -> None:
    before = (await harness.api.get(f"{ROOT}/rewards")).json()
    assert before["overridden"] is False and [source["type"] for source in before["rewards"]["sources"]] == ["explicit"]
    config = {"sources": [EXPLICIT, JUDGE, {"type": "rule", "name": "tools", "function": "tool_outcome"}]}
    after = (await harness.api.put(f"{ROOT}/rewards", json=config)).json()
    assert after["overridden"] is True and after["rewards"]["sources"][1]["url"] == JUDGE["url"]
    assert (await harness.api.put(f"{ROOT}/rewards", json=after["rewards"])).json() == after
    assert (await harness.api.delete(f"{ROOT}/rewards")).json() == before
    assert (await harness.policy()).rewards is None
    async with harness.db.read() as session:
        assert await session.get(Policy, (await harness.policy()).id, populate_existing=True) is not None
    assert [row.action for row in await harness.all(Audit)] == ["rewards.updated", "rewards.updated", "rewards.reset"]


@pytest.mark.parametrize(
    ("sources", "param"),
    [
        ([{"type": "rule", "name": "mine", "function": "os:system"}], "sources.0.function"),
        ([{"type": "rule", "name": "mine", "function": "nobodys"}], "sources.0.function"),
        ([EXPLICIT, {**JUDGE, "key": "judge"}], "sources.1.key"),
        ([EXPLICIT, {**JUDGE, "url": "https://me:secret@judge.example"}], "sources.1.url"),
        ([EXPLICIT, {**JUDGE, "weight": "1"}], "sources.1.weight"),
        ([EXPLICIT, {**JUDGE, "secret": "x"}], "sources.1.secret"),
        ([EXPLICIT, EXPLICIT], None),
        ([{"type": "nobody"}], "sources.0.type"),
        ([], None),
    ],
)
async def test_invalid_rewards_are_refused_with_one_sentence(
    harness: Harness, sources: list[dict[str, Any]], param: str | None
) -> None:
    answer = await harness.api.put(f"{ROOT}/rewards", json={"sources": sources})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"] and "\n" not in error["message"]
    assert (await harness.policy()).rewards is None


async def test_the_first_samples_of_a_backlog_are_counted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_COUNTED", 3)
    for number in range(5):
        await create_sample(harness, ready_at=float(number), rater=f"HUMAN/{number}", reward=1.0)
        await create_sample(harness, ready_at=1e12 + number)
        await create_sample(harness, state=SampleState.QUARANTINED)
    body = await read_status(harness)
    assert body["samples"] == {"open": 3, "not_ready": 3, "quarantined": 5} and body["raters"] == 3
    assert body["waiting_for"].startswith("All 3 ready samples have the reward 1")
    assert body["waiting_for"].endswith(". This is about the first 3 of the ready samples.")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
async def test_the_state_of_learning_costs_the_same_however_many_samples_wait(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(service, "MAX_COUNTED", 100)
    settings = harness.settings.replace({"algorithm": GRPOConfig()}) if algorithm == "grpo" else harness.settings
    policy = await harness.policy()

    async def read() -> None:
        async with harness.db.read() as session:
            counts = await service.count_samples(session, policy, settings)
            await explain_wait(session, policy, counts, settings, triggered=False)
            assert (counts.ready, counts.is_limited) == (100, True)

    amounts: list[int] = []
    for prefix, count in (("a", 500), ("b", 2000)):
        await add_samples(harness, count, lambda number: 1.0, prefix)
        async with harness.db.write() as session:
            is_new = Sample.turn_id.startswith(f"chatcmpl-{prefix}")
            later = {"ready_at": Sample.ready_at + 1000.0 * len(amounts)}  # so that the first ones are the same
            await session.execute(update(Sample).where(is_new).values(later))
            await fill_columns(session, policy.id, 10_000)
            await session.execute(update(Sample).values(changed_at=0.0))
        while await sample_totals.count_miscounted(harness.db):
            pass
        await analyze(harness)
        await read()
        async with count_work(harness.db) as work:
            await read()
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20
