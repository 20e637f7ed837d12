"""The planner and its workers: which chats are whose, and which reward each of them has."""

import re
from collections import Counter
from typing import Any

import pytest

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
