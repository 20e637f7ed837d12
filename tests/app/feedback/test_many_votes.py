"""A reply with very many votes costs no more per vote than one with few. Work is counted, not time."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.feedback import vote_counts
from app.feedback.queries import get_feedback, list_page, read_views, select_feedback
from app.feedback.repository import FeedbackSource, count_by_source
from app.feedback.vote_counts import count_by_version, count_votes
from app.models import Feedback, Reward, Sample, SampleState, Turn, VoteTotal, new_id
from app.privacy import retention
from app.training.policy_config import effective_rewards
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.waiting_samples import analyze
from workers.feedback.signals import read_finished_turns, read_signals

FEW, MANY = 100, 800
CASES = (
    "one source",
    "one source each",
    "withdrawn by one source",
    "withdrawn by one source each",
    "no source id",
    "rewarded, one source each",
)
SOURCES = {"no source id": None, "one source": "ada", "withdrawn by one source": "ada"}


async def add_votes(
    harness: Harness, turn: Turn, case: str, count: int, has_statistics: bool = True, **values: Any
) -> list[str]:
    """Insert votes about the turn, as releases without a limit for each source did; return their ids."""
    defaults = {"conversation_id": None, "kind": "binary", "name": "default", "value": 1.0, "raw_value": "up"}
    defaults |= {"comment": None, "withdraws": None, "source_kind": "HUMAN", "fingerprint": "0" * 64, "token_id": None}
    defaults |= {"processed": True, "project_id": turn.project_id, "turn_id": turn.id, "target": turn.id}
    rows: list[dict[str, Any]] = []
    ids = []
    for number in range(count):
        id = new_id("fb")
        ids.append(id)
        source_id = SOURCES.get(case, f"p-{number}")
        row = {**defaults, "id": id, "source_id": source_id, "idempotency_key": id, "request_metadata": {}, **values}
        rows.append(row)
        if case.startswith("withdrawn"):
            withdrawal = {"kind": "withdrawal", "raw_value": None, "value": None, "withdraws": id}
            other = new_id("fb")
            rows.append({**row, **withdrawal, "id": other, "idempotency_key": other, "processed": True})
    async with harness.db.write() as session:
        for start in range(0, len(rows), 500):
            await session.execute(insert(Feedback), rows[start : start + 500])
        if case.startswith("rewarded"):
            await add_rewards(session, turn)
        if has_statistics:
            await session.execute(text("ANALYZE"))
    return ids


async def add_rewards(session: AsyncSession, turn: Turn) -> None:
    """Insert the rewards and the sample that curation makes of the votes, which wait for a batch then."""
    sources = await session.execute(select(Feedback.seq, Feedback.source_id).where(Feedback.turn_id == turn.id))
    defaults = {"turn_id": turn.id, "reward_source": "explicit", "value": 1.0, "weight": 0.5}
    rewards = [
        {**defaults, "id": new_id("rew"), "source": f"default/HUMAN/{id}", "rater": f"HUMAN/{id}", "feedback_seq": seq}
        for seq, id in sources
    ]
    await session.execute(insert(Reward), rewards)
    ids = {"turn_id": turn.id, "policy_id": turn.policy_id, "version_id": turn.version_id, "group_id": turn.id}
    session.add(Sample(**ids, state=SampleState.OPEN, reward=1.0, ready_at=0.0, uses_feedback=True))
    await session.flush()


async def measure(harness: Harness, db: Database, act: Callable[[], Awaitable[object]]) -> int:
    await act()  # what is done once, such as the preparation of statements, is not counted
    async with count_work(db) as work:
        await act()
    return work.amount


async def grow(harness: Harness, case: str, act: Callable[[Turn, list[str]], Awaitable[object]]) -> float:
    """Return the work of an act with MANY votes on one reply, divided by that with FEW votes on another."""
    amounts = []
    for count in (FEW, MANY):
        turn = await harness.turn()
        ids = await add_votes(harness, turn, case, count)
        amounts.append(await measure(harness, harness.db, lambda turn=turn, ids=ids: act(turn, ids)))  # type: ignore[misc]
        async with harness.db.write() as session:
            for table in ("rewards", "samples", "feedback"):
                await session.execute(text(f"DELETE FROM {table}"))
    few, many = amounts
    return many / few


@pytest.mark.parametrize("case", CASES)
async def test_counting_votes_is_linear_in_their_number(harness: Harness, case: str) -> None:
    policy = await harness.policy()

    async def count(turn: Turn, ids: list[str]) -> None:
        async with harness.db.read_snapshot() as session:
            counts = await count_votes(session, turn.project_id, [policy.id])
        assert sum(count.num_votes for count in counts) == len(ids)

    assert await grow(harness, case, count) < 2 * MANY / FEW


@pytest.mark.parametrize("case", CASES)
async def test_a_piece_of_feedback_is_read_at_the_same_cost(harness: Harness, case: str) -> None:
    async def read(turn: Turn, ids: list[str]) -> None:
        async with harness.db.read() as session:
            rows = [await get_feedback(session, turn.project_id, id) for id in (ids[0], ids[-1])]
            views = await read_views(session, turn.project_id, rows)
        is_last = [case.endswith("each"), True]
        assert [view["effective"] for view in views] == [
            latest and not case.startswith("withdrawn") for latest in is_last
        ]

    assert await grow(harness, case, read) < 2


@pytest.mark.parametrize("case", CASES)
async def test_a_page_of_feedback_is_linear_at_most(harness: Harness, case: str) -> None:
    """The sequence numbers of a reply's feedback are sorted for it; what became of it is read for the page alone."""

    async def list_newest(turn: Turn, ids: list[str]) -> None:
        async with harness.db.read() as session:
            query = await select_feedback(session, turn.project_id, turn.completion_id, None, None)
            page = await list_page(session, turn.project_id, query, after=None, limit=50, newest_first=True)
        assert [view["id"] for view in page["data"]] == ids[::-1][:50]

    assert await grow(harness, case, list_newest) < 2 * MANY / FEW


@pytest.mark.parametrize("case", CASES)
async def test_the_signals_of_a_reply_are_read_in_linear_time(harness: Harness, case: str) -> None:
    policy = await harness.policy()

    async def read(turn: Turn, ids: list[str]) -> None:
        async with harness.db.read() as session:
            turns = await read_finished_turns(session, [turn.id])
            signals = await read_signals(session, turns, {policy.id: effective_rewards(policy, harness.settings)})
        expected = 0 if case.startswith("withdrawn") else len(ids) if case.endswith("each") else 1
        assert len(signals[turn.id]) == expected

    assert await grow(harness, case, read) < 2 * MANY / FEW


async def test_the_writer_counts_the_feedback_of_the_source_alone(harness: Harness) -> None:
    async def count(turn: Turn, ids: list[str]) -> None:
        source = FeedbackSource(turn.project_id, turn.id, "HUMAN", "p-0")
        counts = await harness.db.run_read(lambda connection: count_by_source(connection, {source}))
        assert counts == {(*source, ""): 1}

    assert await grow(harness, "one source each", count) < 2


async def test_withdrawn_feedback_stays_withdrawn_when_it_expires(harness: Harness) -> None:
    turn = await harness.turn()
    id = (await harness.vote(turn.id, source={"id": "ada"})).json()["id"]
    assert (await harness.api.delete(f"/v1/feedback/{id}")).status_code == 200
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(deleted_at=1.0))
        await session.execute(update(Feedback).values(created_at=1.0, processed=True))
    assert await retention.remove_expired(harness.db, turn.project_id, "feedback", 1.0) == 2
    view = (await harness.api.get(f"/v1/feedback/{id}")).json()
    assert (view["withdrawn"], view["effective"]) == (True, False)


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_votes_that_are_settled_are_not_read_again(harness: Harness, is_analyzed: bool) -> None:
    """They are in a total. SQLite must choose the index of the others, which it does not do for its small size."""
    if not is_analyzed and not harness.db.embedded:
        pytest.skip("PostgreSQL collects statistics by itself")
    policy = await harness.policy()
    amounts = []
    async with harness.db.write() as session:
        total = VoteTotal(policy_id=policy.id, reason="replaced", is_person=True, num_votes=0)
        session.add(total)
        await session.flush()
        total_id = total.id

    async def read() -> None:
        async with harness.db.read_snapshot() as session:
            counts = await count_votes(session, policy.project_id, [policy.id])
            await count_by_version(session, policy)
        assert {count.reason: count.num_votes for count in counts} == {"replaced": num_votes, "processing": 5}

    waiting = await harness.turn()
    await add_votes(harness, waiting, "one source each", 5, processed=False, has_statistics=is_analyzed)
    num_votes = 0
    for count in (FEW, MANY):
        turn = await harness.turn()
        await add_votes(harness, turn, "one source each", count, vote_total_id=total_id, has_statistics=is_analyzed)
        num_votes += count
        async with harness.db.write() as session:
            await session.execute(update(VoteTotal).values(num_votes=num_votes))
        if is_analyzed:
            await analyze(harness, "feedback")
        amounts.append(await measure(harness, harness.db, read))
    few, many = amounts
    assert many < 1.5 * few


@pytest.mark.parametrize("case", CASES)
async def test_votes_that_wait_are_read_up_to_a_bound(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(vote_counts, "MAX_WAITING", FEW)
    policy = await harness.policy()
    amounts = []

    async def read() -> None:
        async with harness.db.read_snapshot() as session:
            first_seq = await vote_counts.find_first_read(session, policy.project_id)
            counts = await count_votes(session, policy.project_id, [policy.id], first_seq)
        assert sum(count.num_votes for count in counts) == FEW

    for count in (FEW, MANY - FEW):
        await add_votes(harness, await harness.turn(), case, count)
        amounts.append(await measure(harness, harness.db, read))
    few, many = amounts
    assert many < 1.5 * few
