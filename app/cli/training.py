"""`attune train status|pause|resume|trigger`: the training loop of a policy."""

from collections.abc import Iterator
from typing import Any

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, PolicyName, Reason, policy_path
from app.core.settings import get_settings

train = typer.Typer(no_args_is_help=True, help="Show, pause and resume the training loop of a policy.")


@train.command("status")
def show_status(policy: PolicyName = None, json: Json = False) -> None:
    """Show the mode, the samples, what the next batch waits for, and the latest updates."""
    output.print_object(Api(get_settings()).get(_path(policy)), json, _render)


@train.command("pause")
def pause(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish the current update and assemble no more batches."""
    _post_action("pause", reason, policy, json)


@train.command("resume")
def resume(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Resume training and reset the KL guard's alarms."""
    _post_action("resume", reason, policy, json)


@train.command("trigger")
def trigger(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Assemble the next batch as soon as two samples are ready."""
    _post_action("trigger", reason, policy, json)


def _path(policy: str | None) -> str:
    return f"{policy_path(policy)}/training"


def _post_action(action: str, reason: str | None, policy: str | None, json: bool) -> None:
    body = Api(get_settings()).post(f"{_path(policy)}/{action}", {"reason": reason})
    output.print_object(body, json, _render)


def _render(body: dict[str, Any]) -> Iterator[str]:
    yield f"{body['policy']}: {body['mode']}{output.parenthesize(body['reason'])}, {body['kl_alarms']} alarms"
    counts = ", ".join(f"{count} {state}" for state, count in body["samples"].items())
    yield f"samples: {counts}; {body['raters']} raters; batch size {body['batch_size']}"
    yield f"next batch: {body['waiting_for']}"
    for row in body["updates"]:
        version = f" → {row['version']}" if row["version"] else ""
        line = (
            f"  {row['id']}: {row['state']}, {row['samples']} samples of {row['parent']}{version} {row['reason'] or ''}"
        )
        yield line.rstrip()
