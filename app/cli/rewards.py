"""`attune rewards show|set|reset` and `attune rewards models list|fit|serve|disable`: reward sources, reward models."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, JsonFile, PolicyName, Reason, policy_path, read_json_file
from app.core.settings import get_settings

rewards = typer.Typer(no_args_is_help=True, help="Configure a policy's reward sources and their weights.")
models = typer.Typer(no_args_is_help=True, help="Manage the reward models that are fitted to human feedback.")
rewards.add_typer(models, name="models")
ModelNumber = Annotated[int, typer.Argument(min=1, help="the reward model's number")]


@rewards.command("show")
def show_rewards(policy: PolicyName = None) -> None:
    """Print the configuration as JSON, which `attune rewards set` accepts."""
    output.print_json(Api(get_settings()).get(f"{policy_path(policy)}/rewards")["rewards"])


@rewards.command("set")
def set_rewards(file: JsonFile, policy: PolicyName = None, json: Json = False) -> None:
    """Set the policy's own configuration, for feedback and judgements from now on (see docs/rewards.md)."""
    body = Api(get_settings()).put(f"{policy_path(policy)}/rewards", read_json_file(file))
    output.print_object(body, json, _render_config)


@rewards.command("reset")
def reset_rewards(policy: PolicyName = None, json: Json = False) -> None:
    """Use the deployment's configuration again."""
    output.print_object(Api(get_settings()).delete(f"{policy_path(policy)}/rewards"), json, _render_config)


def _render_config(body: dict[str, Any]) -> str:
    owner = "its own rewards" if body["overridden"] else "the deployment's rewards"
    return f"{body['policy']} uses {owner}: {', '.join(source['name'] for source in body['rewards']['sources'])}"


@models.command("list")
def list_models(policy: PolicyName = None, json: Json = False) -> None:
    """List the reward models with their held-out metrics, and the agreement of the serving one with people."""
    output.print_object(Api(get_settings()).get(_models_path(policy)), json, _render_models)


@models.command("fit")
def fit_model(
    serve: Annotated[bool, typer.Option(help="serve the reward model once it is fitted and good enough")] = True,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Request a fit on the feedback received until now. It runs between two updates."""
    row = Api(get_settings()).post(_models_path(policy), {"serve": serve, "reason": reason})
    output.print_object(row, json, _render_model)


@models.command("serve")
def serve_model(number: ModelNumber, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Use this reward model from now on, in place of the one that serves."""
    row = Api(get_settings()).post(f"{_models_path(policy)}/{number}/serve", {"reason": reason})
    output.print_object(row, json, _render_model)


@models.command("disable")
def disable_model(number: ModelNumber, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Stop using this reward model. None is fitted automatically until one serves again."""
    row = Api(get_settings()).post(f"{_models_path(policy)}/{number}/disable", {"reason": reason})
    output.print_object(row, json, _render_model)


def _models_path(policy: str | None) -> str:
    return f"{policy_path(policy)}/reward-models"


def _render_models(body: dict[str, Any]) -> Iterator[str]:
    if (agreement := body["human_agreement"]) is not None:
        share = output.format_optional(agreement["agreement"], "{:.0%}")
        yield (
            f"{body['serving']} agrees with {share} of people's last {agreement['labels']} labels; "
            f"the minimum is {agreement['min_agreement']:.0%}"
        )
    for row in body["data"]:
        yield _render_model(row)
    if not body["data"]:
        yield f"{body['policy']} has no reward model yet"


def _render_model(row: dict[str, Any]) -> str:
    """Example: shop/rm-2: serving, 812 binary labels and 40 pairs of 31 people, agreement 81%"""
    line = f"{row['name']}: {row['state']}"
    if row["binary_labels"] is not None:
        line += f", {row['binary_labels']} binary labels and {row['pairs']} pairs of {row['raters']} people"
    metrics = row["metrics"]
    if "agreement" in metrics:
        line += f", agreement {metrics['agreement']:.0%}"
    if "calibration_error" in metrics:
        line += f", calibration error {metrics['calibration_error']:.2f}"
    return line + output.parenthesize(row["reason"])
