"""Standings of raters and the list of quarantined samples."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import func, insert, inspect, select
from typer.testing import CliRunner

from app.cli.main import app
from app.core.settings import Settings
from app.models import Audit, Rater, RaterStanding, Reward, Sample, SampleState, Turn
from app.projects.service import create_project
from tests.support import episodes
from tests.support.cli import cli_harness
from tests.support.deployment import Harness
from tests.support.settings import by_path
from workers.curate import curate

__all__ = ["cli_harness"]
SOURCE = {"kind": "HUMAN", "id": "shop/7 ä"}
NAME = "HUMAN/shop/7 ä"
PATH = "/v1/raters/HUMAN/shop/7%20%C3%A4"


def with_limits(harness: Harness, **limits: int) -> Settings:
    return harness.settings.replace(by_path({"trust": True, **limits}))


async def exceed_daily_limit(harness: Harness, others: Sequence[str] = ()) -> list[str]:
    """Record three ratings of one rater where two are allowed, and ratings of others on the first turn.

    Returns the turn ids.
    """
    turns = [(await harness.turn()).id for _ in range(3)]
    for turn_id in turns:
        assert (await harness.vote(turn_id, source=SOURCE)).status_code == 201
    for other in others:
        await harness.vote(turns[0], "down", source={"kind": "HUMAN", "id": other})
    await curate(harness.db, with_limits(harness, max_rater_day=2))
    return turns


async def states(harness: Harness) -> dict[str, str]:
    return {sample.turn_id: sample.state for sample in await harness.all(Sample)}


async def test_quarantine_is_listed_in_pages_with_reasons(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness)
    first = (await harness.api.get("/v1/quarantine", params={"limit": 2})).json()
    rest = (await harness.api.get("/v1/quarantine", params={"after": first["last_id"]})).json()
    listed = first["data"] + rest["data"]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert sorted(row["turn_id"] for row in listed) == sorted(turns)
    assert {(row["rater"], row["policy"], row["reason"]) for row in listed} == {
        (NAME, "shop", "3 rewards in a day, more than the limit of 2")
    }
    unknown = await harness.api.get("/v1/quarantine", params={"after": "chatcmpl-none"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


async def test_raters_are_listed_by_name_and_standing(harness: Harness) -> None:
    await exceed_daily_limit(harness, others=["a", "b"])
    everybody = (await harness.api.get("/v1/raters", params={"limit": 2})).json()
    assert [row["name"] for row in everybody["data"]] == ["HUMAN/a", "HUMAN/b"] and everybody["has_more"]
    rest = (await harness.api.get("/v1/raters", params={"after": everybody["last_id"]})).json()
    assert [row["name"] for row in rest["data"]] == [NAME], "the crowd is not listed as a rater"
    held = (await harness.api.get("/v1/raters", params={"standing": "quarantined"})).json()["data"]
    assert [(row["name"], row["num_up"]) for row in held] == [(NAME, 3)]
    assert 0 < held[0]["weight"] < 0.4, "two others have contradicted"


async def test_normal_standing_releases_samples_and_is_audited(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness)
    response = await harness.api.put(PATH, json={"standing": "normal", "reason": "a tester"})
    assert (response.status_code, response.json()["samples"], response.json()["reason"]) == (200, 3, "a tester")
    assert await states(harness) == dict.fromkeys(turns, SampleState.OPEN)
    assert {sample.reason for sample in await harness.all(Sample)} == {None}
    audits = [row for row in await harness.all(Audit) if row.action == "rater.normal"]
    assert [(row.subject, row.reason, row.details["samples"]) for row in audits] == [(NAME, "a tester", 3)]
    again = await harness.api.put(PATH, json={"standing": "normal"})
    assert (again.status_code, again.json()["samples"]) == (200, 0)


async def test_block_drops_samples_and_later_ones(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness)
    assert (await harness.api.put(PATH, json={"standing": "blocked"})).json()["samples"] == 3
    assert await states(harness) == dict.fromkeys(turns, SampleState.DROPPED)
    later = await harness.turn()
    await harness.vote(later.id, source=SOURCE)
    await curate(harness.db, with_limits(harness))
    assert SampleState.OPEN not in (await states(harness)).values()
    assert {row.weight for row in await harness.all(Reward)} == {0.0}


async def test_block_keeps_rewards_of_others(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness, others=["a"])
    assert (await harness.api.put(PATH, json={"standing": "blocked"})).json()["samples"] == 2
    await curate(harness.db, with_limits(harness))
    sample = await harness.get(Sample, turns[0])
    assert (sample.state, sample.reward, sample.rater) == (SampleState.OPEN, -1.0, "HUMAN/a")


@pytest.mark.parametrize("whole", ["conversation_id", "episode_id"])
async def test_block_computes_again_what_others_say_of_the_whole_conversation(harness: Harness, whole: str) -> None:
    """Nobody has given feedback on one of its turns, which would be processed again for that turn."""
    episode = await episodes.create(harness)
    place = {"conversation_id": "c9", "episode_id": episode["id"]}
    turns = [(await harness.turn(**place, episode_step=step)).id for step in (1, 2)]
    await episodes.end(harness, episode["id"])
    for source, value in ((SOURCE, True), ({"kind": "HUMAN", "id": "a"}, False)):
        body = {"target": {whole: place[whole]}, "kind": "binary", "value": value, "source": source}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, harness.settings)
    assert [(await harness.get(Sample, id)).reward for id in turns] == [0.0, 0.0]
    assert (await harness.api.put(PATH, json={"standing": "blocked"})).json()["samples"] == 0
    await curate(harness.db, harness.settings)
    for sample in [await harness.get(Sample, id) for id in turns]:
        assert (sample.state, sample.reward, sample.rater) == (SampleState.OPEN, -1.0, "HUMAN/a")
        assert sample.ready_at <= sample.changed_at


async def test_sample_of_two_quarantined_raters_waits_for_both(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness, others=["a"])
    assert (await harness.api.put("/v1/raters/HUMAN/a", json={"standing": "quarantined"})).json()["samples"] == 0
    assert (await harness.api.put(PATH, json={"standing": "normal"})).json()["samples"] == 2
    assert (await states(harness))[turns[0]] == SampleState.QUARANTINED
    await harness.api.put("/v1/raters/HUMAN/a", json={"standing": "trusted"})
    assert (await states(harness))[turns[0]] == SampleState.OPEN


async def test_batched_sample_stays_in_batch(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, source=SOURCE)
    await curate(harness.db, with_limits(harness))
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.TRAINED
    assert (await harness.api.put(PATH, json={"standing": "blocked"})).json()["samples"] == 0
    assert await states(harness) == {turn.id: SampleState.TRAINED}


async def test_standing_can_be_set_before_first_feedback(harness: Harness) -> None:
    response = await harness.api.put("/v1/raters/HUMAN/tester", json={"standing": "trusted"})
    assert (response.json()["standing"], response.json()["reason"]) == ("trusted", "trusted by an admin")
    await harness.vote((await harness.turn()).id, source={"kind": "HUMAN", "id": "tester"})
    await curate(harness.db, with_limits(harness))
    assert [row.weight for row in await harness.all(Reward)] == [1.0]


@pytest.mark.parametrize("name", ["everybody", "*", "/7", "HUMAN/a%00b"])
async def test_invalid_rater_name_is_refused(name: str, harness: Harness) -> None:
    response = await harness.api.put(f"/v1/raters/{name}", json={"standing": "quarantined"})
    assert response.status_code == 400
    assert await harness.all(Rater) == []


async def test_other_project_sees_and_changes_nothing(harness: Harness) -> None:
    turns = await exceed_daily_limit(harness)
    async with harness.db.write() as session:
        _, key = await create_project(session, "other", "shop", "model")
    theirs: dict[str, Any] = {"headers": {"authorization": f"Bearer {key}"}}
    assert (await harness.api.get("/v1/raters", **theirs)).json()["data"] == []
    assert (await harness.api.get("/v1/quarantine", **theirs)).json()["data"] == []
    assert (await harness.api.get("/v1/quarantine", params={"after": turns[0]}, **theirs)).status_code == 404
    assert (await harness.api.put(PATH, json={"standing": "normal"}, **theirs)).json()["samples"] == 0
    assert set((await states(harness)).values()) == {SampleState.QUARANTINED}


async def test_admin_scope_is_required(harness: Harness) -> None:
    new_key = (await harness.api.post("/v1/keys", json={"scopes": ["chat", "feedback"]})).json()
    mere = {"authorization": f"Bearer {new_key['key']}"}
    assert (await harness.api.get("/v1/raters", headers=mere)).status_code == 403
    assert (await harness.api.get("/v1/quarantine", headers=mere)).status_code == 403
    assert (await harness.api.put(PATH, json={"standing": "trusted"}, headers=mere)).status_code == 403


async def test_cli_lists_and_sets_standings(cli_harness: Harness) -> None:
    run = CliRunner().invoke
    await exceed_daily_limit(cli_harness)
    assert "3 rewards in a day" in run(app, ["raters", "list", "--standing", "quarantined"]).stdout
    for command, standing in (
        ("release", "normal"),
        ("quarantine", "quarantined"),
        ("trust", "trusted"),
        ("block", "blocked"),
    ):
        listed = run(app, ["raters", command, NAME, "--reason", "spam"]).stdout
        assert listed.strip() == f"{NAME} is {standing}; 3 samples changed state"
    [row] = json.loads(run(app, ["raters", "list", "--json"]).stdout)
    assert (row["name"], row["standing"], row["reason"]) == (NAME, RaterStanding.BLOCKED, "spam")
    assert [rater.reason for rater in await cli_harness.all(Rater) if rater.name == NAME] == ["spam"]


@pytest.mark.timeout(600)
async def test_forty_thousand_samples_are_updated_at_once(harness: Harness) -> None:
    """More samples than a statement has parameters: 32,766 in SQLite, 65,535 in PostgreSQL's protocol."""
    many = 40_000
    template = await harness.get(Turn, (await harness.turn()).id)
    async with harness.db.write() as session:
        turn = {one.key: getattr(template, one.key) for one in inspect(Turn).column_attrs}
        for start in range(0, many, 2000):
            ids = [f"chatcmpl-{number:05}" for number in range(start, start + 2000)]
            await session.execute(insert(Turn), [{**turn, "id": id, "completion_id": id} for id in ids])
            await session.execute(
                insert(Reward),
                [
                    {
                        "id": f"rew-{id}",
                        "turn_id": id,
                        "source": NAME,
                        "reward_source": "explicit",
                        "rater": NAME,
                        "value": 1.0,
                    }
                    for id in ids
                ],
            )
            sample = {"policy_id": template.policy_id, "version_id": template.version_id, "reward": 1.0, "rater": NAME}
            await session.execute(insert(Sample), [{**sample, "turn_id": id, "ready_at": 0.0} for id in ids])

    for standing, state in (
        ("quarantined", "quarantined"),
        ("normal", "open"),
        ("quarantined", "quarantined"),
        ("blocked", "dropped"),
    ):
        response = await harness.api.put(PATH, json={"standing": standing})
        assert (response.status_code, response.json().get("samples")) == (200, many), response.text
        async with harness.db.read() as session:
            counted = await session.execute(select(Sample.state, func.count()).group_by(Sample.state))
        assert {name: count for name, count in counted} == {state: many}
