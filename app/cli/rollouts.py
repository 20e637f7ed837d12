"""`attune rollouts show|set|reset|plan|plans|pause|resume|cancel`: replies that are sampled for training."""

import json as jsonlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, JsonFile, PolicyName, Reason, parse_json, policy_path, read_json_file
from app.core.settings import get_settings

BUILT_IN_VERIFIERS = ("exact", "contains", "number", "choice", "regex", "json_schema")
rollouts = typer.Typer(
    no_args_is_help=True, help="Replies that are sampled for training: group samples and prompt sets."
)
PlanId = Annotated[str, typer.Argument(help="as `attune rollouts plans` shows it")]


@rollouts.command("show")
def show_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """Show the settings, the number of rollouts and their cost."""
    output.print_object(Api(get_settings()).get(_path(policy)), json, _render_settings)


@rollouts.command("set")
def set_rollouts(file: JsonFile, policy: PolicyName = None, json: Json = False) -> None:
    """Set the policy's own settings, for replies that end from now on (see docs/rollouts.md)."""
    body = Api(get_settings()).put(_path(policy), read_json_file(file))
    output.print_object(body, json, _render_settings)


@rollouts.command("reset")
def reset_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """Use the deployment's settings again."""
    output.print_object(Api(get_settings()).delete(_path(policy)), json, _render_settings)


@rollouts.command("plan")
def create_plan(
    dataset: Annotated[str, typer.Argument(help="a dataset of prompts, made by `attune import prompts`")],
    verifier: Annotated[
        str, typer.Option(help='exact, contains, number, choice, regex, a name of your own, or JSON with a "type"')
    ],
    n: Annotated[int, typer.Option(help="replies to each prompt")] = 8,
    passes: Annotated[int, typer.Option(help="passes over the whole dataset")] = 1,
    temperature: Annotated[float, typer.Option(help="the sampling temperature")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="per reply; default: the deployment's limit")] = None,
    prompts_per_version: Annotated[int | None, typer.Option(help="default: as many as a batch takes")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Sample replies to every prompt of a dataset, and train on the verifier's rewards."""
    body = {
        "dataset": dataset,
        "verifier": _parse_verifier(verifier),
        "n": n,
        "passes": passes,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "prompts_per_version": prompts_per_version,
    }
    output.print_object(Api(get_settings()).post(f"{_path(policy)}/plans", body), json, _render_plan)


@rollouts.command("plans")
def list_plans(
    limit: Annotated[int, typer.Option(min=1, max=100, help="the maximum number of plans")] = 20,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """List the rollout plans, the newest first."""
    rows = Api(get_settings()).get(f"{_path(policy)}/plans", limit=limit)["data"]
    output.print_object(rows, json, lambda rows: (line for row in rows for line in _render_plan(row)))


@rollouts.command("pause")
def pause_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish the replies that were requested, and request no more."""
    _post_action("pause", plan, reason, policy, json)


@rollouts.command("resume")
def resume_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Continue a paused plan."""
    _post_action("resume", plan, reason, policy, json)


@rollouts.command("cancel")
def cancel_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End a plan permanently. Replies that were verified are still trained on."""
    _post_action("cancel", plan, reason, policy, json)


def _parse_verifier(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return parse_json(text, "--verifier")
    return {"type": text} if text in BUILT_IN_VERIFIERS else {"type": "custom", "name": text}


def _path(policy: str | None) -> str:
    return f"{policy_path(policy)}/rollouts"


def _post_action(action: str, plan: str, reason: str | None, policy: str | None, json: bool) -> None:
    row = Api(get_settings()).post(f"{_path(policy)}/plans/{plan}/{action}", {"reason": reason})
    output.print_object(row, json, _render_plan)


def _render_settings(body: dict[str, Any]) -> Iterator[str]:
    owner = "its own settings" if body["overridden"] else "the deployment's settings"
    yield f"{body['policy']} uses {owner}: {jsonlib.dumps(body['rollouts'])}"
    if body["disabled_reason"] is not None:
        yield f"no group samples: {body['disabled_reason']}"
    for name in ("group_sampling", "prompt_sets", "shadow_deployments"):
        yield f"{name.replace('_', ' ')}: {_format_counts(body[name])}"
    yield f"group samples in the last hour: {body['tokens_last_hour']} tokens"


def _render_plan(row: dict[str, Any]) -> Iterator[str]:
    mean = output.format_optional(row["mean_reward"], "{:+.2f}")
    progress = f"pass {row['pass_number'] + 1} of {row['passes']}, prompt {row['position']} of {row['num_prompts']}"
    if row["pass_number"] >= row["passes"]:
        progress = f"{row['passes']} × {row['num_prompts']} prompts"
    yield f"{row['id']}: {row['dataset']}, {row['state']}{output.parenthesize(row['reason'])}, {progress}"
    yield f"  replies: {_format_counts(row['replies'])}; mean reward {mean} of {row['verified']}"


def _format_counts(counts: dict[str, Any]) -> str:
    states = ", ".join(f"{counts[state]} {state}" for state in ("open", "done", "skipped", "failed"))
    return f"{states}; {counts['tokens']} tokens in {counts['seconds']:.0f} s"
