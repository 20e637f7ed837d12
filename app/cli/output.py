"""Tables for people, JSON for programs."""

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
if not console.is_terminal:
    console.width = 140  # a log has no edge to wrap at


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def versions(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="versions")
    for name in (
        "version",
        "state",
        "turns",
        "rated",
        "approval",
        "reward",
        "KL",
        "length",
        "swap ms",
        "delay s",
        "staleness",
    ):
        table.add_column(name, justify="left" if name in ("version", "state") else "right")
    for row in rows:
        metrics = row["metrics"]
        table.add_row(
            row["name"] + (" ◀" if row["serving"] else ""),
            row["state"],
            str(row["turns"]),
            str(row["rated"]),
            _number(row["approval"], "{:.0%}"),
            _number(metrics.get("critic/score/mean"), "{:+.2f}"),
            _number(metrics.get("reference_kl"), "{:.3f}"),
            _number(row["mean_length"] or None, "{:.0f}"),
            _number(swap_ms(row), "{:.0f}"),
            _number(row["alignment_delay"], "{:.1f}"),
            _number(metrics.get("training/off_policy/trajectory_staleness"), "{:.2f}"),
        )
    return table


def swap_ms(row: dict[str, Any]) -> float | None:
    """Trained → served, in milliseconds."""
    seconds = row["timings"].get("trained_to_served")
    return None if seconds is None else 1000 * seconds


def status(body: dict[str, Any]) -> None:
    for policy in body["policies"]:
        console.print(
            f"[bold]{policy['name']}[/] serves {policy['serving']}, learns from {policy['head']}, {policy['mode']}"
        )
        if policy["canary"]:
            console.print(f"  canary: {policy['canary']} for {policy['canary_share']:.1%} of the conversations")
        if policy["shadow"]:
            console.print(f"  runs in shadow: {policy['shadow']}, unheard (attune shadow show)")
        if policy["mode_reason"]:
            console.print(f"  since {_clock(policy['mode_since'])}: {policy['mode_reason']}")
    for engine in body["engines"]:
        beat = f", last heard {time.time() - engine['heartbeat_at']:.0f} s ago" if engine["heartbeat_at"] else ""
        console.print(f"engine {engine['name']}: {engine['state']}, {len(engine['loaded'])} adapters{beat}")
        if engine["reason"]:
            console.print(f"  {engine['reason']}")
    for name in ("turns", "rollouts", "feedback", "samples", "batches"):
        counts = ", ".join(f"{count} {state}" for state, count in body[name].items()) or "none"
        console.print(f"{name}: {counts}")
    for row in body["reward_models"]:
        why = f": {row['reason']}" if row["reason"] else ""
        newest = "" if row["serving"] == row["newest"] else f"; {row['newest']} is {row['state']}{why}"
        console.print(f"reward model: {row['serving'] or 'none serves'}{newest}", markup=False)
    for reason, count in body["not_learned_from"].items():
        console.print(f"  not learned from: {count} × {reason}")
    for event in body["events"]:
        console.print(
            f"  {_clock(event['created_at'])} {event['actor']}: {event['action']} {event['subject']} "
            f"{event['reason'] or ''}"
        )


def _clock(at: float | None) -> str:
    return "–" if at is None else time.strftime("%H:%M:%S", time.localtime(at))


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
