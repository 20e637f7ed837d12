"""The planner and its workers: which chats are whose, and which reward each of them has."""

import re
from collections import Counter
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from app.models import Episode, Feedback, Turn
from examples import planner_and_workers as example
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture(autouse=True)
def command_line(service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["planner_and_workers", "--policy", "shop", "--tasks", "1", "--group", "2"])


def reply_to(body: dict[str, Any]) -> str:
    """Return the reply of an agent that makes no mistake."""
    message = body["messages"][-1]["content"]
    if message.startswith("Split"):
        return "\n".join(re.findall(r"\d+ \* \d+", message))
    if message.startswith("Calculate"):
        [(left, right)] = re.findall(r"(\d+) \* (\d+)", message)
        return f"It is {int(left) * int(right)}."
    total = sum(map(int, re.findall(r"is (\d+)", message)))
    return f"The sum is {total}."


async def test_agents_and_their_rewards(
    harness: Harness, scripted: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.reply_to = reply_to
    example.main()
    assert capsys.readouterr().out.count("2 of 2 parts are right, outcome 1\n") == 2
    episodes = await harness.all(Episode)
    assert [(row.end_reason, row.outcome, row.group_size) for row in episodes] == [("completed", 1.0, 2)] * 2
    assert len({(row.task, row.group_id) for row in episodes}) == 1
    turns = [turn for turn in await harness.all(Turn) if turn.episode_id == episodes[0].id]
    assert [turn.exclusion_reason for turn in turns] == [None] * 4
    assert Counter(turn.agent for turn in turns) == {"planner": 2, "worker": 2}
    planner = sorted((turn for turn in turns if turn.agent == "planner"), key=lambda turn: turn.episode_step)
    assert [turn.parent_id for turn in planner] == [None, planner[0].id]
    workers = {turn.id: turn for turn in turns if turn.agent == "worker"}
    assert [turn.parent_id for turn in workers.values()] == [None, None]
    assert len({turn.conversation_id for turn in turns}) == 3, "each worker has one of its own"
    feedback = [row for row in await harness.all(Feedback) if row.turn_id in workers]
    assert [(row.name, row.value, row.source_id) for row in feedback] == [("part", 0.5, "planner-and-workers")] * 2


@pytest.mark.parametrize(
    ("role", "mistake", "scores"),
    [
        ("Split", "9" * 5000, []),
        ("Split", "1 * 1\n1 * 2\n1 * 1", []),
        ("Calculate", "9" * 5000, [-0.5, -0.5]),
        ("These", "I forgot.", [0.5, 0.5]),
    ],
)
async def test_each_agent_answers_for_its_own_mistake(
    harness: Harness, scripted: ScriptedEngine, role: str, mistake: str, scores: list[float]
) -> None:
    """A plan of easy parts that the sum does not have pays nothing."""

    def reply_with_mistake(body: dict[str, Any]) -> str:
        return mistake if body["messages"][-1]["content"].startswith(role) else reply_to(body)

    scripted.reply_to = reply_with_mistake
    example.main()
    episodes = await harness.all(Episode)
    assert [(row.end_reason, row.outcome) for row in episodes] == [("completed", -1.0)] * 2
    feedback = [row for row in await harness.all(Feedback) if row.name == "part"]
    assert [row.value for row in feedback] == scores * 2


@pytest.mark.parametrize(
    "line", ["3 * 4", "3*4", "3  ×  4", "3 x 4", "3 \\times 4", "$3\\times4$", "- 3 \\cdot 4", "1. 3 · 4."]
)
def test_products_are_found_as_models_write_them(line: str) -> None:
    assert example.PRODUCT.findall(line) == [("3", "4")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("It is 42.", 42), ("6 * 7 = 42.0", 42), ("It is 1,234.", 1234), ("1,234,567.00", 1234567), ("3, 4", 4)],
        *[("42.5", None), ("none", None), ("", None), ("9" * 5000, None), ("**42**", 42)],
    ],
)
def test_last_number_is_read_as_models_write_it(text: str, number: int | None) -> None:
    message = ChatCompletionMessage(role="assistant", content=text)
    choice = Choice(finish_reason="stop", index=0, message=message)
    reply = ChatCompletion(id="chat-1", choices=[choice], created=0, model="m", object="chat.completion")
    assert example.last_number(reply) == number
