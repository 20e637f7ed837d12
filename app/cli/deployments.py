"""attune deploy | canary | shadow | delivery: which version reaches whom."""

import json as jsonlib
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from app.cli import output
from app.cli.client import Api, Refused
from app.cli.options import Json, Number, PolicyName, Reason, number, path_of
from app.core.settings import get_settings

ENDS = {"canary ended": "was taken back", "deploy": "went live"}
canary = typer.Typer(no_args_is_help=True, help="The version that a share of the conversations gets.")
shadow = typer.Typer(no_args_is_help=True, help="The version that answers beside what serves, unheard.")


def deploy(
    version: Number,
    share: Annotated[float | None, typer.Option(help="of the conversations: a canary; everybody's if unset")] = None,
    watch: Annotated[bool, typer.Option(help="a canary ends by itself, as its figures say")] = True,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Let a version that has been served before answer everybody, or a share."""
    body = {"version": number(version), "share": share, "watch": watch, "reason": reason}
    _show(Api(get_settings()).post(f"{path_of(policy)}/deploy", body), json)


@canary.command("show")
def show_canary(policy: PolicyName = None, json: Json = False) -> None:
    """Both sides, and what their figures say; or how the last one ended."""
    api = Api(get_settings())
    row = api.get(f"{path_of(policy)}/deployment")
    _show(row, json)
    if not json and row["canary"] is None and (told := _last(api, row["policy"])) is not None:
        typer.echo(told)


@canary.command("promote")
def promote(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """The canary for everybody."""
    _show(Api(get_settings()).post(f"{path_of(policy)}/canary/promote", {"reason": reason}), json)


@canary.command("abort")
def abort(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Everybody back on what serves."""
    _show(Api(get_settings()).post(f"{path_of(policy)}/canary/abort", {"reason": reason}), json)


@shadow.command("show")
def show_shadow(policy: PolicyName = None, json: Json = False) -> None:
    """Both sides, and what their figures say."""
    _show(Api(get_settings()).get(f"{path_of(policy)}/deployment"), json)


@shadow.command("promote")
def promote_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """It has shown enough: it goes out as new versions do."""
    _show(Api(get_settings()).post(f"{path_of(policy)}/shadow/promote", {"reason": reason}), json)


@shadow.command("abort")
def abort_shadow(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """The version is rejected; learning goes on from what serves."""
    _show(Api(get_settings()).post(f"{path_of(policy)}/shadow/abort", {"reason": reason}), json)


def delivery(
    conversations: Annotated[str | None, typer.Option(help="follow, or sticky: each ends on its version")] = None,
    canaries: Annotated[
        str | None, typer.Option("--canary", help='how new versions go out, as JSON: {"share": 0.05}; default: unset')
    ] = None,
    shadow_deployments: Annotated[
        str | None,
        typer.Option("--shadow", help='how they run in shadow before that, as JSON: {"share": 0.2}; default: unset'),
    ] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """How versions reach people. Without options it only shows that."""
    api = Api(get_settings())
    now: dict[str, Any] = api.get(f"{path_of(policy)}/deployment")
    if (conversations, canaries, shadow_deployments) != (None, None, None):
        body = {
            "conversations": now["conversations"],
            "canary": now["canary_config"] if now["own_canary"] else None,
            "shadow": now["shadow_config"] if now["own_shadow"] else None,
        }
        if conversations is not None:
            body["conversations"] = conversations
        if canaries is not None:
            body["canary"] = None if canaries == "default" else _parsed("--canary", canaries)
        if shadow_deployments is not None:
            body["shadow"] = None if shadow_deployments == "default" else _parsed("--shadow", shadow_deployments)
        now = api.put(f"{path_of(policy)}/delivery", body)
    _show(now, json)


def _parsed(option: str, told: str) -> Any:
    try:
        return jsonlib.loads(told)
    except ValueError as error:
        raise Refused(f"{option} is no JSON: {error}") from error


def _show(row: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(row)
        return
    first = (
        f"a shadow deployment beside {row['shadow_config']['share']:.1%} of the replies, then "
        if row["shadow_config"]
        else ""
    )
    how = f"each new version answers {row['canary_config']['share']:.1%} first" if row["canary_config"] else "at once"
    typer.echo(
        f"{row['policy']}: {row['serving']} serves; conversations {row['conversations']}; new versions: {first}{how}"
    )
    if row["shadow"] is not None:
        out = row["shadow"]
        output.console.print(_table(f"{out['version']} runs in shadow beside {out['share']:.1%} of the replies", out))
        typer.echo(f"{out['verdict']}: {out['idle'] or out['reason']}")
    if row["canary"] is not None:
        out = row["canary"]
        watched = "watched" if out["watched"] else "not watched"
        title = f"{out['version']} for {out['share']:.1%} of the conversations, {watched}"
        output.console.print(_table(title, out))
        for line in _evidence(out):
            typer.echo(line)
        typer.echo(f"{out['verdict'].replace('_', ' ')}: {out['reason']}")


def _evidence(out: dict[str, Any]) -> Iterator[str]:
    """How near it is to each of its ends."""
    figures = out["figures"]
    for what, shown, needed, end in (
        ("people approve of it less", "less_approval", "alarm_at", "takes it back"),
        ("more of its replies fail", "more_failures", "alarm_at", "takes it back"),
        ("it is good enough", "no_worse", "promote_at", "lets it go live"),
    ):
        share = max(0.0, figures[shown] / figures[needed])
        does = end if out["watched"] else "would end a watched one"
        yield f"evidence that {what + ':':26} {share:5.0%} of what {does}"
    if out["watched"]:
        left = max(0.0, out["until"] - time.time())
        yield f"it is watched, and ends by itself; in {left:,.0f} s at the latest, by what was heard until then"


def _last(api: Api, policy: str) -> str | None:
    """How the last canary ended, and why."""
    begun = api.get("/v1/audit", action="canary", limit=1000)["data"]
    began = next((row for row in begun if row["subject"].startswith(f"{policy}@")), None)
    if began is None:
        return None
    after = api.get("/v1/audit", subject=began["subject"], after=began["number"], order="asc")["data"]
    end = next((row for row in after if row["action"] in ENDS), None)
    if end is None:
        return None
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end["created_at"]))
    why = f": {end['reason']}" if end["reason"] else ""
    return f"the last canary, {began['subject']}, {ENDS[end['action']]} at {moment}, by {end['actor']}{why}"


def _table(title: str, out: dict[str, Any]) -> Table:
    table = Table(title=title)
    for heading in ("version", "users", "failed", "raters", "approval", "tokens a reply", "ms a token"):
        table.add_column(heading, justify="left" if heading == "version" else "right")
    for side in (out["candidate"], out["stable"]):
        table.add_row(
            side["version"],
            str(side["turns"]),
            str(side["failed"]),
            str(side["rated"]),
            _shown(side["approval"], "{:.1%}"),
            _shown(side["mean_length"], "{:.0f}"),
            _shown(side["seconds_per_token"] and 1000 * side["seconds_per_token"], "{:.1f}"),
        )
    return table


def _shown(value: float | None, how: str) -> str:
    return "–" if value is None else how.format(value)
