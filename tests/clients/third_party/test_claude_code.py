"""Claude Code, from its npm package, against the API and a scripted engine: a text, and a loop with a command."""

import json

import pytest

from app.models import Turn, TurnState
from tests.clients.third_party.environments import run_program
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

COMMAND = json.dumps({"command": "echo answer-$((40 + 2))", "description": "Add."})


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing the environment is part of it
async def test_claude_code_gets_a_text_and_runs_a_command(
    harness: Harness, scripted: ScriptedEngine, live_url: str
) -> None:
    """Thinking comes back as it was sent: each turn of the loop begins with the recorded tokens."""
    scripted.text_before_call = True
    scripted.reply_text = "<think>\nFriday?\n</think>\n\nFrom nine to six."
    scripted.tool_call, scripted.answers_results = ("Bash", COMMAND), True
    done = run_program("claude_code", "program.mjs", f"{live_url}/v1", harness.key)
    assert done.returncode == 0 and done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for name in ("text", "loop"):
        assert report[name]["is_error"] is False and report[name]["result"] == "From nine to six.", report[name]
    turns = [turn for turn in await harness.all(Turn) if turn.state == TurnState.DONE]
    assert [turn.conversation_id for turn in turns] == [report["text"]["session_id"]] + 2 * [
        report["loop"]["session_id"]
    ]
    assert all(turn.end_user and len(turn.end_user) == 64 for turn in turns)
    _, called, answered = turns
    assert called.parent_id is None and (answered.parent_id, answered.prefix_reuse) == (called.id, "exact")
    results = [message["content"] for message in await harness.messages(answered.id) if message["role"] == "tool"]
    assert results == ["answer-42"]
    assert all("x-anthropic-billing-header" not in str(request["messages"]) for request in scripted.requests)
