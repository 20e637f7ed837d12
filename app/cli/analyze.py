"""`attune analyze`: metrics of updates over versions, from the trainer's experiment log. Needs no running service.

Charts are drawn with braille characters in a terminal, or by matplotlib into a PNG. Not plotext: version 6 draws
through a compiled library for each platform, frames every plot and rounds points to its own grid. `draw_lines` places
each version's dot exactly and needs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from app.cli.client import CommandError
from app.cli.options import Json
from app.cli.output import Column, console, print_list, print_object
from app.core.settings import get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry

CELL_WIDTH, CELL_HEIGHT = 2, 4  # dots in one braille character
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row, as Unicode numbers them
BLANK = 0x2800

Point = tuple[int, float]
Dot = tuple[int, int]  # (0, 0) is at the upper left


@dataclass(frozen=True)
class Series:
    """One metric of one policy. `points` are (version number, value), ascending, at least one."""

    name: str
    points: Sequence[Point]

    @property
    def summary(self) -> dict[str, Point]:
        smallest, largest = min(self.points, key=itemgetter(1)), max(self.points, key=itemgetter(1))
        return {"first": self.points[0], "last": self.points[-1], "min": smallest, "max": largest}

    def __str__(self) -> str:
        """Example: "reference_kl: last 0.02 (v9), min 0.001 (v1), max 0.03 (v4)" """
        points = {name: self.summary[name] for name in ("last", "min", "max")}
        parts = (f"{name} {_format_value(value)} (v{number})" for name, (number, value) in points.items())
        return f"{self.name}: {', '.join(parts)}"


def analyze(
    metric: Annotated[
        str | None, typer.Option(help="comma-separated names, e.g. actor/ppo_kl,reference_kl; default: a table of all")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="the policy's name; default: ATTUNE_POLICY")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="the folder of the experiment logs; default: $ATTUNE_HOME/metrics")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="only the newest N versions")] = None,
    png: Annotated[Path | None, typer.Option(help="also write the charts to this PNG")] = None,
    json: Json = False,
) -> None:
    """Show the metrics of updates: a table of all, or charts of some over versions."""
    if png is not None and metric is None:
        raise CommandError("--png needs --metric: name the metrics to draw")
    settings = get_settings()
    entries = _read_entries(log_dir or settings.metrics_dir, policy or settings.policy)[-last if last else 0 :]
    available = sorted({name for entry in entries for name in entry.metrics})
    names = available if metric is None else _parse_metrics(metric, available)
    all_series = [
        Series(name, [(entry.number, entry.metrics[name]) for entry in entries if name in entry.metrics])
        for name in names
    ]
    if png is not None:
        write_png(all_series, entries[0].run_name, png)
    if json:
        values = {name: [entry.metrics.get(name) for entry in entries] for name in names}  # null: not measured
        versions = [entry.number for entry in entries]
        print_object({"policy": entries[0].policy, "versions": versions, "metrics": values}, json, str)
    elif metric is None:
        _print_table(all_series, entries)
    elif console.is_terminal:
        for series in all_series:
            console.print("\n".join(draw_lines(series, console.width)), markup=False, soft_wrap=True)
    else:
        _print_columns(all_series, entries)


def _read_entries(folder: Path, policy: str) -> list[Entry]:
    """Return the newest entry of each version of one policy, in ascending order."""
    logs = {path: experiment_log.read(path) for path in sorted(folder.glob("*.jsonl"))}
    for path, log in logs.items():
        if log.num_incomplete:
            typer.echo(f"attune: {path}: skipped {log.num_incomplete} unfinished line(s)", err=True)
    every = [entry for log in logs.values() for entry in log.entries]
    entries = [entry for entry in every if policy in (entry.policy, entry.run_name)]
    if not entries:
        policies = ", ".join(sorted({entry.policy for entry in every})) or "none"
        raise CommandError(f"{folder} has no update of '{policy}'; its policies are: {policies}")
    run_names = sorted({entry.run_name for entry in entries})
    if len(run_names) > 1:
        raise CommandError(f"several projects have a policy '{policy}'; choose with --policy: {', '.join(run_names)}")
    newest = {entry.number: entry for entry in entries}
    return [newest[number] for number in sorted(newest)]


def _parse_metrics(metric: str, available: Sequence[str]) -> list[str]:
    names = [name for part in metric.split(",") if (name := part.strip())]
    for name in names or [metric]:
        if name not in available:
            closest = sorted(available, key=lambda other: -SequenceMatcher(None, name, other).ratio())
            raise CommandError(f"no metric is called '{name}'; the metrics are: {', '.join(closest)}")
    return list(dict.fromkeys(names))


def _print_table(all_series: Sequence[Series], entries: Sequence[Entry]) -> None:
    title = f"{entries[0].run_name}: v{entries[0].number} to v{entries[-1].number}, {len(entries)} updates"
    columns = [Column("metric", "metric", no_wrap=True)]
    columns += [Column(name, name, right=True, no_wrap=True) for name in ("first", "last", "min", "max")]
    rows = [
        {"metric": series.name} | {name: _format_value(value) for name, (_, value) in series.summary.items()}
        for series in all_series
    ]
    print_list(title, columns, rows, json=False)


def _print_columns(all_series: Sequence[Series], entries: Sequence[Entry]) -> None:
    """Print tab-separated values, one line a version, empty where not measured; the summaries follow as comments."""
    typer.echo("\t".join(["version", *(series.name for series in all_series)]))
    for entry in entries:
        values = [entry.metrics.get(series.name, "") for series in all_series]
        typer.echo("\t".join(map(str, [entry.number, *values])))
    for series in all_series:
        typer.echo(f"# {series}")


def draw_lines(series: Series, width: int, height: int = 8) -> list[str]:
    """Return lines of at most `width` characters: a title, `height` lines of chart, and the axis of versions."""
    low, high = series.summary["min"][1], series.summary["max"][1]
    if high > low:
        labels = {0: _format_value(high), height - 1: _format_value(low)}
    else:
        labels = {height // 2: _format_value(high)}
    margin = max(map(len, labels.values()))
    width = max(1, width - margin - 2)
    rows = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{cells}".rstrip()
        for row, cells in enumerate(_draw_braille(_locate_dots(series, width, height), width, height))
    ]
    first, last = f"v{series.points[0][0]}", f"v{series.points[-1][0]}" if len(series.points) > 1 else ""
    gap = " " * max(1, width - len(first) - len(last))
    indent = " " * (margin + 1)
    return [str(series), *rows, f"{indent}└{'─' * width}", f"{indent} {first}{gap}{last}".rstrip()]


def _locate_dots(series: Series, width: int, height: int) -> list[Dot]:
    """Return each point's dot. A constant series is drawn in the middle, a single version at the left."""
    right, bottom = width * CELL_WIDTH - 1, height * CELL_HEIGHT - 1
    (first, _), (last, _), (_, low), (_, high) = series.summary.values()
    return [
        (
            round((number - first) / (last - first) * right) if last > first else 0,
            round((high - value) / (high - low) * bottom) if high > low else round(bottom / 2),
        )
        for number, value in series.points
    ]


def _draw_braille(dots: Sequence[Dot], width: int, height: int) -> list[str]:
    """Connect the dots. Return `height` lines of at most `width` characters."""
    cells = [[BLANK] * width for _ in range(height)]
    for (x0, y0), (x1, y1) in pairwise([dots[0], *dots]):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            x, y = round(x0 + step / steps * (x1 - x0)), round(y0 + step / steps * (y1 - y0))
            cells[y // CELL_HEIGHT][x // CELL_WIDTH] |= DOTS[x % CELL_WIDTH][y % CELL_HEIGHT]
    return ["".join(map(chr, row)).rstrip(chr(BLANK)) for row in cells]


def _format_value(value: float) -> str:
    """Format with four significant digits. Example: 0.0123456 -> "0.01235" """
    return f"{value:.4g}"


def write_png(all_series: Sequence[Series], heading: str, path: Path) -> None:
    """Write the charts to a PNG, one below the other.

    Raises ValueError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # an optional dependency that loads slowly
    except ImportError as error:
        raise ValueError("a PNG needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(9, 2.6 * len(all_series)), layout="constrained")
    figure.suptitle(heading)
    for axes, series in zip(figure.subplots(len(all_series), squeeze=False)[:, 0], all_series, strict=True):
        axes.plot(*zip(*series.points, strict=True), marker=".")
        axes.set_title(series.name, fontsize="medium")
        axes.set_xlabel("version")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
