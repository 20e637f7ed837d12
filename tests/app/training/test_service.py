"""How a policy's learning is seen and steered."""

from typing import Any

import pytest

from app.core.database import now
from app.core.settings import Settings
from app.models import Audit, LearningMode, Policy, Sample, SampleState, VersionState
from app.training import service
from tests.support.deployment import Harness
from tests.support.trained_versions import frozen, trained

ROOT = "/v1/policies/shop"
JUDGE = {"type": "judge", "name": "judge", "url": "https://judge.example/v1", "model": "m"}
EXPLICIT = {"type": "explicit", "name": "explicit"}


async def told(harness: Harness) -> dict[str, Any]:
    answer = await harness.api.get(f"{ROOT}/training")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def sample(harness: Harness, **values: Any) -> None:
    turn = await harness.turn()
    same = {"policy_id": turn.policy_id, "version_id": turn.version_id, "reward": 1.0, "ready_at": 0.0}
    async with harness.db.write() as session:
        session.add(Sample(**{"turn_id": turn.id, **same, **values}))


async def test_paused_and_resumed_it_says_who_and_why(harness: Harness) -> None:
    assert (await told(harness))["mode"] == "asynchronous"
    paused = await harness.api.post(f"{ROOT}/training/pause", json={"reason": "a bad day"})
    assert (paused.json()["mode"], paused.json()["reason"]) == ("halted", "a bad day")
    assert paused.json()["since"] is not None
    assert paused.json()["missing"] == "Learning is halted until an operator resumes it."
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).kl_alarms = 3
    resumed = await harness.api.post(f"{ROOT}/training/resume", json={"reason": "mended"})
    assert (resumed.json()["mode"], resumed.json()["alarms"]) == ("asynchronous", 0)
    moves = [(row.actor, row.action, row.reason) for row in await harness.all(Audit)]
    assert moves == [
        (harness.key[:16], "learning halted", "a bad day"),
        (harness.key[:16], "learning asynchronous", "mended"),
    ]


async def test_samples_that_wait_are_told_apart(harness: Harness) -> None:
    for rater in ("HUMAN/ada", "HUMAN/ada", "HUMAN/bob", None, None):
        await sample(harness, rater=rater)
    await sample(harness, ready_at=1e12, rater="HUMAN/eve")
    await sample(harness, state=SampleState.QUARANTINED)
    await sample(harness, state=SampleState.DROPPED)
    body = await told(harness)
    assert body["samples"] == {"open": 5, "not_ready": 1, "quarantined": 1}
    assert body["raters"] == 4


async def test_it_says_what_the_next_batch_waits_for(harness: Harness) -> None:
    await sample(harness, rater="HUMAN/ada")
    assert (await told(harness))["missing"] == "1 more ripe samples."
    async with harness.db.read() as session:
        policy = await harness.policy()

        async def missing(**settings: Any) -> str:
            chosen = Settings(**{"batch_size": 8, "max_rater_share": 1.0, **settings})
            waits = await service.waiting(session, policy, chosen)
            return await service.missing(session, policy, waits._replace(clock=10.0), chosen, at_once=False)

        for _ in range(3):
            await sample(harness, rater="HUMAN/ada")
        assert await missing(min_raters=3) == "2 more raters."
        late = "4 more ripe samples; in 290 s those that are there will do."
        assert await missing(max_wait_seconds=300) == late
        assert (await missing(max_wait_seconds=5)).startswith("Nothing")
        assert (await missing(batch_size=4)).startswith("Nothing")
    batch = await frozen(harness)
    assert (await told(harness))["missing"] == f"An update is under way: {batch.id}."


async def test_what_is_beyond_somebodys_share_is_not_counted(harness: Harness) -> None:
    """Six of one rater and one of another; of a batch of eight a rater may have two, a cluster four."""
    for _ in range(6):
        await sample(harness, rater="HUMAN/ada")
    await sample(harness, rater="HUMAN/bob")
    async with harness.db.read() as session:
        policy = await harness.policy()

        async def missing(**settings: Any) -> str:
            chosen = Settings(**{"batch_size": 8, "max_conversation_share": 1.0, "max_cluster_share": 1.0, **settings})
            waits = await service.waiting(session, policy, chosen)
            return await service.missing(session, policy, waits._replace(clock=10.0), chosen, at_once=False)

        short = await missing(max_rater_share=0.25, min_batch_size=4)
        assert short.startswith("1 more ripe samples of other raters at least: of the 7 ripe ones no more than 3 may")
        assert "ATTUNE_MAX_RATER_SHARE" in short
        later = await missing(max_rater_share=0.25, min_batch_size=2)
        assert later.startswith("5 more ripe samples of other raters; in ")
        assert (await missing(max_rater_share=1.0, min_batch_size=4)).startswith("1 more ripe samples; in ")


async def test_a_version_on_its_way_home_is_waited_for(harness: Harness) -> None:
    await trained(harness, await harness.turn(), state=VersionState.TRAINED)
    assert (await told(harness))["missing"] == "shop@v1 has yet to be published."


async def test_after_an_alarm_only_the_heads_own_samples_count(harness: Harness) -> None:
    await sample(harness)
    await trained(harness, await harness.turn())
    assert (await told(harness))["samples"]["open"] == 1
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).mode = LearningMode.SYNCHRONOUS
    assert (await told(harness))["samples"]["open"] == 0


async def test_a_trigger_holds_until_a_batch_is_frozen(harness: Harness) -> None:
    for _ in range(2):
        await sample(harness, ready_at=now())
    assert (await told(harness))["missing"].startswith("6 more ripe samples")
    body = (await harness.api.post(f"{ROOT}/training/trigger", json={"reason": "show it"})).json()
    assert body["triggered"] is True and body["missing"].startswith("Nothing")
    batch = await frozen(harness)
    assert (await told(harness))["triggered"] is False
    assert [row["id"] for row in (await told(harness))["updates"]] == [batch.id]


async def test_what_is_halted_is_not_triggered(harness: Harness) -> None:
    await harness.api.post(f"{ROOT}/training/pause")
    answer = await harness.api.post(f"{ROOT}/training/trigger")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "learning_halted")


async def test_updates_are_listed_with_what_became_of_them(harness: Harness) -> None:
    for _ in range(3):
        await trained(harness, await harness.turn())
    refused = await frozen(harness, state="refused", reason="nothing to learn", metrics={"a": 1.0})
    seen: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = (await harness.api.get(f"{ROOT}/updates", params={"limit": 2, **after})).json()
        seen += page["data"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert [row["version"] for row in seen] == [None, "shop@v3", "shop@v2", "shop@v1"]
    assert (seen[0]["id"], seen[0]["reason"], seen[0]["metrics"]) == (refused.id, "nothing to learn", {"a": 1.0})
    assert [row["parent"] for row in seen] == ["shop@v3", "shop@v2", "shop@v1", "shop@v0"]
    assert (await harness.api.get(f"{ROOT}/updates", params={"after": "bat-nobody"})).status_code == 404


async def test_rewards_are_set_shown_and_reset(harness: Harness) -> None:
    before = (await harness.api.get(f"{ROOT}/rewards")).json()
    assert before["own"] is False and [one["type"] for one in before["rewards"]["sources"]] == ["explicit"]
    config = {"sources": [EXPLICIT, JUDGE, {"type": "rule", "name": "tools", "function": "tool_outcome"}]}
    after = (await harness.api.put(f"{ROOT}/rewards", json=config)).json()
    assert after["own"] is True and after["rewards"]["sources"][1]["url"] == JUDGE["url"]
    assert (await harness.api.put(f"{ROOT}/rewards", json=after["rewards"])).json() == after
    assert (await harness.api.delete(f"{ROOT}/rewards")).json() == before
    assert (await harness.policy()).rewards is None
    async with harness.db.read() as session:
        assert await session.get(Policy, (await harness.policy()).id, populate_existing=True) is not None
    assert [row.action for row in await harness.all(Audit)] == ["set rewards", "set rewards", "reset rewards"]


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
        ([{"type": "nobody"}], "sources.0"),
        ([], None),
    ],
)
async def test_rewards_that_cannot_be_are_refused_with_one_sentence(
    harness: Harness, sources: list[dict[str, Any]], param: str | None
) -> None:
    answer = await harness.api.put(f"{ROOT}/rewards", json={"sources": sources})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"] and "\n" not in error["message"]
    assert (await harness.policy()).rewards is None
