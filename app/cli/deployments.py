"""`attune deploy | rollback | canary | shadow | delivery`: which version serves, and to whom."""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, PolicyName, Reason, VersionNumber, parse_json, parse_version_number, policy_path
from app.cli.output import Column, Renderable
from app.core.settings import get_settings
from app.models import AuditAction

CANARY_OUTCOMES = {AuditAction.CANARY_ENDED: "was taken back", AuditAction.DEPLOYMENT_DEPLOYED: "went live"}
SIDE_COLUMNS = (
    Column("version", "version"),
    Column("users", "turns", right=True),
    Column("failed", "failed", right=True),
    Column("raters", "rated", right=True),
    Column("approval", "approval", "{:.1%}", right=True),
    Column("tokens a reply", "mean_length", "{:.0f}", right=True),
    Column(
        "ms a token", lambda side: side["seconds_per_token"] and 1000 * side["seconds_per_token"], "{:.1f}", right=True
    ),
)
canary = typer.Typer(no_args_is_help=True, help="The canary: a version that serves a share of the conversations.")
shadow = typer.Typer(no_args_is_help=True, help="The shadow deployment: a version whose answers no user sees.")


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
    _print(Api(get_settings()).post(f"{policy_path(policy)}/deploy", body), json)


def rollback(
    to: Annotated[
        str | None,
        typer.Option(help="a version, as 12 or v12; default: end the canary, or serve the parent version"),
    ] = None,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Undo the latest deployment, or deploy an older version and train on from it."""
    api, path = Api(get_settings()), policy_path(policy)
    if to is not None:
        body = {"version": parse_version_number(to), "reason": reason}
    else:
        current = api.get(path)  # the request names the version to undo, so that a repeated request undoes nothing else
        name = current["canary"] or current["serving"]
        body = {"from_version": parse_version_number(name.rpartition("@")[2]), "reason": reason}
    result = api.post(f"{path}/rollback", body)
    output.print_object(result, json, lambda body: f"{body['rolled_back']} → {body['serving']}")


@canary.command("show")
def show_canary(policy: PolicyName = None, json: Json = False) -> None:
    """Show the metrics of the canary and of the live version, or how the last canary ended."""
    api = Api(get_settings())
    row = api.get(f"{policy_path(policy)}/deployment")
    _print(row, json)
    if not json and row["canary"] is None and (summary := _describe_last_canary(api, row["policy"])) is not None:
        typer.echo(summary)


@canary.command("promote")
def promote_canary(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Deploy the canary to all conversations."""
    _print(Api(get_settings()).post(f"{policy_path(policy)}/canary/promote", {"reason": reason}), json)


@canary.command("abort")
def abort_canary(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End the canary: the live version serves all conversations again."""
    _print(Api(get_settings()).post(f"{policy_path(policy)}/canary/abort", {"reason": reason}), json)


@shadow.command("show")
def show_shadow(policy: PolicyName = None, json: Json = False) -> None:
    """Show the metrics of the shadow deployment and of the live version."""
    _print(Api(get_settings()).get(f"{policy_path(policy)}/deployment"), json)


@shadow.command("promote")
def promote_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End the shadow deployment and release the version as new versions are released."""
    _print(Api(get_settings()).post(f"{policy_path(policy)}/shadow/promote", {"reason": reason}), json)


@shadow.command("abort")
def abort_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Reject the shadow version; training continues from the live version."""
    _print(Api(get_settings()).post(f"{policy_path(policy)}/shadow/abort", {"reason": reason}), json)


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
    api = Api(get_settings())
    row: dict[str, Any] = api.get(f"{policy_path(policy)}/deployment")
    if (conversations, canary_config, shadow_config) != (None, None, None):
        body = {
            "conversations": row["conversations"],
            "canary": row["canary_config"] if row["canary_overridden"] else None,
            "shadow": row["shadow_config"] if row["shadow_overridden"] else None,
        }
        if conversations is not None:
            body["conversations"] = conversations
        if canary_config is not None:
            body["canary"] = None if canary_config == "default" else parse_json(canary_config, "--canary")
        if shadow_config is not None:
            body["shadow"] = None if shadow_config == "default" else parse_json(shadow_config, "--shadow")
        row = api.put(f"{policy_path(policy)}/delivery", body)
    _print(row, json)


def _print(row: dict[str, Any], json: bool) -> None:
    output.print_object(row, json, _render)


def _render(row: dict[str, Any]) -> Iterator[Renderable]:
    stages = []
    if row["shadow_config"]:
        stages.append(f"a shadow deployment beside {row['shadow_config']['share']:.1%} of the replies")
    if row["canary_config"]:
        stages.append(f"each new version answers {row['canary_config']['share']:.1%} first")
    else:
        stages.append("at once")
    yield (
        f"{row['policy']}: {row['serving']} serves; conversations {row['conversations']}; "
        f"new versions: {', then '.join(stages)}"
    )
    if (out := row["shadow"]) is not None:
        yield _side_table(f"{out['version']} runs in shadow beside {out['share']:.1%} of the replies", out)
        yield f"{out['verdict']}: {out['disabled_reason'] or out['reason']}"
    if (out := row["canary"]) is not None:
        watched = "watched" if out["watched"] else "not watched"
        yield _side_table(f"{out['version']} for {out['share']:.1%} of the conversations, {watched}", out)
        yield from _evidence_lines(out)
        yield f"{out['verdict'].replace('_', ' ')}: {out['reason']}"


def _evidence_lines(out: dict[str, Any]) -> Iterator[str]:
    """Yield how near the canary is to each of its possible ends."""
    figures = out["figures"]
    for claim, evidence, threshold, outcome in (
        ("people approve of it less", "less_approval", "alarm_at", "takes it back"),
        ("more of its replies fail", "more_failures", "alarm_at", "takes it back"),
        ("it is good enough", "no_worse", "promote_at", "lets it go live"),
    ):
        share = max(0.0, figures[evidence] / figures[threshold])
        effect = outcome if out["watched"] else "would end a watched one"
        yield f"evidence that {claim + ':':26} {share:5.0%} of what {effect}"
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
    ended_at = output.format_time(end["created_at"])
    reason = f": {end['reason']}" if end["reason"] else ""
    outcome = CANARY_OUTCOMES[end["action"]]
    return f"the last canary, {start['subject']}, {outcome} at {ended_at}, by {end['actor']}{reason}"


def _side_table(title: str, out: dict[str, Any]) -> Table:
    return output.make_table(title, SIDE_COLUMNS, [out["candidate"], out["stable"]])
