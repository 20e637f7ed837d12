"""`attune status | versions | audit`: the state of the deployment, the versions of a policy, and who changed what."""

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from app.cli.client import Api
from app.cli.options import Json, PolicyName, policy_path
from app.cli.output import Column, Renderable, Row, format_time, format_votes, print_list, print_object

audits = typer.Typer(help="The audit log: who changed what, when and why.")
Exact = Annotated[str | None, typer.Option(help="only entries with exactly this value")]


def status(json: Json = False) -> None:
    """Show what serves, what is being trained, and what is queued."""
    api = Api()
    body = api.get("/v1/status")
    for policy in body["policies"]:  # counted apart: of millions of votes that takes seconds
        policy["votes"] = api.get(policy_path(policy["name"], "/votes"))
    print_object(body, json, _render_status)


def versions(policy: PolicyName = None, json: Json = False) -> None:
    """List the versions of a policy, with their metrics and the feedback on them."""
    print_list("versions", VERSION_COLUMNS, Api().get(policy_path(policy, "/versions"))["data"], json)


@audits.callback(invoke_without_command=True)
def audit(
    context: typer.Context,
    action: Exact = None,
    subject: Exact = None,
    actor: Exact = None,
    since: Annotated[float | None, typer.Option(help="from this time on (Unix seconds)")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="the maximum number of entries, the newest")] = 20,
    json: Json = False,
) -> None:
    """Show who changed what, when and why."""
    if context.invoked_subcommand is not None:
        return
    rows = Api().get("/v1/audit", action=action, subject=subject, actor=actor, since=since, limit=limit)["data"]
    print_object(rows, json, lambda rows: (_format_event(row, "%Y-%m-%d %H:%M:%S") for row in rows))


@audits.command("verify")
def verify_audit(
    known_hash: Annotated[
        str | None, typer.Option(help="the head of an earlier run, which the chain must hold")
    ] = None,
    json: Json = False,
) -> None:
    """Compute the hash chain of the audit log again. The exit status is 1 if an entry was changed or is missing."""
    body = Api().get("/v1/audit/verify", known_hash=known_hash)
    print_object(body, json, _render_verification)
    if not body["ok"]:
        raise typer.Exit(1)


def _render_verification(body: Row) -> str:
    counts = f"{body['entries']} entries are intact, {body['unsealed']} wait to be sealed"
    erased = f", the content of {body['erased']} was erased" if body["erased"] else ""
    place = "" if body["number"] is None else f"entry {body['number']}: "
    return f"{counts}{erased}; head {body['head'] or '–'}" + ("" if body["ok"] else f"\n{place}{body['problem']}")


def _render_status(body: Row) -> Iterator[Renderable]:
    for policy in body["policies"]:
        line = f" serves {policy['serving']}, trains from {policy['head']}, {policy['mode']}"
        yield Text.assemble((policy["name"], "bold"), line)
        if step := policy["last_step"]:
            scaled = "" if step["scale"] == 1 else f", scaled × {step['scale']:.2g}"
            yield f"  last update: KL {step['kl']:.4f} per token{scaled}; learning rate × {step['lr_scale']:.2g}"
        yield f"  {format_votes(policy['votes'])} (attune train votes)"
        if policy["feedback_share"] is not None:
            density = "sparse" if policy["sparse_feedback"] else "dense"
            yield f"  people rate {policy['feedback_share']:.1%} of the replies (with ATTUNE_FEEDBACK=auto: {density})"
        if policy["canary"]:
            yield f"  canary: {policy['canary']} for {policy['canary_share']:.1%} of the conversations"
        if policy["shadow"]:
            yield f"  runs in shadow: {policy['shadow']} (attune shadow show)"
        if policy["mode_reason"]:
            yield f"  since {format_time(policy['mode_since'], '%H:%M:%S')}: {policy['mode_reason']}"
    for engine in body["engines"]:
        heartbeat = engine["heartbeat_at"]
        age = f", last heartbeat {time.time() - heartbeat:.0f} s ago" if heartbeat else ""
        yield f"engine {engine['name']}: {engine['state']}, {len(engine['loaded'])} adapters{age}"
        if engine["reason"]:
            yield f"  {engine['reason']}"
    for name in ("turns", "rollouts", "feedback", "samples", "batches"):
        counts = ", ".join(f"{count} {state}" for state, count in body[name].items()) or "none"
        yield f"{name}: {counts}"
    for row in body["reward_models"]:
        reason = f": {row['reason']}" if row["reason"] else ""
        newest = "" if row["serving"] == row["newest"] else f"; {row['newest']} is {row['state']}{reason}"
        yield f"reward model: {row['serving'] or 'none serves'}{newest}"
    for reason, count in body["not_learned_from"].items():
        yield f"  excluded from training: {count} × {reason}"
    for event in body["events"]:
        yield f"  {_format_event(event, '%H:%M:%S')}"


def _format_event(row: Row, time_format: str) -> str:
    created_at = format_time(row["created_at"], time_format)
    return f"{created_at}  {row['actor']}: {row['action']} {row['subject']} {row['reason'] or ''}".rstrip()


def trained_to_served_ms(row: Row) -> float | None:
    """Return the milliseconds from the end of the update to the first reply."""
    seconds = row["timings"].get("trained_to_served")
    return None if seconds is None else 1000 * seconds


def _metric(name: str) -> Callable[[Row], Any]:
    return lambda row: row["metrics"].get(name)


VERSION_COLUMNS = (
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
