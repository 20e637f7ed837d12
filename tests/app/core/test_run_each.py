"""Work for many policies: a failure of one leaves the others untouched, and the projects take turns."""

import pytest
from sqlalchemy.exc import OperationalError

from app.core.run_each import run_each, take_turns


async def test_failures_are_raised_when_all_others_are_done() -> None:
    done: list[int] = []

    async def work(number: int) -> int:
        if number % 2:
            raise ValueError(f"number {number}")
        done.append(number)
        return number

    with pytest.raises(ExceptionGroup) as caught:
        await run_each(range(6), work, "the test of")
    assert done == [0, 2, 4] and [str(error) for error in caught.value.exceptions] == [
        "number 1",
        "number 3",
        "number 5",
    ]


async def test_results_are_added() -> None:
    async def work(number: int) -> int | None:
        return number or None

    assert await run_each(range(4), work, "the test of") == 6


@pytest.mark.parametrize(("is_lost", "num_tried"), [(True, 1), (False, 3)])
async def test_only_a_lost_connection_ends_the_run(is_lost: bool, num_tried: int) -> None:
    tried: list[int] = []

    async def work(number: int) -> None:
        tried.append(number)
        raise OperationalError("SELECT", {}, Exception("x"), connection_invalidated=is_lost)

    with pytest.raises(OperationalError if is_lost else ExceptionGroup):
        await run_each(range(3), work, "the test of")
    assert len(tried) == num_tried


def test_projects_take_turns_in_random_order() -> None:
    pairs = [("busy", f"b{number}") for number in range(5)] + [("a", "a0"), ("a", "a1"), ("c", "c0")]
    orders = {tuple(take_turns(pairs)) for _ in range(100)}
    assert len(orders) == 6
    for order in orders:
        assert sorted(order[:3]) == ["a0", "b0", "c0"] and sorted(order[3:5]) == ["a1", "b1"]
        assert list(order[5:]) == ["b2", "b3", "b4"]
    assert take_turns([]) == []
