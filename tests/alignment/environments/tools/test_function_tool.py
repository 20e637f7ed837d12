"""Functions as tools: schema from hints and docstring, arguments, results and threads."""

import asyncio
import threading
from datetime import date
from typing import Annotated, Literal

import pytest
from pydantic import Field

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.tools.base import EpisodeContext, ToolResult
from alignment.environments.tools.function_tool import FunctionTool
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.toolbox import Fault, Toolbox
from tests.support.tool_calls import EPISODE, assistant, call_one


def book(
    room: Annotated[str, Field(description="Its name.", max_length=20)],
    day: date,
    episode: EpisodeContext,
    seats: int = 2,
    kind: Literal["day", "night"] = "day",
) -> dict[str, object]:
    """Book a room.

    It must be free.

    Args:
        day: The day, such as
            2026-12-24.
        seats (int): How many.

    Returns:
        What was booked.
    """
    return {"room": room, "day": day, "seats": seats, "kind": kind, "episode": episode.id, "type": str(type(day))}


def test_schema_comes_from_hints_and_docstring() -> None:
    function = FunctionTool(book).schema()["function"]
    assert function["name"] == "book"
    assert function["description"] == "Book a room.\n\nIt must be free."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "room": {"type": "string", "description": "Its name.", "maxLength": 20},
            "day": {"type": "string", "format": "date", "description": "The day, such as 2026-12-24."},
            "seats": {"type": "integer", "description": "How many.", "default": 2},
            "kind": {"type": "string", "enum": ["day", "night"], "default": "day"},
        },
        "required": ["room", "day"],
        "additionalProperties": False,
    }


async def test_arguments_have_the_types_of_the_hints_and_the_episode_is_passed() -> None:
    record = await call_one(FunctionTool(book), {"room": "Ada", "day": "2026-12-24"})
    assert record.fault is None
    assert record.result.text == (
        '{"room":"Ada","day":"2026-12-24","seats":2,"kind":"day","episode":"ep-1","type":"<class \'datetime.date\'>"}'
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"room": "Ada", "day": "tomorrow"}, "Error: day: Input should be a valid date"),
        ({"room": "Ada" * 9, "day": "2026-12-24"}, "Error: room: 'AdaAda"),
        ({"day": "2026-12-24"}, "Error: 'room' is a required property"),
        ({"room": "Ada", "day": "2026-12-24", "episode": {"id": "other"}}, "Error: Additional properties"),
    ],
)
async def test_wrong_arguments_are_described(arguments: object, text: str) -> None:
    assert (await call_one(FunctionTool(book), arguments)).result.text.startswith(text)


async def test_coroutines_and_results() -> None:
    async def square(x: float) -> ToolResult:
        return ToolResult(f"{x * x:g}", reward=0.5)

    def nothing() -> None:
        pass

    record = await call_one(FunctionTool(square, name="sq", description="Square."), {"x": 1.5})
    assert (record.tool, record.result.text, record.result.reward) == ("sq", "2.25", 0.5)
    assert (await call_one(FunctionTool(nothing), "")).result.text == ""


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), ZeroDivisionError("division by zero")])
async def test_exceptions_are_shown(error: BaseException) -> None:
    def fail() -> None:
        raise error

    record = await call_one(FunctionTool(fail), {})
    assert record.fault is Fault.EXCEPTION
    assert type(error).__name__ in record.result.text


async def test_function_that_hangs_holds_up_nothing_until_too_many_do() -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return "late"

    limits = ToolLimits(call_seconds=0.05, calls_per_turn=1)
    try:
        async with Toolbox([FunctionTool(hang, max_running_calls=2)], limits).open(EPISODE) as tools:
            for _ in range(2):
                await tools.execute(assistant(("hang", {})))
            assert tools.count_faults() == {Fault.TIMEOUT: 2}
            with pytest.raises(InfrastructureFailure, match="2 calls of 'hang' hang"):
                await tools.execute(assistant(("hang", {})))
    finally:
        release.set()


async def test_calls_wait_for_a_place_and_waiting_is_no_part_of_their_time() -> None:
    release = threading.Event()

    def work() -> str:
        release.wait(60)
        return "done"

    tool = FunctionTool(work, max_running_calls=2)
    calls = [asyncio.create_task(call_one(tool, {}, ToolLimits(call_seconds=30))) for _ in range(6)]
    await asyncio.sleep(0.2)
    assert not any(call.done() for call in calls)
    release.set()
    assert [record.result.text for record in await asyncio.gather(*calls)] == ["done"] * 6


async def test_calls_that_hang_end_the_calls_that_wait() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    tool = FunctionTool(hang, max_running_calls=2)
    calls = [call_one(tool, {}, ToolLimits(call_seconds=0.5)) for _ in range(3)]
    try:
        records = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(InfrastructureFailure, match=r"no free place for a call of 'hang' within 0\.05 s"):
            busy = FunctionTool(hang, max_running_calls=1, wait_seconds=0.05)
            await asyncio.gather(call_one(busy, {}, ToolLimits(call_seconds=30)), call_one(busy, {}))
    finally:
        release.set()
    assert [getattr(record, "fault", str(record)) for record in records] == [
        Fault.TIMEOUT,
        Fault.TIMEOUT,
        "2 calls of 'hang' hang",
    ]


def test_function_without_hints_is_refused() -> None:
    with pytest.raises(TypeError, match="'x' has no type hint"):
        FunctionTool(lambda x: x)

    def many(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(TypeError, match="'numbers' cannot be given by name"):
        FunctionTool(many)
