"""Votes with a settled outcome are counted into totals; what changes the outcome takes them out again."""

import asyncio
from collections import Counter
from collections.abc import Collection

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.deployments import service
from app.feedback import settled_votes, vote_counts
from app.feedback.outcomes import read_outcomes
from app.feedback.vote_counts import count_votes
from app.models import (
    VOTE_KINDS,
    Deployment,
    Feedback,
    Sample,
    SampleRule,
    SampleState,
    Version,
    VersionState,
    VoteTotal,
)
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from app.training import batch_samples, vote_totals
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version, publish
from workers.curate import curate


async def count(harness: Harness) -> int:
    """Count settled votes until none is left; return how many were counted."""
    total = 0
    while counted := await settled_votes.count_settled_votes(harness.db, harness.settings):
        total += counted
    return total


async def check(harness: Harness) -> Counter[str]:
    """Return the votes by reason. The totals with the other votes must equal the outcomes of all votes, one by one."""
    policy = await harness.policy()
    async with harness.db.read() as session:
        counts = await count_votes(session, policy.project_id, [policy.id])
        votes = {row.seq: row for row in await session.scalars(select(Feedback).where(Feedback.kind.in_(VOTE_KINDS)))}
        outcomes = await read_outcomes(session, policy.project_id, votes.keys())
    reasons = Counter(
        (str(outcome.outcome["waiting_for"] or outcome.outcome["rule"] or "learned"), votes[seq].source_kind == "HUMAN")
        for seq, outcome in outcomes.items()
    )
    assert Counter({(str(row.reason), row.is_person): row.num_votes for row in counts}) == reasons
    return Counter({reason: reasons[reason, True] + reasons[reason, False] for reason, _ in reasons})


async def learn(harness: Harness, number: int = 2, state: VersionState = VersionState.LIVE) -> Version:
    """Let people vote on replies, and let a version learn from them."""
    turns = [await harness.turn(conversation_id="c") for _ in range(number)]
    for turn in turns:
        await harness.vote(turn.id)
    await curate(harness.db, harness.settings)
    version = await create_version(harness, *turns, state=state)
    assert version.batch_id is not None
    async with harness.db.write() as session:
        is_rated = Feedback.turn_id.in_([turn.id for turn in turns])
        await session.execute(update(Feedback).where(is_rated).values(batch_id=version.batch_id))
    return version


async def test_settled_votes_are_counted_once_and_waiting_ones_are_passed_over(harness: Harness) -> None:
    await learn(harness)
    await harness.vote((await harness.turn()).id)
    expected = await check(harness)
    assert expected == {"learned": 2, "processing": 1}
    assert await count(harness) == 2 and await count(harness) == 0
    assert await check(harness) == expected
    assert [(row.reason, row.num_votes) for row in await harness.all(VoteTotal)] == [("learned", 2)]


async def test_votes_that_are_settled_while_they_are_counted_are_counted_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the statement that reads the totals and the one that counts the other votes, votes become totals."""
    await learn(harness)
    policy = await harness.policy()

    async def read_then_settle(session: AsyncSession, policy_ids: Collection[str]) -> list[tuple[str, str, bool, int]]:
        totals = await vote_totals.read_totals(session, policy_ids)
        assert await count(harness) == 2
        return totals

    monkeypatch.setattr(vote_counts, "read_totals", read_then_settle)
    async with harness.db.read_snapshot() as session:
        counts = await count_votes(session, policy.project_id, [policy.id])
    assert [row.num_votes for row in counts] == [2]


async def test_a_block_leaves_the_votes_of_others_in_their_totals(harness: Harness) -> None:
    """The vote of a rater who was blocked before is settled, and changes no reward."""
    turn = await harness.turn(conversation_id="c")
    for name in ("ada", "eve", "mallory"):
        await harness.vote(turn.id, source={"kind": "HUMAN", "id": name})
    await curate(harness.db, harness.settings)
    for name, num_settled in (("eve", 1), ("mallory", 2)):
        assert (await harness.api.put(f"/v1/raters/HUMAN/{name}", json={"standing": "blocked"})).status_code == 200
        await check(harness)
        await curate(harness.db, harness.settings)
        assert await count(harness) == num_settled, "curation takes the votes on a reply out of their totals"
        assert await check(harness) == {"rater_blocked": num_settled, "batch": 3 - num_settled}


async def test_votes_that_wait_do_not_hold_up_those_behind_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled_votes, "PAGE_SIZE", 2)
    for _ in range(5):
        await harness.vote((await harness.turn()).id)
    await learn(harness)
    runs = [await settled_votes.count_settled_votes(harness.db, harness.settings) for _ in range(6)]
    assert sum(runs) == 2
    assert await check(harness) == {"learned": 2, "batch": 5}


async def test_an_undone_version_takes_its_votes_out_of_the_totals(harness: Harness) -> None:
    version = await learn(harness)
    await count(harness)
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await batch_samples.drop_trained(locked, {version.batch_id or "": "people judged it"}, SampleRule.ROLLED_BACK)
    assert await check(harness) == {"rolled_back": 2}
    assert [row.num_votes for row in await harness.all(VoteTotal)] == [0]
    assert await count(harness) == 2
    assert await check(harness) == {"rolled_back": 2}
    async with harness.db.write() as session:  # it is live again
        locked = await lock_policy(session, version.policy_id)
        await batch_samples.reclaim_samples(locked, [version.batch_id or ""])
    assert await check(harness) == {"learned": 2}
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await batch_samples.return_samples(locked, [version.batch_id or ""], batch_samples.UNDONE)
    assert (await check(harness)).keys() == {"processing"}


async def test_votes_of_a_canary_that_is_aborted_leave_the_totals(harness: Harness) -> None:
    """Training had gone on from another version, so the votes stay in the batch, and its version alone decides."""
    version = await learn(harness, state=VersionState.CANARY)
    await publish(harness)
    async with harness.db.write() as session:
        await session.execute(update(Version).where(Version.id == version.id).values(state=VersionState.SUPERSEDED))
    assert await count(harness) == 2
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await session.execute(update(Deployment).values(canary_version_id=version.id))
        await service.abort_canary(locked, Attribution("test", "test"))
    assert await check(harness) == {"rolled_back": 2}


async def test_a_late_vote_moves_the_one_that_it_replaces(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, source={"id": "ann"})
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        too_old = {"state": SampleState.DROPPED, "rule": SampleRule.TOO_OLD}
        await session.execute(update(Sample).values(**too_old))
    assert await count(harness) == 1 and await check(harness) == {"too_old": 1}
    await harness.vote(turn.id, "down", source={"id": "ann"})
    await curate(harness.db, harness.settings)
    assert await check(harness) == {"replaced": 1, "batch": 1}
    assert await count(harness) == 1 and await check(harness) == {"replaced": 1, "batch": 1}


async def test_erased_votes_leave_the_totals(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, source={"id": "ann"})
    await curate(harness.db, harness.settings)
    response = await harness.api.delete(f"/v1/chat/completions/{turn.id}")
    assert response.status_code == 200
    assert await count(harness) == 1 and await check(harness) == {"erased": 1}
    assert (await harness.api.delete("/v1/subjects/ann")).status_code == 200
    assert await check(harness) == {}
    assert [row.num_votes for row in await harness.all(VoteTotal)] == [0]


async def test_a_vote_whose_outcome_changes_while_it_is_counted(harness: Harness) -> None:
    """Either transaction may come first: the vote is never counted with the outcome that it had before."""
    if harness.db.embedded:
        pytest.skip("SQLite has one writer")
    version = await learn(harness)
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await batch_samples.drop_trained(locked, {version.batch_id or "": "people judged it"}, SampleRule.ROLLED_BACK)
        assert await settled_votes.count_settled_votes(harness.db, harness.settings) == 0, "its votes are locked"
    await count(harness)
    assert await check(harness) == {"rolled_back": 2}
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(vote_total_id=None))
        await session.execute(update(VoteTotal).values(num_votes=0))
        seqs = list(await session.scalars(select(Feedback.seq)))
    async with harness.db.write() as session:
        await settled_votes._record(session, project_id=(await harness.policy()).project_id, seqs=seqs, end=0)
        reclaim = asyncio.create_task(reclaim_samples(harness, version))
        await asyncio.sleep(0.3)
        assert not reclaim.done(), "it waits for the locks of the votes"
    await reclaim
    assert await check(harness) == {"learned": 2}


async def reclaim_samples(harness: Harness, version: Version) -> None:
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await batch_samples.reclaim_samples(locked, [version.batch_id or ""])
