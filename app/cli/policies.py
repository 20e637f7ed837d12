"""`attune versions`: the versions of a policy."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, PolicyName, policy_path
from app.cli.output import Column
from app.core.settings import get_settings


def versions(policy: PolicyName = None, json: Json = False) -> None:
    """List the versions of a policy, with their metrics and the feedback on them."""
    rows = Api(get_settings()).get(f"{policy_path(policy)}/versions")["data"]
    output.print_list("versions", COLUMNS, rows, json)


def versions_table(rows: Sequence[dict[str, Any]]) -> Table:
    return output.make_table("versions", COLUMNS, rows)


def trained_to_served_ms(row: dict[str, Any]) -> float | None:
    """Return the milliseconds from the end of the update to the first reply."""
    seconds = row["timings"].get("trained_to_served")
    return None if seconds is None else 1000 * seconds


def _metric(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row["metrics"].get(name)


COLUMNS = (
    Column("version", lambda row: row["name"] + (" ◀" if row["serving"] else "")),
    Column("state", "state"),
    Column("turns", "turns", right=True),
    Column("rated", "rated", right=True),
    Column("approval", "approval", "{:.0%}", right=True),
    Column("reward", _metric("critic/score/mean"), "{:+.2f}", right=True),
    Column("KL", _metric("reference_kl"), "{:.3f}", right=True),
    Column("length", lambda row: row["mean_length"] or None, "{:.0f}", right=True),
    Column("swap ms", trained_to_served_ms, "{:.0f}", right=True),
    Column("delay s", "alignment_delay", "{:.1f}", right=True),
    Column("staleness", _metric("training/off_policy/trajectory_staleness"), "{:.2f}", right=True),
)
