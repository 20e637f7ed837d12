"""attune analyze: what updates measured, over versions, from the trainer's journal. Needs no service that runs."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from app.cli import chart, output
from app.cli.chart import Series
from app.cli.client import Refused
from app.core.settings import get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry


def analyze(
    metric: Annotated[
        str | None, typer.Option(help="names with commas between, e.g. actor/ppo_kl,reference_kl; a table if unset")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="the policy's name; ATTUNE_POLICY if unset")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="where the trainer's journals are; $ATTUNE_HOME/metrics if unset")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="the newest N versions alone")] = None,
    png: Annotated[Path | None, typer.Option(help="draw those metrics into this file as well")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What each update measured: a table of all metrics, or charts of some over versions."""
    if png is not None and metric is None:
        raise Refused("say with --metric what to draw")
    settings = get_settings()
    entries = _entries(log_dir or settings.metrics_dir, policy or settings.policy)[-last if last else 0 :]
    known = sorted({name for entry in entries for name in entry.metrics})
    names = known if metric is None else _asked(metric, known)
    several = [_series(name, entries) for name in names]
    if png is not None:
        chart.picture(several, entries[0].line, png)
    if json:
        output.as_json(_values(entries, names))
    elif metric is None:
        output.console.print(_table(several, entries))
    elif output.console.is_terminal:
        for series in several:
            output.console.print("\n".join(chart.draw(series, output.console.width)), markup=False, soft_wrap=True)
    else:
        _plain(several, entries)


def _entries(folder: Path, policy: str) -> list[Entry]:
    """The last word on each version of one policy, by rising number."""
    paths = sorted(folder.glob("*.jsonl"))
    found = [entry for path in paths for entry in _read(path) if policy in (entry.policy, entry.line)]
    if not found:
        there = sorted({entry.policy for path in paths for entry in experiment_log.read(path).entries})
        raise Refused(f"no update of '{policy}' is on record in {folder}; there are: {', '.join(there) or 'none'}")
    lines = sorted({entry.line for entry in found})
    if len(lines) > 1:
        raise Refused(f"several projects call a policy '{policy}'; choose with --policy: {', '.join(lines)}")
    return [entry for _, entry in sorted({entry.number: entry for entry in found}.items())]


def _read(path: Path) -> list[Entry]:
    read = experiment_log.read(path)
    if read.torn:
        typer.echo(f"attune: {path}: {read.torn} unfinished line(s) left out", err=True)
    return read.entries


def _asked(metric: str, known: Sequence[str]) -> list[str]:
    names = [name for part in metric.split(",") if (name := part.strip())]
    for name in names or [metric]:
        if name not in known:
            closest = sorted(known, key=lambda other: -SequenceMatcher(None, name, other).ratio())
            raise Refused(f"no metric is called '{name}'; there are: {', '.join(closest)}")
    return list(dict.fromkeys(names))


def _series(name: str, entries: Sequence[Entry]) -> Series:
    return Series(name, [(entry.number, entry.metrics[name]) for entry in entries if name in entry.metrics])


def _values(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, object]:
    """A value for each version, null where it was not measured."""
    return {
        "policy": entries[0].policy,
        "versions": [entry.number for entry in entries],
        "metrics": {name: [entry.metrics.get(name) for entry in entries] for name in names},
    }


def _table(several: Sequence[Series], entries: Sequence[Entry]) -> Table:
    table = Table(title=f"{entries[0].line}: v{entries[0].number} to v{entries[-1].number}, {len(entries)} updates")
    for name in ("metric", "first", "last", "min", "max"):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    for series in several:
        values = (series.first, series.last, series.lowest, series.highest)
        table.add_row(series.name, *(chart.short(value) for _, value in values))
    return table


def _plain(several: Sequence[Series], entries: Sequence[Entry]) -> None:
    """A line a version, tabs between; what was not measured is empty. Comments at the end."""
    typer.echo("\t".join(["version", *(series.name for series in several)]))
    values = [dict(series.points) for series in several]
    for entry in entries:
        row = (repr(one[entry.number]) if entry.number in one else "" for one in values)
        typer.echo("\t".join([str(entry.number), *row]))
    for series in several:
        typer.echo(f"# {chart.title(series)}")
