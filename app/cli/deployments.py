"""`attune deploy | rollback | canary | shadow | delivery | pin`: which version serves, and to whom."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from app.cli.client import Api, CommandError, drop_unset
from app.cli.options import Json, PolicyName, Reason, VersionNumber, parse_json, parse_version_number, policy_path
from app.cli.output import (
    Column,
    Renderable,
    Row,
    format_approval,
    format_time,
    make_table,
    post_action,
    print_list,
    print_object,
)
from app.models import AuditAction

CANARY_OUTCOMES = {AuditAction.CANARY_ENDED: "was rolled back", AuditAction.DEPLOYMENT_DEPLOYED: "went live"}
SIDE_COLUMNS = (
    Column("version", "version"),
    Column("users", "turns", right=True),
    Column("failed", "failed", right=True),
    Column("raters", "rated", right=True),
    Column("approval", format_approval, right=True),
    Column("tokens a reply", "mean_length", "{:.0f}", right=True),
    Column(
        "ms a token", lambda side: side["seconds_per_token"] and 1000 * side["seconds_per_token"], "{:.1f}", right=True
    ),
)
PIN_COLUMNS = (
    Column("id", "id"),
    Column("pinned", lambda row: f"{row['kind']} {row['subject']}"),
    Column("to", "version"),
    Column("loaded", lambda row: "yes" if row["loaded"] else "not yet"),
    Column("by", "created_by"),
    Column("reason", lambda row: row["reason"] or None),
)
canary = typer.Typer(no_args_is_help=True, help="The canary: a version that serves a share of the conversations.")
shadow = typer.Typer(no_args_is_help=True, help="The shadow deployment: a version whose answers no user sees.")
pins = typer.Typer(no_args_is_help=True, help="Pin end users, conversations and API keys to one version.")


def deploy(
    version: VersionNumber,
    share: Annotated[
        float | None, typer.Option(help="start a canary with this share of the conversations; default: all")
    ] = None,
    watch: Annotated[bool, typer.Option(help="end the canary automatically, by its metrics")] = True,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Deploy a version that has served before, to all conversations or as a canary."""
    body = {"version": parse_version_number(version), "share": share, "watch": watch, "reason": reason}
    print_object(Api().post(policy_path(policy, "/deploy"), body), json, _render_deployment)


def rollback(
    to: Annotated[
        str | None,
        typer.Option(help="a version, as 12 or v12; default: end the canary, or serve the parent version"),
    ] = None,
    reason: Reason = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what it would change")] = False,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Undo the latest deployment, or deploy an older version and train on from it."""
    api = Api()
    if dry_run:
        version = None if to is None else parse_version_number(to)
        print_object(api.get(policy_path(policy, "/rollback"), version=version), json, _render_preview)
        return
    if to is not None:
        body = {"version": parse_version_number(to), "reason": reason}
    else:
        current = api.get(policy_path(policy))
        name = current["canary"] or current["serving"]  # named, so that a repeated request undoes nothing else
        body = {"from_version": parse_version_number(name.rpartition("@")[2]), "reason": reason}
    result = api.post(policy_path(policy, "/rollback"), body)
    print_object(result, json, lambda body: f"{body['rolled_back']} → {body['serving']}")


def _render_preview(body: Row) -> Iterator[str]:
    if not body["changes"]:
        yield f"nothing would change: {body['serving']} serves"
        return
    ended = f"; the canary {body['aborted_canary']} would end" if body["aborted_canary"] else ""
    yield f"{body['serving']} → {body['would_serve']}{ended}"
    yield f"{body['engines_with_version']} of {body['engines']} ready engines have {body['would_serve']} loaded"
    answered = f"{body['conversations']} conversations in the last 24 hours"
    yield f"{body['rolled_back']} has answered {answered}; {body['pins']} pins to it stay"
    line = f", without {', '.join(body['leaving'])}" if body["leaving"] else ""
    yield f"training would continue from {body['head_after']}{line}"
    samples = f"samples: {body['samples_returned']} return, {body['samples_dropped']} are dropped"
    yield f"{samples}, {body['samples_reclaimed']} count as learned from again; {body['batches_failed']} batches fail"


@canary.command("show")
def show_canary(policy: PolicyName = None, json: Json = False) -> None:
    """Show the metrics of the canary and of the live version, or how the last canary ended."""
    api = Api()
    row = api.get(policy_path(policy, "/deployment"))
    print_object(row, json, _render_deployment)
    if not json and row["canary"] is None and (summary := _describe_last_canary(api, row["policy"])) is not None:
        typer.echo(summary)


@canary.command("promote")
def promote_canary(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Deploy the canary to all conversations."""
    post_action("/canary/promote", policy, reason, json, _render_deployment)


@canary.command("abort")
def abort_canary(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End the canary: the live version serves all conversations again."""
    post_action("/canary/abort", policy, reason, json, _render_deployment)


@shadow.command("show")
def show_shadow(policy: PolicyName = None, json: Json = False) -> None:
    """Show the metrics of the shadow deployment and of the live version."""
    print_object(Api().get(policy_path(policy, "/deployment")), json, _render_deployment)


@shadow.command("promote")
def promote_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End the shadow deployment and release the version as new versions are released."""
    post_action("/shadow/promote", policy, reason, json, _render_deployment)


@shadow.command("abort")
def abort_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Reject the shadow version; training continues from the live version."""
    post_action("/shadow/abort", policy, reason, json, _render_deployment)


def delivery(
    conversations: Annotated[
        str | None, typer.Option(help="follow (use the newest version), or sticky (end on the version they began on)")
    ] = None,
    canary_config: Annotated[
        str | None, typer.Option("--canary", help='canary of new versions, as JSON: {"share": 0.05}; default: unset')
    ] = None,
    shadow_config: Annotated[
        str | None,
        typer.Option("--shadow", help='shadow deployment of new versions, as JSON: {"share": 0.2}; default: unset'),
    ] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Show or change how new versions are released. Without options it shows the settings."""
    api = Api()
    row = api.get(policy_path(policy, "/deployment"))
    if (conversations, canary_config, shadow_config) != (None, None, None):
        body = {
            "conversations": row["conversations"] if conversations is None else conversations,
            "canary": _stage_config("canary", canary_config, row),
            "shadow": _stage_config("shadow", shadow_config, row),
        }
        row = api.put(policy_path(policy, "/delivery"), body)
    print_object(row, json, _render_deployment)


def _stage_config(stage: str, option: str | None, row: Row) -> object:
    """Return the option's value or, without the option, the policy's present configuration of the stage."""
    if option is None:
        return row[f"{stage}_config"] if row[f"{stage}_overridden"] else None
    return None if option == "default" else parse_json(option, f"--{stage}")


def _render_deployment(row: Row) -> Iterator[Renderable]:
    stages = []
    if row["shadow_config"]:
        stages.append(f"a shadow deployment beside {row['shadow_config']['share']:.1%} of the replies")
    if row["canary_config"]:
        stages.append(f"each new version answers {row['canary_config']['share']:.1%} first")
    else:
        stages.append("at once")
    serving = f"{row['policy']}: {row['serving']} serves; conversations {row['conversations']}"
    yield f"{serving}; new versions: {', then '.join(stages)}"
    if (out := row["shadow"]) is not None:
        yield _side_table(f"{out['version']} runs in shadow beside {out['share']:.1%} of the replies", out)
        yield f"{out['verdict']}: {out['disabled_reason'] or out['reason']}"
    if (out := row["canary"]) is not None:
        watched = "watched" if out["watched"] else "not watched"
        yield _side_table(f"{out['version']} for {out['share']:.1%} of the conversations, {watched}", out)
        yield from _evidence_lines(out)
        yield f"{out['verdict'].replace('_', ' ')}: {out['reason']}"


def _side_table(title: str, out: Row) -> Table:
    return make_table(title, SIDE_COLUMNS, [out["candidate"], out["stable"]])


def _evidence_lines(out: Row) -> Iterator[str]:
    """Yield how near the canary is to each of its possible ends."""
    figures = out["figures"]
    for claim, evidence, threshold, outcome in (
        ("people approve of it less", "less_approval", "alarm_at", "a rollback"),
        ("more of its replies fail", "more_failures", "alarm_at", "a rollback"),
        ("it is good enough", "no_worse", "promote_at", "a promotion"),
    ):
        share = max(0.0, figures[evidence] / figures[threshold])
        effect = outcome if out["watched"] else "a decision, if it were watched"
        yield f"evidence that {claim + ':':26} {share:5.0%} of the amount for {effect}"
    if out["watched"]:
        left = max(0.0, out["until"] - time.time())
        yield f"it is watched and ends by itself: in {left:,.0f} s at the latest, by the feedback received until then"


def _describe_last_canary(api: Api, policy: str) -> str | None:
    """Return how the last canary ended and why, or None if there was none."""
    starts = api.get("/v1/audit", action=AuditAction.CANARY_BEGAN, limit=1000)["data"]
    start = next((row for row in starts if row["subject"].startswith(f"{policy}@")), None)
    if start is None:
        return None
    later = api.get("/v1/audit", subject=start["subject"], after=start["number"], order="asc")["data"]
    end = next((row for row in later if row["action"] in CANARY_OUTCOMES), None)
    if end is None:
        return None
    reason = f": {end['reason']}" if end["reason"] else ""
    outcome = f"{CANARY_OUTCOMES[end['action']]} at {format_time(end['created_at'])}"
    return f"the last canary, {start['subject']}, {outcome}, by {end['actor']}{reason}"


@pins.command("set")
def set_pin(
    version: VersionNumber,
    user: Annotated[str | None, typer.Option(help="an end user, as requests name them")] = None,
    conversation: Annotated[str | None, typer.Option(help="a conversation's id")] = None,
    key: Annotated[
        str | None, typer.Option(help="an API key's id, or its prefix as `attune keys list` shows it")
    ] = None,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Pin one of them to this version, from the next request on."""
    subjects = drop_unset(user=user, conversation=conversation, key=key and key.removesuffix("…"))
    if len(subjects) != 1:
        raise CommandError("give exactly one of --user, --conversation and --key")
    [(kind, subject)] = subjects.items()
    body = {"kind": kind, "subject": subject, "version": parse_version_number(version), "reason": reason}
    print_object(Api().put(policy_path(policy, "/pins"), body), json, _render_pin)


@pins.command("list")
def list_pins(
    kind: Annotated[str | None, typer.Option(help="conversation, user or key; default: all")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """List the pins of a policy, the newest first."""
    rows = Api().list_all(policy_path(policy, "/pins"), kind=kind)
    rows.sort(key=lambda row: row["created_at"], reverse=True)
    print_list("pins", PIN_COLUMNS, rows, json)


@pins.command("remove")
def remove_pin(
    id: Annotated[str, typer.Argument(help="pin-…, as `attune pin list` shows it")],
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Remove a pin: requests get the deployed version again."""
    print_object(Api().delete(policy_path(policy, f"/pins/{id}")), json, lambda row: f"{row['id']} is removed")


def _render_pin(row: Row) -> str:
    suffix = "" if row["loaded"] else "; it is not loaded yet, and serves as soon as it is"
    return f"{row['kind']} {row['subject']} is pinned to {row['version']}{suffix}"
