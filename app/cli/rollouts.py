"""attune rollouts show|set|reset|plan|plans|pause|resume|cancel: what the learner asks for itself."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api, Refused
from app.cli.options import Json, PolicyName, Reason, content_of, path_of
from app.core.settings import get_settings

rollouts = typer.Typer(
    no_args_is_help=True, help="Replies that the learner asks for itself: group samples, prompt sets."
)
PlanId = Annotated[str, typer.Argument(help="as `attune rollouts plans` shows it")]


@rollouts.command("show")
def show_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """The settings, how many there were, and what they cost."""
    _shown(Api(get_settings()).get(_of(policy)), json)


@rollouts.command("set")
def set_rollouts(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON; see docs/rollouts.md")],
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """For replies that end from now on."""
    _shown(Api(get_settings()).put(_of(policy), content_of(file)), json)


@rollouts.command("reset")
def reset_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """Back to the deployment's."""
    _shown(Api(get_settings()).delete(_of(policy)), json)


@rollouts.command("plan")
def create_plan(
    dataset: Annotated[str, typer.Argument(help="a dataset of prompts: `attune import` makes one")],
    verifier: Annotated[
        str, typer.Option(help='exact, contains, number, choice, regex, a name of your own, or JSON with a "type"')
    ],
    n: Annotated[int, typer.Option(help="replies to each prompt")] = 8,
    passes: Annotated[int, typer.Option(help="over the whole dataset")] = 1,
    temperature: Annotated[float, typer.Option()] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="of one reply; the deployment's if unset")] = None,
    prompts_per_version: Annotated[int | None, typer.Option(help="what a batch holds if unset")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Ask the serving version every prompt of a dataset, and learn from what the verifier says."""
    body = {
        "dataset": dataset,
        "verifier": _verifier(verifier),
        "n": n,
        "passes": passes,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "prompts_per_version": prompts_per_version,
    }
    _plan(Api(get_settings()).post(f"{_of(policy)}/plans", body), json)


@rollouts.command("plans")
def list_plans(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20, policy: PolicyName = None, json: Json = False
) -> None:
    """The newest first."""
    page = Api(get_settings()).get(f"{_of(policy)}/plans", limit=limit)
    if json:
        output.as_json(page["data"])
        return
    for body in page["data"]:
        _plan(body, json)


@rollouts.command("pause")
def pause(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish what has been asked, and ask nothing more."""
    _step("pause", plan, reason, policy, json)


@rollouts.command("resume")
def resume(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Go on where it was paused."""
    _step("resume", plan, reason, policy, json)


@rollouts.command("cancel")
def cancel(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """For good. What has been verified is still learned from."""
    _step("cancel", plan, reason, policy, json)


OURS = ("exact", "contains", "number", "choice", "regex", "json_schema")


def _verifier(told: str) -> Any:
    if told.lstrip().startswith("{"):
        try:
            return jsonlib.loads(told)
        except ValueError as error:
            raise Refused(f"the verifier is no JSON: {error}") from error
    return {"type": told} if told in OURS else {"type": "custom", "name": told}


def _of(policy: str | None) -> str:
    return f"{path_of(policy)}/rollouts"


def _step(verb: str, plan: str, reason: str | None, policy: str | None, json: bool) -> None:
    _plan(Api(get_settings()).post(f"{_of(policy)}/plans/{plan}/{verb}", {"reason": reason}), json)


def _shown(body: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(body)
        return
    whose = "its own" if body["own"] else "the deployment's"
    output.console.print(
        f"{body['policy']} rolls out by {whose} settings: {jsonlib.dumps(body['rollouts'])}", markup=False
    )
    if body["idle"] is not None:
        output.console.print(f"no group samples: {body['idle']}", markup=False)
    for name in ("group_sampling", "prompt_sets", "shadow_deployments"):
        output.console.print(f"{name.replace('_', ' ')}: {_counts(body[name])}")
    output.console.print(f"group samples in the last hour: {body['tokens_last_hour']} tokens")


def _plan(body: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(body)
        return
    mean = "–" if body["mean_reward"] is None else f"{body['mean_reward']:+.2f}"
    at = f"pass {body['pass_number'] + 1} of {body['passes']}, prompt {body['position']} of {body['num_prompts']}"
    if body["pass_number"] >= body["passes"]:
        at = f"{body['passes']} × {body['num_prompts']} prompts"
    why = f" ({body['reason']})" if body["reason"] else ""
    output.console.print(f"{body['id']}: {body['dataset']}, {body['state']}{why}, {at}", markup=False)
    output.console.print(
        f"  replies: {_counts(body['replies'])}; mean reward {mean} of {body['verified']}", markup=False
    )


def _counts(tally: dict[str, Any]) -> str:
    states = ", ".join(f"{tally[state]} {state}" for state in ("open", "done", "skipped", "failed"))
    return f"{states}; {tally['tokens']} tokens in {tally['seconds']:.0f} s"
