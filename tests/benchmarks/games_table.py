"""The results of `tests/benchmarks/games.py`, and their table."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tests.benchmarks.votes_figures import interval


@dataclass(frozen=True)
class GameResult:
    """One run. `curve`: the share of held-out games won, at the start and after every `every` updates of `games` games.

    Seconds are CPU time, of the run without the game's process.
    """

    rules: str
    arm: str
    label: str
    seed: int
    games: int
    every: int
    evaluation: int
    curve: Sequence[float]
    refused: int
    pretraining_seconds: float
    seconds: float


def table(results: Iterable[GameResult]) -> str:
    """Return a Markdown table of means over the seeds, with a 95 % interval where there are several."""
    groups: dict[tuple[str, str, int], list[GameResult]] = defaultdict(list)
    for one in sorted(results, key=lambda result: (result.rules, result.arm, result.label, result.seed)):
        updates = (len(one.curve) - 1) * one.every
        groups[one.rules, f"{one.arm} {one.label}".strip(), updates].append(one)
    lines = [
        "| game | credit | seeds | updates × games | at the start | half way | at the end | by seed | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (rules, name, updates), runs in groups.items():
        cells = [
            rules,
            name,
            ", ".join(str(one.seed) for one in runs),
            f"{updates} × {runs[0].games}",
            *(_mean([one.curve[at] for one in runs]) for at in (0, (len(runs[0].curve) - 1) // 2, -1)),
            ", ".join(f"{100 * one.curve[-1]:.0f}" for one in runs),
            f"{fmean(one.seconds for one in runs) / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(shares: Sequence[float]) -> str:
    return f"{interval([100 * share for share in shares])} %"
