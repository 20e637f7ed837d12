"""Commands episodes list and show."""

import json

from app.cli.main import app
from tests.support import episodes
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_episodes_are_listed_and_shown(cli_harness: Harness) -> None:
    one, other = [await episodes.create(cli_harness, task=task) for task in ("refund", "greeting")]
    for step, agent in enumerate(("planner", "worker"), 1):
        await cli_harness.turn(episode_id=one["id"], episode_step=step, agent=agent)
    await episodes.end(cli_harness, one["id"], outcome=0.5)
    listed = run(app, ["episodes", "list"]).output
    assert one["id"] in listed and other["id"] in listed and "completed" in listed and "0.5" in listed
    assert [row["id"] for row in json.loads(run(app, ["episodes", "list", "--state", "open", "--json"]).stdout)] == [
        other["id"]
    ]
    shown = run(app, ["episodes", "show", one["id"]]).output
    assert "ended (completed)" in shown and "task refund, outcome 0.5, 2 chats with 4 tokens" in shown
    turns = json.loads(run(app, ["episodes", "show", one["id"], "--json"]).stdout)["turns"]
    assert [turn["agent"] for turn in turns] == ["planner", "worker"]
    assert "open" in run(app, ["episodes", "show", other["id"]]).output
    unknown = run(app, ["episodes", "show", "ep-0"])
    assert unknown.exit_code == 1 and "There is no episode" in unknown.output


async def test_chats_are_shown_as_a_tree(cli_harness: Harness) -> None:
    episode = await episodes.create(cli_harness, group={"id": "ticket-7", "size": 2})
    own = {"episode_id": episode["id"], "prefix_reuse": "exact"}
    root = await cli_harness.turn(**own, episode_step=1, agent="planner")
    worker = await cli_harness.turn(**own, episode_step=2, agent="worker")
    main = await cli_harness.turn(**own, episode_step=3, agent="planner", parent_id=root.id)
    fork = await cli_harness.turn(**own | {"prefix_reuse": "the tools have changed"}, episode_step=4, parent_id=root.id)
    last = await cli_harness.turn(**own, episode_step=5, agent="planner", parent_id=main.id)
    shown = run(app, ["episodes", "show", episode["id"]]).output
    lines = [line for line in shown.splitlines() if "chatcmpl-" in line]
    assert [turn.id in line for turn, line in zip((root, main, last, fork, worker), lines, strict=True)] == [True] * 5
    assert f"│   {fork.id}" in lines[3] and "1 (messages)" in lines[3] and f"│ {main.id}" in lines[1]
    assert "one of 2 attempts of the group ticket-7" in shown
    listed = json.loads(run(app, ["episodes", "list", "--group", "ticket-7", "--json"]).stdout)
    assert [row["id"] for row in listed] == [episode["id"]]
    declined = run(app, ["episodes", "delete", episode["id"]], input="n\n")
    assert declined.exit_code == 1 and "Erase 5 chats permanently?" in declined.output
    assert "with all its chats" in run(app, ["episodes", "delete", episode["id"], "--yes"]).output
    assert "ended (abandoned)" in run(app, ["episodes", "show", episode["id"]]).output
