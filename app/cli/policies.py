"""`attune policies`: several policies over one base model, each with settings of its own."""

import json as jsonlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.cli.client import Api, CommandError, drop_unset
from app.cli.options import Json, Reason, Yes
from app.cli.output import Column, Row, parenthesize, print_list, print_object

policies = typer.Typer(no_args_is_help=True, help="Policies over one base model, each with settings of its own.")
Name = Annotated[str, typer.Argument(help="the policy's name")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help='a setting of its own, e.g. "trainer.optim.lr=1e-3"; may be given more than once'),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--from-file",
        exists=True,
        dir_okay=False,
        help="a TOML file with settings of its own, in the sections of attune.toml",
    ),
]
TrafficFrom = Annotated[str | None, typer.Option(help="answer a share of the requests that name this policy")]
Share = Annotated[float | None, typer.Option("--share", help="with --traffic-from: of its users and conversations")]
COLUMNS = (
    Column("policy", "name"),
    Column("state", "state"),
    Column("serves", "serving"),
    Column("trains from", "head"),
    Column("learning", "mode"),
    Column("traffic", lambda row: _traffic(row) or None),
)


@policies.command("list")
def list_policies(
    archived: Annotated[bool, typer.Option("--archived", help="also the archived ones")] = False, json: Json = False
) -> None:
    """List the policies of the project."""
    print_list("policies", COLUMNS, Api().get("/v1/policies", archived=archived or None)["data"], json)


@policies.command("show")
def show(name: Name, json: Json = False) -> None:
    """Show a policy and its settings: all that may differ between policies, its own marked."""
    print_object(Api().get(f"/v1/policies/{name}"), json, lambda row: _render(row, everything=True))


@policies.command("create")
def create(
    name: Name,
    set: Sets = None,
    from_file: File = None,
    traffic_from: TrafficFrom = None,
    share: Share = None,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """Create a policy over the same base model. It answers at once, and learns from its own traffic."""
    body = drop_unset(
        name=name, settings=_settings(set, from_file), traffic=_parse_traffic(traffic_from, share), reason=reason
    )
    print_object(Api().post("/v1/policies", body), json, _render)


@policies.command("update")
def update(
    name: Name,
    set: Sets = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="return to the deployment's value; may be given more than once")
    ] = None,
    from_file: File = None,
    traffic_from: TrafficFrom = None,
    share: Share = None,
    own_traffic: Annotated[bool, typer.Option("--own-traffic", help="answer only requests that name it")] = False,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """Change settings of a policy, or the share of another's traffic that it answers."""
    settings = _settings(set, from_file)
    for path in unset or []:
        settings = _merge(settings, _nest(path, None))
    body: Row = drop_unset(settings=settings, traffic=_parse_traffic(traffic_from, share), reason=reason)
    if own_traffic:
        body["traffic"] = None
    if not settings and "traffic" not in body:
        raise CommandError("nothing to change: give --set, --unset, --from-file, --traffic-from or --own-traffic")
    print_object(Api().patch(f"/v1/policies/{name}", body), json, _render)


@policies.command("pause")
def pause(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Stop training a policy; it still answers chats."""
    _act(name, "pause", reason, json)


@policies.command("resume")
def resume(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Train a paused policy again."""
    _act(name, "resume", reason, json)


@policies.command("archive")
def archive(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Let a policy answer no chats any more, and keep its versions."""
    _act(name, "archive", reason, json)


@policies.command("unarchive")
def unarchive(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Bring an archived policy back."""
    _act(name, "unarchive", reason, json)


@policies.command("delete")
def delete(
    name: Name,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete an archived policy for good, with the files of its versions."""
    if not yes:
        typer.confirm(f"Delete '{name}' and the files of all its versions? This cannot be undone.", abort=True)
    print_object(Api().delete(f"/v1/policies/{name}"), json, lambda row: f"{row['name']} is deleted")


def _act(name: str, verb: str, reason: str | None, json: bool) -> None:
    print_object(Api().post(f"/v1/policies/{name}/{verb}", {"reason": reason}), json, _render)


def _settings(pairs: list[str] | None, file: Path | None) -> Row:
    """Return the settings of the file, with those of `--set` in their places."""
    settings: Row = {}
    if file is not None:
        try:
            settings = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CommandError(f"{file} is not valid TOML: {error}") from error
    for pair in pairs or []:
        path, separator, text = pair.partition("=")
        if not separator or not path:
            raise CommandError(f'--set "{pair}" must be SETTING=VALUE, e.g. trainer.optim.lr=1e-3')
        settings = _merge(settings, _nest(path, _parse(text)))
    return settings


def _nest(path: str, value: object) -> Row:
    """Example: ("trainer.optim.lr", 1e-3) -> {"trainer": {"optim": {"lr": 1e-3}}}"""
    *outer, last = path.strip().split(".")
    nested: Row = {last: value}
    for name in reversed(outer):
        nested = {name: nested}
    return nested


def _parse(text: str) -> object:
    """Return a value that may be JSON: a number, a list, a table; other text as it is."""
    try:
        return jsonlib.loads(text)
    except ValueError:
        return text


def _merge(base: Row, other: Row) -> Row:
    merged = dict(base)
    for name, value in other.items():
        before = merged.get(name)
        if name == "algorithm" and isinstance(before, str) and isinstance(value, dict):
            before = {"type": before}
        merged[name] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _parse_traffic(source: str | None, share: float | None) -> Row | None:
    if (source is None) != (share is None):
        raise CommandError("--traffic-from and --share belong together")
    return None if source is None else {"from": source, "share": share}


def _traffic(row: Row) -> str:
    traffic = row["traffic"]
    return f"{traffic['share']:.0%} of {traffic['from']}" if traffic else ""


def _render(row: Row, *, everything: bool = False) -> Iterator[str]:
    traffic = f", answers {_traffic(row)}" if row["traffic"] else ""
    state = f"{row['name']} is {row['state']}{parenthesize(row['state_reason'])}"
    yield f"{state}: serves {row['serving']}, trains from {row['head']}{traffic}"
    own = row["own"]
    if not own and not everything:
        yield "all settings are the deployment's"
    for path, value in _leaves(row["settings"]):
        is_own = any(f"{one}.".startswith(f"{path}.") or f"{path}.".startswith(f"{one}.") for one in own)
        if everything or is_own:
            text = "unset" if value is None else jsonlib.dumps(value, ensure_ascii=False)
            yield f"  {path} = {text}{'  # its own' if is_own and everything else ''}"


def _leaves(table: Row, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
