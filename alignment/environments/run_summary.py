"""What became of a run of an environment: results of single attempts, and their summary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from pydantic import BaseModel

from alignment.environments.protocols import Reason
from alignment.environments.run_client import AttemptCounts, RunRecord

LOST: frozenset[str] = frozenset({"abandoned", "infrastructure"})
MOST_ERRORS = 10
MOST_USERS = 10


@dataclass(frozen=True)
class Result:
    """How one attempt ended.

    Attributes:
        reward: The outcome and the rewards of its steps together; None for one that is lost or that nobody has graded.
        error: What the environment, the agent or the service raised, in a line.
        traceback: Of the environment's code.
        user: The simulated user, if it has one.
    """

    task: str
    episode_id: str
    reason: Reason
    reward: float | None
    num_turns: int
    num_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    traceback: str | None = None
    user: str | None = None

    @property
    def is_lost(self) -> bool:
        return self.reason in LOST


class RunSummary(BaseModel):
    """The figures of what one process has played of a run. Means are over attempts that have a reward; turns and
    tokens are those of all attempts.

    `ends` counts the attempts by the reason of their end, lost ones too. `errors`: the most frequent ones. `users`:
    attempts by their simulated users. `planned`: the planned attempts of the whole run by state, those of other
    processes too, and `mean_outcome` is of those that are done; None if the service was not asked in the end.
    """

    run: str
    num_attempts: int
    ends: dict[str, int]
    mean_reward: float | None
    reward_deviation: float | None
    mean_turns: float | None
    num_turns: int
    num_tokens: int
    seconds: float
    turns_per_second: float
    metrics: dict[str, float]
    errors: dict[str, int]
    users: dict[str, int]
    is_complete: bool
    planned: AttemptCounts | None
    mean_outcome: float | None


def summarize(run: str, results: Sequence[Result], seconds: float, record: RunRecord | None) -> RunSummary:
    """Return the summary of a run. `record` is what the service says of it in the end."""
    graded = [result for result in results if result.reward is not None]
    rewards = [result.reward for result in graded if result.reward is not None]
    num_turns = sum(result.num_turns for result in results)
    names = sorted({name for result in graded for name in result.metrics})
    errors = Counter(result.error for result in results if result.error is not None)
    users = Counter(result.user for result in results if result.user is not None)
    return RunSummary(
        run=run,
        num_attempts=len(results),
        ends=dict(sorted(Counter(str(result.reason) for result in results).items())),
        mean_reward=fmean(rewards) if rewards else None,
        reward_deviation=pstdev(rewards) if rewards else None,
        mean_turns=fmean(result.num_turns for result in graded) if graded else None,
        num_turns=num_turns,
        num_tokens=sum(result.num_tokens for result in results),
        seconds=round(seconds, 3),
        turns_per_second=round(num_turns / seconds, 1) if seconds > 0 else 0.0,
        metrics={name: fmean(result.metrics[name] for result in graded if name in result.metrics) for name in names},
        errors=dict(errors.most_common(MOST_ERRORS)),
        users=dict(users.most_common(MOST_USERS)),
        is_complete=record is not None and record.is_complete,
        planned=record.attempts if record is not None else None,
        mean_outcome=record.mean_outcome if record is not None else None,
    )
