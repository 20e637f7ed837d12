"""The figures of `tests/benchmarks/votes.py`: when the aim is reached, the versions of a run, and the tables."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from demo.simulate import ClientStats, Rating

AIM, WINDOW = 0.85, 100
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 % of Student's t with 1, 2, … degrees
Row = dict[str, Any]


def find_window(ratings: Sequence[Rating], window: int = WINDOW, aim: float = AIM) -> int | None:
    """Return the index after the first `window` replies in a row of which a share of `aim` is liked, else None."""
    num_approved = 0
    for index, rating in enumerate(ratings):
        num_approved += rating.approved
        if index >= window:
            num_approved -= ratings[index - window].approved
        if index + 1 >= window and num_approved >= aim * window:
            return index + 1
    return None


def count_votes(ratings: Iterable[Rating], until: float) -> int:
    """Return the number of votes that the service had accepted at this time."""
    return sum(rating.voted_at is not None and rating.voted_at <= until for rating in ratings)


def approval(ratings: Sequence[Rating]) -> float | None:
    return fmean(rating.approved for rating in ratings) if ratings else None


def summarize(ratings: Sequence[Rating], end: int | None) -> Row:
    """Return the figures that follow from the ratings. `end`: the index after the window that reached the aim, if any.

    `base`: approval of version 0; `after`: of the replies after the window, or of the last ones without a window.
    """
    ends = [] if end is None else [ratings[end - WINDOW].at, ratings[end - 1].at]
    base = [rating for rating in ratings if rating.version.endswith("@v0")]
    return {
        "votes": [count_votes(ratings, at) for at in ends] or None,
        "all_votes": sum(rating.voted_at is not None for rating in ratings),
        "replies": len(ratings),
        "base": approval(base),
        "after": approval(ratings[-WINDOW:] if end is None else ratings[end:]),
    }


def version_rows(versions: Sequence[Row], updates: Sequence[Row], stats: ClientStats, started: float) -> list[Row]:
    """Return one row per version: its votes, approval by the judge, KL, and the seconds of its update.

    `votes`: those accepted until it went live; `live` and `frozen` (its batch): seconds since the start; `seconds`: of
    the update, with loading and export; `phases`: of its parts; `release`: from the update's end to the first reply.
    """
    update_of = {update["version"]: update for update in updates if update["version"] is not None}
    rows = []
    for version in versions:
        metrics, update = version["metrics"], update_of.get(version["name"])
        verdicts, live_at = stats.approvals.get(version["name"], []), version["live_at"]
        row: Row = {
            "name": version["name"],
            "state": version["state"],
            "reason": version["reason"],
            "votes": None if live_at is None or version["number"] == 0 else count_votes(stats.ratings, live_at),
            "live": None if live_at is None else live_at - started,
            "replies": len(verdicts),
            "approval": fmean(verdicts) if verdicts else None,
            "kl": metrics.get("guard/kl"),
            "scale": metrics.get("actor/step_scale"),
            "lr_scale": metrics.get("actor/lr_scale"),
            "phases": {
                name.removeprefix("timing_s/"): seconds
                for name, seconds in metrics.items()
                if name.startswith("timing_s/")
            },
            "release": version["timings"].get("trained_to_served"),
        }
        if update is not None and update["settled_at"] is not None and update["claimed_at"] is not None:
            row["samples"] = update["samples"]
            row["frozen"] = update["created_at"] - started
            row["seconds"] = update["settled_at"] - update["claimed_at"]
        rows.append(row)
    return rows


def describe_version(row: Row) -> str:
    """Return a line about the version for the log."""
    kl = "" if row["kl"] is None else f", KL {row['kl']:.4f}, lr × {_format(row['lr_scale'], '{:.2g}')}"
    update = f", update {row['seconds']:.0f} s of {row['samples']} samples" if "seconds" in row else ""
    reason = f" ({row['reason']})" if row["reason"] else ""
    approved = f"{_format(row['approval'], '{:.0%}')} of {row['replies']} replies liked"
    return (
        f"{row['name']} {row['state']}{reason}: {approved}, live after {_format(row['votes'], '{}')} votes{kl}{update}"
    )


def table(results: Iterable[Row]) -> str:
    """Return a Markdown table with one row per configuration; means over its runs and, for votes, 95 % intervals."""
    by_config: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for result in results:
        by_config[result["model"], result["judged"], " ".join(result["settings"])].append(result)
    lines = [
        "| model | judged | settings that differ from the defaults | runs that reached 85 % "
        "| votes before those 100 replies | votes after them | v0 | the next replies | versions live, rejected "
        "| s an update | KL an update | votes learned from, waiting, not learned from |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, judged, settings), runs in by_config.items():
        reached = [one for one in runs if one["votes"] is not None]
        trained = [row for one in runs for row in one["versions"] if "seconds" in row]
        live = sum(row["votes"] is not None for row in trained)
        outcomes = [sum(one["outcomes"][name] for one in runs) for name in ("learned", "waiting", "not_learned")]
        cells = [
            model,
            f"{judged:.0%}",
            settings or "–",
            f"{len(reached)} of {len(runs)}",
            interval([one["votes"][0] for one in reached]),
            interval([one["votes"][1] for one in reached]),
            _mean([one["base"] for one in runs], "{:.0%}"),
            _mean([one["after"] for one in runs], "{:.0%}"),
            f"{live}, {sum(row['state'] == 'rejected' for row in trained)}",
            _mean([row["seconds"] for row in trained], "{:.1f}"),
            _mean([row["kl"] for row in trained], "{:.4f}"),
            ", ".join(map(str, outcomes)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def version_table(result: Row) -> str:
    """Return a Markdown table of the run's versions."""
    lines = [
        "| version | live after votes | replies | liked | KL | scale | lr | samples | s of update | parts | state |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["versions"]:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases"].items())
        cells = [
            row["name"],
            _format(row["votes"], "{}"),
            str(row["replies"]),
            _format(row["approval"], "{:.0%}"),
            _format(row["kl"], "{:.4f}"),
            _format(row["scale"], "{:.2g}"),
            _format(row["lr_scale"], "{:.2g}"),
            _format(row.get("samples"), "{}"),
            _format(row.get("seconds"), "{:.1f}"),
            parts,
            row["state"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: Sequence[float]) -> str:
    """Return the mean, with its 95 % interval by Student's t where there are several values. Example: "212 ± 18"."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.0f}"
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    return f"{fmean(values):.0f} ± {quantile * stdev(values) / math.sqrt(len(values)):.0f}"


def _mean(values: Iterable[float | None], pattern: str) -> str:
    known = [value for value in values if value is not None]
    return pattern.format(fmean(known)) if known else "–"


def _format(value: Any, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
