"""`attune status | versions | audit`: the state of the deployment, the versions of a policy, and who changed what."""

import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.text import Text

from app.cli.client import Api, CommandError
from app.cli.options import Json, PolicyName, parse_version_number, policy_path
from app.cli.output import (
    Column,
    Renderable,
    Row,
    format_approval,
    format_time,
    format_votes,
    make_table,
    print_list,
    print_object,
)
from app.cli.projects import run_in_transaction
from app.cli.retention import prune
from app.core.settings import get_settings
from app.engines import load_errors

version_commands = typer.Typer(help="The versions of a policy, with their metrics and the feedback on them.")
audits = typer.Typer(help="The audit log: who changed what, when and why.")
Exact = Annotated[str | None, typer.Option(help="only entries with exactly this value")]


def status(json: Json = False) -> None:
    """Show what serves, what is being trained, and what is queued."""
    api = Api()
    body = api.get("/v1/status")
    for policy in body["policies"]:  # counted apart: of millions of votes that takes seconds
        policy["votes"] = api.get(policy_path(policy["name"], "/votes"))
    print_object(body, json, _render_status)


@version_commands.callback(invoke_without_command=True)
def versions(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="the maximum number of versions, the newest")] = 20,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="compare B with A instead: 3, support@3 or support-grpo@stable"),
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help="with --compare: compare this version with A, too")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """List the newest versions of a policy, with their metrics and the feedback on them, or compare some."""
    if context.invoked_subcommand is not None:
        return
    if compare is not None:
        _compare_versions([*compare, *(also or [])], policy, json)
        return
    if also:
        raise CommandError("--also needs --compare: attune versions --compare 3 5 --also 7")
    print_list("versions", VERSION_COLUMNS, Api().get(policy_path(policy, "/versions"), limit=limit)["data"], json)


def _compare_versions(names: list[str], policy: str | None, json: bool) -> None:
    default = policy or get_settings().policy
    references = [name if "@" in name else f"{default}@{parse_version_number(name)}" for name in names]
    print_object(Api().get("/v1/versions/compare", version=references), json, _render_comparison)


def _render_comparison(body: Row) -> Iterator[Renderable]:
    sources = sorted({source for row in body["data"] for source in row["rewards"]})
    rewards = (Column(f"reward, {source}", _reward_mean(source), "{:+.2f}", right=True) for source in sources)
    yield make_table("versions", (*COMPARISON_COLUMNS, *rewards), body["data"])
    yield from body["sentences"]


def _reward_mean(source: str) -> Callable[[Row], object]:
    return lambda row: row["rewards"].get(source, {}).get("mean")


def _format_difference(row: Row) -> str | None:
    difference = row["difference"]
    if difference is None:
        return None
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


COMPARISON_COLUMNS = (
    Column("version", "name", no_wrap=True),
    Column("replies", "replies", right=True),
    Column("votes", "rated", right=True),
    Column("people", "raters", right=True),
    Column("approval", format_approval, right=True),
    Column("points against the first", _format_difference, right=True),
    Column("tokens a reply", lambda row: row["mean_length"] or None, "{:.0f}", right=True),
)

version_commands.command("prune")(prune)


@version_commands.command("retry")
def retry_version(
    adapter: Annotated[str, typer.Argument(help="the adapter's name in `attune status`, e.g. assistant-3f2a1b-v12")],
) -> None:
    """Let the engines load a version again that has ended them. Run it where the deployment's database is."""
    count = run_in_transaction(get_settings(), lambda session: load_errors.retry(session, adapter, actor="operator"))
    if not count:
        raise CommandError(f"no engine has stopped to load {adapter}; `attune status` names those that are not loaded")
    typer.echo(f"{adapter} is loaded again on {count} engine(s), within seconds; `attune status` shows it")


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
    expired = f", {body['expired']} before them have expired" if body["expired"] else ""
    erased = f", the content of {body['erased']} was erased" if body["erased"] else ""
    place = "" if body["number"] is None else f"entry {body['number']}: "
    problem = "" if body["ok"] else f"\n{place}{body['problem']}"
    return f"{counts}{expired}{erased}; head {body['head'] or '–'}{problem}"


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
        yield f"engine {engine['name']} ({engine['kind']}): {engine['state']}, {len(engine['loaded'])} adapters{age}"
        if engine["reason"]:
            yield f"  {engine['reason']}"
        for name, error in engine["not_loaded"].items():
            yield f"  {name} is not loaded: {error}"
    for name in ("turns", "rollouts", "feedback", "samples", "batches"):
        counts = ", ".join(f"{count} {state}" for state, count in body[name].items()) or "none"
        yield f"{name}: {counts}"
    for row in body["unmatched_votes"]:
        last = format_time(row["last_at"], "%H:%M:%S")
        yield f"unmatched votes of {row['connector']}: {row['num_votes']} × {row['reason']}, the last at {last}"
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


def _metric(name: str) -> Callable[[Row], object]:
    return lambda row: row["metrics"].get(name)


VERSION_COLUMNS = (
    Column("version", lambda row: row["name"] + (" ◀" if row["serving"] else "")),
    Column("state", "state"),
    Column("turns", "turns", right=True),
    Column("votes", "rated", right=True),
    Column("approval", format_approval, right=True),
    Column("reward", _metric("critic/score/mean"), "{:+.2f}", right=True),
    Column("KL", _metric("reference_kl"), "{:.3f}", right=True),
    Column("length", lambda row: row["mean_length"] or None, "{:.0f}", right=True),
    Column("swap ms", trained_to_served_ms, "{:.0f}", right=True),
    Column("delay s", "alignment_delay", "{:.1f}", right=True),
    Column("staleness", _metric("training/off_policy/trajectory_staleness"), "{:.2f}", right=True),
)
