"""The agent of LangGraph: each of its tools, with a scripted engine. tests/clients/test_langgraph.py has a real one."""

import json

import pytest

from app.models import Feedback
from demo.shop import HOURS, ORDERS
from examples import langgraph_agent as example
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

ORDER = example.order_state("4321")
OPENING = HOURS["Friday"]


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("question", "call", "result", "reply"),
    [
        ("Where is my order 4321?", ("order_status", {"order_id": "4321"}), {"state": ORDER}, ORDERS[ORDER]),
        (
            "When are you open on Friday?",
            ("opening_hours", {"day": "friday"}),
            {"hours": OPENING},
            " to ".join(OPENING),
        ),
    ],
)
async def test_each_tool_is_called_and_its_replies_are_rated(
    harness: Harness,
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    call: tuple[str, dict[str, str]],
    result: dict[str, object],
    reply: str,
) -> None:
    name, arguments = call
    scripted.tool_call, scripted.answers_results = (name, json.dumps(arguments)), True
    scripted.reply_text = reply
    monkeypatch.setattr("sys.argv", ["langgraph_agent", "--model", "shop", question])
    example.main()
    tools = [tool["function"]["name"] for tool in scripted.requests[0]["tools"]]
    assert tools == ["order_status", "opening_hours"]
    assert scripted.requests[1]["messages"][-1]["content"] == json.dumps(result)
    assert [(row.value, row.source_id) for row in await harness.all(Feedback)] == [(1.0, "demo-agent")] * 2


def test_judge_wants_all_hours() -> None:
    assert not example.is_helpful("Are you open on friday?", f"From {OPENING[0]}.")
    assert example.is_helpful("Are you open on Monday?", "We are closed.")


def test_judge_of_an_order_is_not_confused_by_a_day() -> None:
    question = "Will order 4321 arrive on Friday?"
    assert example.is_helpful(question, f"It takes {ORDERS[ORDER]}.")
    assert not example.is_helpful(question, f"We are open from {OPENING[0]} to {OPENING[1]}.")
    assert example.is_helpful("Are you open on Friday at 11?", f"From {OPENING[0]} to {OPENING[1]}.")
    assert not example.is_helpful("How are you?", "Fine.")
