"""What became of the votes of a policy, as the API and the console show it."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.feedback import vote_counts
from app.feedback.outcome_reasons import CODES, REASONS, SENTENCES, state_of
from app.feedback.schemas import OutcomeState
from app.feedback.vote_counts import LearnedCount, VoteCount
from app.models import Policy
from app.policies.references import format_reference

C = TypeVar("C", VoteCount, LearnedCount)


class VoteTotals(BaseModel):
    """Every vote is in exactly one of the three states."""

    total: int
    learned: int
    waiting: int
    not_learned: int

    @classmethod
    def of(cls, counts: Iterable[VoteCount]) -> Self:
        states: Counter[str] = Counter()
        for count in counts:
            states[state_of(count.reason)] += count.num_votes
        return cls(total=states.total(), **{name: states[name] for name in ("learned", "waiting", "not_learned")})


class ReasonCount(BaseModel):
    """`reason` is what votes wait for, or the rule by which they are not learned from; else "learned"."""

    state: OutcomeState
    reason: str
    count: int
    people: int = Field(description="of these, votes of people; the others are of programs")
    sentence: str


class LearnerCount(BaseModel):
    """The votes that an update has learned from, by its version and what became of that."""

    version: str
    state: OutcomeState
    count: int
    people: int


class DelaysView(BaseModel):
    """Of the latest votes that were learned from, about 2,000; null if there are none.

    The delay is the time from the end of the reply to the vote, in seconds. The staleness is the number of updates
    between the version that gave the reply and the version that the batch was trained from.
    """

    median_delay: float | None
    p90_delay: float | None
    median_staleness: float | None
    p90_staleness: float | None


class VotesView(VoteTotals):
    object: Literal["votes"] = "votes"
    policy: str
    people: VoteTotals = Field(description="votes with the source HUMAN")
    programs: VoteTotals = Field(description="votes with the sources LLM_JUDGE and CODE")
    is_limited: bool = Field(
        description=f"whether more than {vote_counts.MAX_WAITING:,} votes of the project wait: then the newest of them "
        f"are counted, and those in the newest {vote_counts.MAX_VERSIONS} batches"
    )
    by_reason: list[ReasonCount]
    by_version: list[LearnerCount] = Field(description="of the newest 20 trained versions, the newest first")
    delays: DelaysView


async def view_votes(session: AsyncSession, policy: Policy) -> VotesView:
    """Count the policy's votes by what became of them. Comments and withdrawals are no votes.

    `session` reads a snapshot, so that every vote is counted once.
    """
    first_seq = await vote_counts.find_first_read(session, policy.project_id)
    counts = await vote_counts.count_votes(session, policy.project_id, [policy.id], first_seq)
    learned = await vote_counts.count_by_version(session, policy)
    delays = await vote_counts.measure_delays(session, policy)
    by_reason = _group(counts, lambda count: CODES[count.reason])
    by_version = _group(learned, lambda count: (-count.version, count.reason))
    return VotesView(
        **VoteTotals.of(counts).model_dump(),
        policy=policy.name,
        people=VoteTotals.of(count for count in counts if count.is_person),
        programs=VoteTotals.of(count for count in counts if not count.is_person),
        is_limited=first_seq > 0,
        by_reason=[
            ReasonCount(state=state_of(reason), reason=reason, sentence=SENTENCES[reason], **numbers)
            for reason, numbers in ((REASONS[code], numbers) for code, numbers in by_reason)
        ],
        by_version=[
            LearnerCount(version=format_reference(policy.name, -number), state=state_of(reason), **numbers)
            for (number, reason), numbers in by_version
        ],
        delays=DelaysView(**delays._asdict()),
    )


def _group(counts: Iterable[C], key: Callable[[C], Any]) -> list[tuple[Any, dict[str, int]]]:
    """Return the numbers of all votes and of those of people, in the order of the keys."""
    groups: dict[Any, dict[str, int]] = {}
    for count in counts:
        numbers = groups.setdefault(key(count), {"count": 0, "people": 0})
        numbers["count"] += count.num_votes
        numbers["people"] += count.num_votes if count.is_person else 0
    return sorted(groups.items())
