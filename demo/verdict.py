"""The verdict on a run of the demo: whether approval rose beyond doubt, and whether a reply was hurt.

Approval is a figure of chance. One version's hundred votes say ± 6 points, so the verdict is about the whole run: the
votes on the last versions together, against those on the base model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alignment.signals.proportions import Difference, Share, newcombe_difference
from app.cli.output import Row
from demo.recompute_logprobs import LogprobReport
from demo.simulate import ClientStats

POOLED_VERSIONS = 5  # fewer versions are a trial of the machinery, whose approval is shown and not judged


@dataclass(frozen=True)
class RunVerdict:
    """What a run has shown.

    Attributes:
        base: Votes on v0.
        last: Votes on the last POOLED_VERSIONS versions that served, together; of a shorter run, on all but v0.
        num_pooled: How many versions `last` is about.
        hurt: Replies by what was wrong with them.
    """

    base: Share
    last: Share
    num_pooled: int
    hurt: dict[str, int]

    @property
    def difference(self) -> Difference | None:
        """Return by how much the approval of the last versions exceeds that of v0; None without votes on either."""
        return newcombe_difference(self.last, self.base)

    @property
    def objections(self) -> list[str]:
        """Return why the run failed; nothing if it did not."""
        objections = [f"{what}: {count}" for what, count in self.hurt.items() if count]
        if self.num_pooled >= POOLED_VERSIONS and (self.difference is None or self.difference.verdict != "better"):
            objections.append(f"approval did not rise beyond doubt: {self.describe_approval()}")
        return objections

    @property
    def sentences(self) -> list[str]:
        """Return the verdict in words, one sentence a line."""
        if self.objections:
            return [f"This run failed: {objection}." for objection in self.objections]
        if self.num_pooled < POOLED_VERSIONS:
            few = f"here {self.num_pooled} served"
            return [f"No reply was hurt. Approval is judged from {POOLED_VERSIONS} versions on; {few}."]
        return [f"No reply was hurt, and approval rose: {self.describe_approval()}."]

    def describe_approval(self) -> str:
        """Example: "39 % → 88 % (+49.0 points, 95 %: +40.2 to +56.5)" """
        if self.difference is None:
            unrated = [
                name for name, share in (("v0", self.base), ("the last versions", self.last)) if not share.trials
            ]
            return f"no votes on {' and '.join(unrated)}"
        value, low, high = (100 * number for number in self.difference)
        return f"{_percent(self.base)} → {_percent(self.last)} ({value:+.1f} points, 95 %: {low:+.1f} to {high:+.1f})"


def judge_run(stats: ClientStats, rows: Sequence[Row], logprobs: LogprobReport) -> RunVerdict:
    """Return the verdict on a run. `rows`: its versions as `GET …/versions` lists them, the first one v0."""
    served = [row for row in rows if row["live_at"] is not None]
    last = [row for row in served if row["number"] > 0][-POOLED_VERSIONS:]
    return RunVerdict(
        base=_pool_votes([row for row in served if row["number"] == 0]),
        last=_pool_votes(last),
        num_pooled=len(last),
        hurt={
            "refused replies": stats.refused,
            "cut replies": stats.incomplete,
            "replies that name two versions": stats.mislabelled,
            "replies whose log-probs do not fit the version they name": logprobs.mislabelled,
        },
    )


def _pool_votes(rows: Sequence[Row]) -> Share:
    up = sum(round(row["approval"] * row["rated"]) for row in rows if row["rated"])
    return Share(up, sum(row["rated"] for row in rows))


def _percent(share: Share) -> str:
    return "–" if share.rate is None else f"{100 * share.rate:.0f} %"
