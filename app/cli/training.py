"""`attune train | rewards | rollouts`: what a policy is trained on, and when."""

import json as jsonlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from app.cli.client import Api
from app.cli.options import Json, JsonFile, PolicyName, Reason, parse_json, policy_path
from app.cli.output import (
    Column,
    Renderable,
    Row,
    format_optional,
    format_votes,
    make_table,
    parenthesize,
    post_action,
    print_object,
)

BUILT_IN_VERIFIERS = ("exact", "contains", "number", "choice", "regex", "json_schema")
train = typer.Typer(no_args_is_help=True, help="Show, pause and resume the training loop of a policy.")
rewards = typer.Typer(no_args_is_help=True, help="Configure a policy's reward sources and their weights.")
models = typer.Typer(no_args_is_help=True, help="Manage the reward models that are fitted to human feedback.")
rewards.add_typer(models, name="models")
rollouts = typer.Typer(
    no_args_is_help=True, help="Replies that are sampled for training: group samples and prompt sets."
)
VOTE_COLUMNS = (
    Column("state", lambda row: row["state"].replace("_", " ")),
    Column("reason", "reason"),
    Column("votes", "count", right=True),
    Column("of people", "people", right=True),
    Column("meaning", "sentence"),
)
ModelNumber = Annotated[int, typer.Argument(min=1, help="the reward model's number")]
PlanId = Annotated[str, typer.Argument(help="as `attune rollouts plans` shows it")]


@train.command("status")
def show_training(policy: PolicyName = None, json: Json = False) -> None:
    """Show the mode, the samples, what the next batch waits for, and the latest updates."""
    print_object(Api().get(policy_path(policy, "/training")), json, _render_training)


@train.command("votes")
def show_votes(policy: PolicyName = None, json: Json = False) -> None:
    """Show what became of every vote: learned from, waiting, or not learned from, and why."""
    print_object(Api().get(policy_path(policy, "/votes")), json, _render_votes)


@train.command("pause")
def pause_training(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish the current update and assemble no more batches."""
    post_action("/training/pause", policy, reason, json, _render_training)


@train.command("resume")
def resume_training(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Resume training and reset the KL guard's alarms."""
    post_action("/training/resume", policy, reason, json, _render_training)


@train.command("trigger")
def trigger_training(reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Assemble the next batch as soon as two samples are ready, and say whether that is now."""
    post_action("/training/trigger", policy, reason, json, _render_trigger)


def _render_trigger(body: Row) -> str:
    """`waiting_for` is what still keeps the batch from being assembled."""
    ready = body["samples"]["open"]
    return f"{body['policy']}: triggered with {ready} ready samples, two are enough. Next batch: {body['waiting_for']}"


def _render_training(body: Row) -> Iterator[str]:
    yield f"{body['policy']}: {body['mode']}{parenthesize(body['reason'])}, {body['kl_alarms']} alarms"
    counts = ", ".join(f"{count} {state}" for state, count in body["samples"].items())
    yield f"samples: {counts}; {body['raters']} raters; batch size {body['batch_size']}"
    yield f"next batch: {body['waiting_for']}"
    for row in body["updates"]:
        version = f" → {row['version']}" if row["version"] else ""
        samples = f"{row['samples']} samples of {row['parent']}{version}"
        yield f"  {row['id']}: {row['state']}, {samples} {row['reason'] or ''}".rstrip()


def _render_votes(body: Row) -> Iterator[Renderable]:
    yield f"{body['policy']}: {format_votes(body)}"
    if body["is_limited"]:
        yield "  more votes wait than are counted here: these are the newest"
    for name in ("people", "programs"):
        yield f"  of {name}: {format_votes(body[name])}"
    yield make_table("votes", VOTE_COLUMNS, body["by_reason"])
    for row in body["by_version"]:
        yield f"  {row['version']}: {row['count']} votes, {row['state'].replace('_', ' ')}"
    delays = body["delays"]
    if delays["median_delay"] is not None:
        seconds = f"{delays['median_delay']:.0f} s after the reply (90 %: {delays['p90_delay']:.0f} s)"
        updates = f"{delays['median_staleness']:.0f} updates behind (90 %: {delays['p90_staleness']:.0f})"
        yield f"votes that were learned from came {seconds}, {updates}"


@rewards.command("show")
def show_rewards(policy: PolicyName = None) -> None:
    """Print the configuration as JSON, which `attune rewards set` accepts."""
    print(jsonlib.dumps(Api().get(policy_path(policy, "/rewards"))["rewards"], indent=2))


@rewards.command("set")
def set_rewards(file: JsonFile, policy: PolicyName = None, json: Json = False) -> None:
    """Set the policy's own configuration, for feedback and judgements from now on (see docs/rewards.md)."""
    config = parse_json(file.read_text(), str(file))
    print_object(Api().put(policy_path(policy, "/rewards"), config), json, _render_rewards)


@rewards.command("reset")
def reset_rewards(policy: PolicyName = None, json: Json = False) -> None:
    """Use the deployment's configuration again."""
    print_object(Api().delete(policy_path(policy, "/rewards")), json, _render_rewards)


def _render_rewards(body: Row) -> str:
    owner = "its own rewards" if body["overridden"] else "the deployment's rewards"
    return f"{body['policy']} uses {owner}: {', '.join(source['name'] for source in body['rewards']['sources'])}"


@models.command("list")
def list_models(policy: PolicyName = None, json: Json = False) -> None:
    """List the reward models with their held-out metrics, and the agreement of the serving one with people."""
    print_object(Api().get(policy_path(policy, "/reward-models")), json, _render_models)


@models.command("fit")
def fit_model(
    serve: Annotated[bool, typer.Option(help="serve the reward model once it is fitted and good enough")] = True,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Request a fit on the feedback received until now. It runs between two updates."""
    row = Api().post(policy_path(policy, "/reward-models"), {"serve": serve, "reason": reason})
    print_object(row, json, _render_model)


@models.command("serve")
def serve_model(number: ModelNumber, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Use this reward model from now on, in place of the one that serves."""
    post_action(f"/reward-models/{number}/serve", policy, reason, json, _render_model)


@models.command("disable")
def disable_model(number: ModelNumber, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Stop using this reward model. None is fitted automatically until one serves again."""
    post_action(f"/reward-models/{number}/disable", policy, reason, json, _render_model)


def _render_models(body: Row) -> Iterator[str]:
    if (agreement := body["human_agreement"]) is not None:
        share = format_optional(agreement["agreement"], "{:.0%}")
        yield (
            f"{body['serving']} agrees with {share} of people's last {agreement['labels']} labels; it orders replies "
            f"as they do in at least {agreement['auc_low']:.0%} of cases, and is disabled at 50%"
        )
    yield from map(_render_model, body["data"])
    if not body["data"]:
        yield f"{body['policy']} has no reward model yet"


def _render_model(row: Row) -> str:
    """Example: shop/rm-2: serving, 812 binary labels and 40 pairs of 31 people, agreement 81%"""
    line = f"{row['name']}: {row['state']}"
    if row["binary_labels"] is not None:
        line += f", {row['binary_labels']} binary labels and {row['pairs']} pairs of {row['raters']} people"
    metrics = row["metrics"]
    if "agreement" in metrics:
        line += f", agreement {metrics['agreement']:.0%}"
    if "calibration_error" in metrics:
        line += f", calibration error {metrics['calibration_error']:.2f}"
    return line + parenthesize(row["reason"])


@rollouts.command("show")
def show_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """Show the settings, the number of rollouts and their cost."""
    print_object(Api().get(policy_path(policy, "/rollouts")), json, _render_rollouts)


@rollouts.command("set")
def set_rollouts(file: JsonFile, policy: PolicyName = None, json: Json = False) -> None:
    """Set the policy's own settings, for replies that end from now on (see docs/rollouts.md)."""
    config = parse_json(file.read_text(), str(file))
    print_object(Api().put(policy_path(policy, "/rollouts"), config), json, _render_rollouts)


@rollouts.command("reset")
def reset_rollouts(policy: PolicyName = None, json: Json = False) -> None:
    """Use the deployment's settings again."""
    print_object(Api().delete(policy_path(policy, "/rollouts")), json, _render_rollouts)


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
    body = {"dataset": dataset, "verifier": _parse_verifier(verifier), "n": n, "passes": passes}
    body |= {"temperature": temperature, "max_tokens": max_tokens, "prompts_per_version": prompts_per_version}
    print_object(Api().post(policy_path(policy, "/rollouts/plans"), body), json, _render_plan)


@rollouts.command("plans")
def list_plans(
    limit: Annotated[int, typer.Option(min=1, max=100, help="the maximum number of plans")] = 20,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """List the rollout plans, the newest first."""
    rows = Api().get(policy_path(policy, "/rollouts/plans"), limit=limit)["data"]
    print_object(rows, json, lambda rows: (line for row in rows for line in _render_plan(row)))


@rollouts.command("pause")
def pause_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Finish the replies that were requested, and request no more."""
    post_action(f"/rollouts/plans/{plan}/pause", policy, reason, json, _render_plan)


@rollouts.command("resume")
def resume_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """Continue a paused plan."""
    post_action(f"/rollouts/plans/{plan}/resume", policy, reason, json, _render_plan)


@rollouts.command("cancel")
def cancel_plan(plan: PlanId, reason: Reason = None, policy: PolicyName = None, json: Json = False) -> None:
    """End a plan permanently. Replies that were verified are still trained on."""
    post_action(f"/rollouts/plans/{plan}/cancel", policy, reason, json, _render_plan)


def _parse_verifier(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return parse_json(text, "--verifier")
    return {"type": text} if text in BUILT_IN_VERIFIERS else {"type": "custom", "name": text}


def _render_rollouts(body: Row) -> Iterator[str]:
    owner = "its own settings" if body["overridden"] else "the deployment's settings"
    yield f"{body['policy']} uses {owner}: {jsonlib.dumps(body['rollouts'])}"
    if body["disabled_reason"] is not None:
        yield f"no group samples: {body['disabled_reason']}"
    for name in ("group_sampling", "prompt_sets", "shadow_deployments"):
        yield f"{name.replace('_', ' ')}: {_format_counts(body[name])}"
    yield f"group samples in the last hour: {body['tokens_last_hour']} tokens"


def _render_plan(row: Row) -> Iterator[str]:
    mean = format_optional(row["mean_reward"], "{:+.2f}")
    progress = f"pass {row['pass_number'] + 1} of {row['passes']}, prompt {row['position']} of {row['num_prompts']}"
    if row["pass_number"] >= row["passes"]:
        progress = f"{row['passes']} × {row['num_prompts']} prompts"
    yield f"{row['id']}: {row['dataset']}, {row['state']}{parenthesize(row['reason'])}, {progress}"
    yield f"  replies: {_format_counts(row['replies'])}; mean reward {mean} of {row['verified']}"


def _format_counts(counts: Row) -> str:
    states = ", ".join(f"{counts[state]} {state}" for state in ("open", "done", "skipped", "failed"))
    return f"{states}; {counts['tokens']} tokens in {counts['seconds']:.0f} s"
