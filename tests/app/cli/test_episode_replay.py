"""`attune episodes replay`: prompts of an episode are sent again, and nothing else changes."""

import json

from app.cli.main import app
from app.models import Origin, Turn
from tests.support import episodes
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is tea?"}


async def test_replies_of_now_are_compared_with_the_recorded_ones(
    cli_harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.tool_call = ("search", '{"query":"tea", "k":1}')
    scripted.answers_results = True
    episode = await episodes.create(cli_harness, task="facts")
    response = await episodes.chat(cli_harness, episode, messages=[QUESTION], tools=[TOOL])
    call = response.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "A drink."}
    messages = [QUESTION, {"role": "assistant", "tool_calls": call["tool_calls"]}, result]
    await episodes.chat(cli_harness, episode, messages=messages, tools=[TOOL])
    await episodes.end(cli_harness, episode["id"])

    scripted.tool_call = ("search", '{"k": 1, "query": "tea"}')
    scripted.reply_text = "Tea is a drink."
    rows = json.loads(run(app, ["episodes", "replay", episode["id"], "--json"]).stdout)
    assert [(row["step"], row["recorded"], row["reply"], row["is_same"]) for row in rows] == [
        (1, 'search({"k": 1, "query": "tea"})', 'search({"k": 1, "query": "tea"})', True),
        (2, "We are open from nine to six.", "Tea is a drink.", False),
    ]
    sent = scripted.requests[-2:]
    assert [(len(body["messages"]), bool(body["tools"]), body["temperature"]) for body in sent] == [
        (1, True, 0),
        (3, True, 0),
    ]
    turns = await cli_harness.all(Turn)
    assert [(turn.origin, turn.episode_id is None) for turn in turns] == [
        (Origin.CHAT, False),
        (Origin.CHAT, False),
        (Origin.TASK, True),
        (Origin.TASK, True),
    ]
    assert all(turn.exclusion_reason for turn in turns if turn.origin == Origin.TASK)

    shown = run(app, ["episodes", "replay", episode["id"], "--step", "2", "--model", "shop@v0"]).output
    assert "Tea is a drink." in shown and "0 of 1 replies are the same" in shown


async def test_what_cannot_be_replayed_says_why(cli_harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(cli_harness)
    empty = run(app, ["episodes", "replay", episode["id"]])
    assert empty.exit_code == 1 and "has no chats whose replies are stored" in empty.output
    await episodes.chat(cli_harness, episode)
    other = run(app, ["episodes", "replay", episode["id"], "--step", "7"])
    assert other.exit_code == 1 and "has no chats with the steps 7" in other.output
    version = run(app, ["episodes", "replay", episode["id"], "--model", "shop@v9"])
    assert version.exit_code == 1 and "v9" in version.output
    assert run(app, ["episodes", "delete", episode["id"], "--yes"]).exit_code == 0
    erased = run(app, ["episodes", "replay", episode["id"]])
    assert erased.exit_code == 1 and "its content was erased" in erased.output
