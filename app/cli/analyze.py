"""`attune analyze`: metrics of updates over versions, from the trainer's experiment log. Needs no running service."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

import typer

from app.cli import chart, output
from app.cli.chart import Series
from app.cli.client import CommandError
from app.cli.output import Column
from app.core.settings import get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry


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
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the metrics of updates: a table of all, or charts of some over versions."""
    if png is not None and metric is None:
        raise CommandError("--png needs --metric: name the metrics to draw")
    settings = get_settings()
    entries = _read_entries(log_dir or settings.metrics_dir, policy or settings.policy)[-last if last else 0 :]
    available = sorted({name for entry in entries for name in entry.metrics})
    names = available if metric is None else _parse_metrics(metric, available)
    all_series = [_make_series(name, entries) for name in names]
    if png is not None:
        chart.write_png(all_series, entries[0].run_name, png)
    if json:
        output.print_json(_to_json(entries, names))
    elif metric is None:
        _print_table(all_series, entries)
    elif output.console.is_terminal:
        for series in all_series:
            lines = chart.draw_lines(series, output.console.width)
            output.console.print("\n".join(lines), markup=False, soft_wrap=True)
    else:
        _print_columns(all_series, entries)


def _read_entries(folder: Path, policy: str) -> list[Entry]:
    """Return the newest entry of each version of one policy, in ascending order."""
    paths = sorted(folder.glob("*.jsonl"))
    entries = [entry for path in paths for entry in _read_log(path) if policy in (entry.policy, entry.run_name)]
    if not entries:
        policies = sorted({entry.policy for path in paths for entry in experiment_log.read(path).entries})
        raise CommandError(f"{folder} has no update of '{policy}'; its policies are: {', '.join(policies) or 'none'}")
    run_names = sorted({entry.run_name for entry in entries})
    if len(run_names) > 1:
        raise CommandError(f"several projects have a policy '{policy}'; choose with --policy: {', '.join(run_names)}")
    return [entry for _, entry in sorted({entry.number: entry for entry in entries}.items())]


def _read_log(path: Path) -> list[Entry]:
    log = experiment_log.read(path)
    if log.num_incomplete:
        typer.echo(f"attune: {path}: skipped {log.num_incomplete} unfinished line(s)", err=True)
    return log.entries


def _parse_metrics(metric: str, available: Sequence[str]) -> list[str]:
    names = [name for part in metric.split(",") if (name := part.strip())]
    for name in names or [metric]:
        if name not in available:
            closest = sorted(available, key=lambda other: -SequenceMatcher(None, name, other).ratio())
            raise CommandError(f"no metric is called '{name}'; the metrics are: {', '.join(closest)}")
    return list(dict.fromkeys(names))


def _make_series(name: str, entries: Sequence[Entry]) -> Series:
    return Series(name, [(entry.number, entry.metrics[name]) for entry in entries if name in entry.metrics])


def _to_json(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, object]:
    """Return a value for each version and metric, null where the metric was not measured."""
    return {
        "policy": entries[0].policy,
        "versions": [entry.number for entry in entries],
        "metrics": {name: [entry.metrics.get(name) for entry in entries] for name in names},
    }


def _print_table(all_series: Sequence[Series], entries: Sequence[Entry]) -> None:
    title = f"{entries[0].run_name}: v{entries[0].number} to v{entries[-1].number}, {len(entries)} updates"
    names = ("first", "last", "min", "max")
    columns = [
        Column("metric", "metric", no_wrap=True),
        *(Column(name, name, right=True, no_wrap=True) for name in names),
    ]
    rows = [
        {"metric": series.name, **{name: chart.format_value(getattr(series, name)[1]) for name in names}}
        for series in all_series
    ]
    output.print_list(title, columns, rows, json=False)


def _print_columns(all_series: Sequence[Series], entries: Sequence[Entry]) -> None:
    """Print tab-separated values, one line a version, empty where not measured; the summaries follow as comments."""
    typer.echo("\t".join(["version", *(series.name for series in all_series)]))
    values = [dict(series.points) for series in all_series]
    for entry in entries:
        row = (repr(by_number[entry.number]) if entry.number in by_number else "" for by_number in values)
        typer.echo("\t".join([str(entry.number), *row]))
    for series in all_series:
        typer.echo(f"# {chart.summarize(series)}")
