"""Format the results of a run as the tables that are printed at its end."""

from collections import Counter, defaultdict
from typing import Any


def format_tables(rows: list[dict[str, Any]]) -> str:
    return "\n\n".join(part for part in (_kills(rows), _sums(rows), _others(rows), _engines(rows)) if part)


def _kills(rows: list[dict[str, Any]]) -> str:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    count: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row["part"] == "kills":
            for kind, number in row["kills"].items():
                count[row["where"], kind] += number
                seconds[row["where"], kind] += row["recovered"][kind]
    lines = [f"{'where':<12}{'process':<12}{'kills':>6}{'timed':>7}{'median s':>10}{'p95 s':>8}{'worst s':>9}"]
    for (where, kind), number in sorted(count.items()):
        times = sorted(seconds[where, kind])
        quantiles = [f"{times[int(share * (len(times) - 1))]:.2f}" if times else "-" for share in (0.5, 0.95, 1)]
        lines.append(
            f"{where:<12}{kind:<12}{number:>6}{len(times):>7}{quantiles[0]:>10}{quantiles[1]:>8}{quantiles[2]:>9}"
        )
    return "\n".join(lines) if count else ""


def _sums(rows: list[dict[str, Any]]) -> str:
    names = (
        *("acknowledged", "lost", "duplicated", "used", "used_twice", "votes", "unaccounted"),
        *("versions", "half_published", "quarantined"),
    )
    lines = ["".join([f"{'where':<12}{'rounds':>8}{'stalls':>8}", *(f"{name:>16}" for name in names)])]
    for where in sorted({row["where"] for row in rows if row["part"] == "kills"}):
        rounds = [row for row in rows if row["part"] == "kills" and row["where"] == where]
        sums = (sum(row["report"][name] for row in rounds) for name in names)
        stalls = sum(len(row["stalled"]) for row in rounds)
        lines.append("".join([f"{where:<12}{len(rounds):>8}{stalls:>8}", *(f"{number:>16}" for number in sums)]))
    return "\n".join(lines) if len(lines) > 1 else ""


def _others(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        if row["part"] not in ("kills", "engines"):
            state = "holds" if not row["errors"] else f"{len(row['errors'])} ERRORS"
            counts = ", ".join(f"{name} {value}" for name, value in row["counts"].items())
            lines.append(f"{row['part']:<10}{row['case']:<44}{state:<10}{counts}")
    return "\n".join(lines)


def _engines(rows: list[dict[str, Any]]) -> str:
    """Return the table of the kills of the real engine, over all rounds."""
    rounds = [row for row in rows if row["part"] == "engines"]
    if not rounds:
        return ""
    lines = [f"{'engines':<10}{'rounds':<44}{len(rounds)}"]
    for name in ("kills", "replies", "operations"):
        total = sum((Counter(row[name]) for row in rounds), Counter[str]())
        lines += [f"{name:<10}{what:<44}{number}" for what, number in sorted(total.items())]
    for what in ("recomputed", "mislabelled"):
        lines.append(f"{'replies':<10}{what.replace('_', ' '):<44}{sum(row[what] for row in rounds)}")
    lines.append(f"{'replies':<10}{'largest distance':<44}{max(row['largest_distance'] for row in rounds):.1e}")
    times: dict[str, list[float]] = defaultdict(list)
    for row in rounds:
        seconds = zip(row["victims"], row["restart"], row["start"], row["recovery"], strict=True)
        for victim, restart, start, recovery in seconds:
            times[f"kill to restart, {victim}"].append(restart)
            times["restart to the first answer"].append(start)
            times["first answer to loaded"].append(recovery - start - restart)
            times["kill to loaded"].append(recovery)
    for what, values in times.items():
        values.sort()
        quantiles = [f"{values[int(share * (len(values) - 1))]:.1f}" for share in (0.5, 0.95, 1)]
        lines.append(
            f"{'seconds':<10}{what + ' (' + str(len(values)) + ': p50, p95, worst)':<44}{' | '.join(quantiles)}"
        )
    return "\n".join(lines)
