"""Episodes in erasures, exports, retention and lineage."""

import io
from typing import Any

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from sqlalchemy import update

from app.core.database import now
from app.models import Episode, Feedback, Reward, Sample, SampleState, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import create_version
from workers.curate import curate
from workers.retention import remove_expired

SECRET = "canary-5f1c0e"


async def create(harness: Harness, *end_users: str, **values: Any) -> tuple[dict[str, Any], list[Turn]]:
    """Create an episode with a turn of each end user, and end it."""
    episode = await episodes.create(harness, task=SECRET, metadata={"name": SECRET})
    turns = [
        await harness.turn(
            end_user=user, episode_id=episode["id"], episode_step=step, agent=SECRET, state_key=SECRET, **values
        )
        for step, user in enumerate(end_users, 1)
    ]
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    return episode, turns


async def test_erasure_of_a_person_erases_the_episodes_of_their_turns(harness: Harness) -> None:
    alone, _ = await create(harness, "ada", "ada")
    shared, [_, of_bob] = await create(harness, "ada", "bob")
    assert (await harness.api.delete("/v1/subjects/ada")).status_code == 200
    rows = {row.id: row for row in await harness.all(Episode)}
    assert {(row.task, str(row.request_metadata), row.erased_at is None) for row in rows.values()} == {
        (None, "{}", False)
    }
    assert (rows[alone["id"]].outcome, rows[shared["id"]].outcome) == (None, 1.0)
    assert [row.episode_id for row in await harness.all(Feedback) if row.kind == "score"] == [shared["id"]]
    names = {turn.id: (turn.agent, turn.state_key) for turn in await harness.all(Turn)}
    assert {id: name for id, name in names.items() if any(name)} == {of_bob.id: (SECRET, SECRET)}
    await curate(harness.db, harness.settings)
    assert {row.turn_id: row.value for row in await harness.all(Reward)}[of_bob.id] == 1.0


async def test_export_of_a_person_has_their_episodes(harness: Harness) -> None:
    episode, turns = await create(harness, "ada", "bob")
    body = (await harness.api.get("/v1/subjects/ada/export")).content
    lines = [orjson.loads(line) for line in body.splitlines()]
    [exported] = [line for line in lines if line["object"] == "episode"]
    assert (exported["id"], exported["task"], exported["outcome"]) == (episode["id"], SECRET, 1.0)
    assert not exported.keys() & {"key_sha256", "fingerprint", "end_fingerprint"}
    [turn] = [line for line in lines if line["object"] == "turn"]
    assert (turn["id"], turn["episode_id"], turn["episode_step"]) == (turns[0].id, episode["id"], 1)


async def test_exported_turns_name_their_episode(harness: Harness) -> None:
    episode, turns = await create(harness, "ada", "bob")
    table = pq.read_table(io.BytesIO((await harness.api.get("/v1/exports/turns")).content))
    rows = {
        row["id"]: (row["episode_id"], row["episode_step"], row["agent"], row["state_key"]) for row in table.to_pylist()
    }
    assert rows == {turn.id: (episode["id"], step, SECRET, SECRET) for step, turn in enumerate(turns, 1)}


async def test_content_of_an_episode_expires_with_its_turns(harness: Harness) -> None:
    episode, _ = await create(harness, "ada", processed=True)
    empty = await episodes.create(harness, task=SECRET)
    await episodes.end(harness, empty["id"])
    running = await episodes.create(harness, task=SECRET)
    old = now() - 100 * 86_400
    async with harness.db.write() as session:
        await session.execute(update(Episode).values(created_at=old))
    await remove_expired(harness.db, harness.settings)
    tasks = {row.id: row.task for row in await harness.all(Episode)}
    assert tasks == {episode["id"]: SECRET, empty["id"]: None, running["id"]: SECRET}
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(deleted_at=now()))
    await remove_expired(harness.db, harness.settings)
    row = await harness.get(Episode, episode["id"])
    assert (row.task, row.request_metadata, row.outcome, row.state) == (None, {}, 1.0, "ended")


async def test_lineage_of_an_outcome_names_the_version_that_learned_from_it(harness: Harness) -> None:
    _, turns = await create(harness, "ada", "ada")
    [feedback] = await harness.all(Feedback)
    await create_version(harness, *turns)
    learned = (await harness.api.get(f"/v1/feedback/{feedback.id}/lineage")).json()
    assert [row["version"] for row in learned["data"]] == ["shop@v1"]
    lineage = (await harness.api.get("/v1/policies/shop/versions/1/lineage")).json()["data"]
    assert {(row["turn_id"], row["feedback_id"]) for row in lineage} == {(turn.id, feedback.id) for turn in turns}


async def test_deleted_completion_leaves_the_other_chats_of_its_episode(harness: Harness) -> None:
    episode, [first, second] = await create(harness, "ada", "ada")
    assert (await harness.api.delete(f"/v1/chat/completions/{first.id}")).status_code == 200
    shown = (await harness.api.get("/v1/turns", params={"episode_id": episode["id"]})).json()["data"]
    assert [row["id"] for row in shown if row["reply"]] == [second.id]
    story = (await harness.api.get(f"/v1/turns/{second.id}/story")).json()
    assert (story["episode_id"], story["episode_step"], len(story["feedback"])) == (episode["id"], 2, 1)


async def test_deletion_erases_all_chats_and_what_was_learned_next(harness: Harness) -> None:
    episode, turns = await create(harness, "ada", "bob")
    _, others = await create(harness, "ada")
    path = f"/v1/episodes/{episode['id']}"
    for _ in range(2):
        deleted = await harness.api.delete(path)
        assert (deleted.status_code, deleted.json()["object"]) == (200, "episode.deleted"), deleted.text
    rows = {turn.id: turn for turn in await harness.all(Turn)}
    assert {rows[turn.id].reply for turn in turns} == {None} and rows[others[0].id].reply is not None
    states = {sample.turn_id: sample.state for sample in await harness.all(Sample)}
    assert {states[turn.id] for turn in turns} == {SampleState.DROPPED}
    assert states[others[0].id] == SampleState.OPEN
    shown = (await harness.api.get(path)).json()
    assert (shown["task"], shown["metadata"], shown["outcome"], shown["num_turns"]) == (None, {}, None, 2)
    assert SECRET not in str(shown)


async def test_deleted_episode_that_was_open_gets_no_further_chat(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, task=SECRET, group={"id": SECRET, "size": 2}, trace_id="a" * 32)
    assert (await episodes.chat(harness, episode)).status_code == 200
    own_key = episodes.auth(episode["api_key"])
    assert (await harness.api.delete(f"/v1/episodes/{episode['id']}", headers=own_key)).status_code == 403
    assert (await harness.api.delete(f"/v1/episodes/{episode['id']}")).status_code == 200
    refused = await episodes.chat(harness, episode)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_ended")
    [row] = await harness.all(Episode)
    assert (row.end_reason, row.group_id, row.trace_id) == ("abandoned", None, None)
    assert (await harness.api.delete("/v1/episodes/ep-0")).status_code == 404
