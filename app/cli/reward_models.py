"""attune rewards models list|fit|serve|silence: what has learned to judge, and whether it is listened to."""

from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, PolicyName, Reason, path_of
from app.core.settings import get_settings

models = typer.Typer(no_args_is_help=True, help="Reward models: what has learned to judge as people do.")
Number = Annotated[int, typer.Argument(min=1, help="the reward model's number")]


@models.command("list")
def list_models(policy: PolicyName = None, json: Json = False) -> None:
    """All of them, with what was measured when they were fitted, and how the one that serves does."""
    body = Api(get_settings()).get(_of(policy))
    if json:
        output.as_json(body)
        return
    if (people := body["people"]) is not None:
        share = "–" if people["agreement"] is None else f"{people['agreement']:.0%}"
        told = f"{share} of people's last {people['words']} words, {people['min_agreement']:.0%} is asked for"
        output.console.print(f"{body['serving']} agrees with {told}", markup=False)
    for row in body["data"]:
        output.console.print(_line(row), markup=False)
    if not body["data"]:
        output.console.print(f"{body['policy']} has no reward model yet")


@models.command("fit")
def fit(
    serve: Annotated[bool, typer.Option(help="let it serve once it is fitted and good enough")] = True,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Have one fitted from what people have said until now, between two batches."""
    _told(Api(get_settings()).post(_of(policy), {"serve": serve, "reason": reason}), json)


@models.command("serve")
def serve(number: Number, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Listen to it from now on, and no longer to the one that served."""
    _told(Api(get_settings()).post(f"{_of(policy)}/{number}/serve", {"reason": reason}), json)


@models.command("disable")
def disable(number: Number, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Listen to it no longer; none is fitted by itself until one serves again."""
    _told(Api(get_settings()).post(f"{_of(policy)}/{number}/disable", {"reason": reason}), json)


def _of(policy: str | None) -> str:
    return f"{path_of(policy)}/reward-models"


def _told(row: dict[str, Any], json: bool) -> None:
    output.as_json(row) if json else output.console.print(_line(row), markup=False)


def _line(row: dict[str, Any]) -> str:
    """Example: shop/rm-2: serving, 812 thumbs and 40 pairs of 31 people, agreement 81%, calibration error 0.04"""
    told = f"{row['name']}: {row['state']}"
    if row["thumbs"] is not None:
        told += f", {row['thumbs']} thumbs and {row['pairs']} pairs of {row['raters']} people"
    metrics = row["metrics"]
    if "agreement" in metrics:
        told += f", agreement {metrics['agreement']:.0%}"
    if "calibration_error" in metrics:
        told += f", calibration error {metrics['calibration_error']:.2f}"
    return told + (f" ({row['reason']})" if row["reason"] else "")
