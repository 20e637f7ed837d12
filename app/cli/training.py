"""attune train status|pause|resume|trigger, attune rewards show|set|reset, attune audit: how a policy learns."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, PolicyName, Reason, content_of, path_of
from app.core.settings import get_settings

train = typer.Typer(no_args_is_help=True, help="How a policy learns: look, pause, resume.")
rewards = typer.Typer(no_args_is_help=True, help="What a reply is worth to a policy: its sources and their weights.")
Exactly = Annotated[str | None, typer.Option(help="exactly this one")]


@train.command("status")
def train_status(policy: PolicyName = None, json: Json = False) -> None:
    """Mode, samples that wait, and what the next batch waits for."""
    _shown(Api(get_settings()).get(f"{path_of(policy)}/training"), json)


@train.command("pause")
def pause(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish what is under way, and assemble nothing more."""
    _shown(_told("pause", reason, policy), json)


@train.command("resume")
def resume(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Learn on, with the guard's alarms forgotten."""
    _shown(_told("resume", reason, policy), json)


@train.command("trigger")
def trigger(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Let the next batch be as small as two samples."""
    _shown(_told("trigger", reason, policy), json)


@rewards.command("show")
def show_rewards(policy: PolicyName = None) -> None:
    """As JSON, which `attune rewards set` takes again."""
    output.as_json(Api(get_settings()).get(f"{path_of(policy)}/rewards")["rewards"])


@rewards.command("set")
def set_rewards(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON; see docs/rewards.md")],
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """For what is judged from now on."""
    _listens(Api(get_settings()).put(f"{path_of(policy)}/rewards", content_of(file)), json)


@rewards.command("reset")
def reset_rewards(policy: PolicyName = None, json: Json = False) -> None:
    """Back to the deployment's."""
    _listens(Api(get_settings()).delete(f"{path_of(policy)}/rewards"), json)


def audit(
    action: Exactly = None,
    subject: Exactly = None,
    actor: Exactly = None,
    since: Annotated[float | None, typer.Option(help="from this time on (unix seconds)")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="entries at most, the newest")] = 20,
    json: Json = False,
) -> None:
    """Who moved what, when and why."""
    asked = {"action": action, "subject": subject, "actor": actor, "since": since, "limit": limit}
    page = Api(get_settings()).get("/v1/audit", **{name: value for name, value in asked.items() if value is not None})
    if json:
        output.as_json(page["data"])
        return
    for row in page["data"]:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created_at"]))
        told = f"{moment}  {row['actor']}: {row['action']} {row['subject']} {row['reason'] or ''}"
        output.console.print(told.rstrip(), markup=False)


def _told(verb: str, reason: str | None, policy: str | None) -> dict[str, Any]:
    told: dict[str, Any] = Api(get_settings()).post(f"{path_of(policy)}/training/{verb}", {"reason": reason})
    return told


def _shown(body: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(body)
        return
    samples = body["samples"]
    why = f" ({body['reason']})" if body["reason"] else ""
    output.console.print(f"{body['policy']}: {body['mode']}{why}, {body['alarms']} alarms", markup=False)
    counted = ", ".join(f"{count} {name}" for name, count in samples.items())
    output.console.print(f"samples: {counted}; {body['raters']} raters; a batch takes {body['batch_size']}")
    output.console.print(f"next batch: {body['missing']}", markup=False)
    for row in body["updates"]:
        became = f" → {row['version']}" if row["version"] else ""
        told = (
            f"  {row['id']}: {row['state']}, {row['samples']} samples of {row['parent']}{became} {row['reason'] or ''}"
        )
        output.console.print(told.rstrip(), markup=False)


def _listens(body: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(body)
        return
    whose = "its own rewards" if body["own"] else "the deployment's rewards"
    typer.echo(f"{body['policy']} listens to {whose}: {', '.join(one['name'] for one in body['rewards']['sources'])}")
