"""`attune environments`: play the tasks of an environment with a policy, as episodes that it learns from."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from json import dumps as dump_json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args
from uuid import uuid4

import typer

from alignment.environments.environment_run import EnvironmentRun
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal, printable
from alignment.environments.host_process import HostConfig
from alignment.environments.open_environment import environment_names, open_environment
from alignment.environments.protocols import Environment, Limits
from alignment.environments.run_plan import RunPlan
from alignment.environments.run_summary import Result, RunSummary
from alignment.environments.service_client import ServiceClient
from alignment.environments.service_http import ServiceHttp
from alignment.environments.tools.base import JsonObject
from alignment.errors import UnavailableEnvironment
from app.cli.client import CommandError, load_api_key, service_url, tls_context
from app.cli.environment_runs import cancel_run, describe_counts, list_attempts, list_runs, show_run
from app.cli.options import Json, PolicyName, parse_json
from app.cli.output import print_object
from app.core.settings import Settings, get_settings

environments = typer.Typer(no_args_is_help=True, help="Play tasks of environments with a policy, and learn from it.")
environments.command("runs")(list_runs)
environments.command("show")(show_run)
environments.command("attempts")(list_attempts)
environments.command("cancel")(cancel_run)
VersionRule = Literal["follow", "leash", "pin"]
PROGRESS_LINES = 20
INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended


@environments.command("list")
def list_environments(json: Json = False) -> None:
    """List the environments that can be named: those of installed packages, and schemes, which end with a colon.

    Any class of this Python environment can be named too, as `package.module:Class`.
    """
    print_object(environment_names(), json, lambda names: "\n".join(names) or "none is installed")


@environments.command("run")
def run_environment(
    environment: Annotated[str, typer.Argument(help="package.module:Class, a name, or a scheme, as `list` has them")],
    policy: PolicyName = None,
    tasks: Annotated[int, typer.Option(min=1, help="how many tasks")] = 8,
    group: Annotated[int, typer.Option(min=1, max=128, help="attempts at each task, which are compared")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="attempts at a time")] = 8,
    split: Annotated[str, typer.Option(help="which tasks, as the environment names them")] = "train",
    seed: Annotated[int, typer.Option(help="of the tasks")] = 0,
    arguments: Annotated[str, typer.Option(help="the environment's arguments, as a JSON object")] = "{}",
    max_turns: Annotated[int | None, typer.Option(min=1, help="of an attempt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of all replies of an attempt")] = None,
    max_reply_tokens: Annotated[int | None, typer.Option(min=1, help="of a reply")] = None,
    deadline: Annotated[float, typer.Option(min=1, max=86_400, help="seconds of an attempt")] = 3600.0,
    version: Annotated[str, typer.Option(help="the version that answers later chats: follow, leash or pin")] = "follow",
    run: Annotated[str | None, typer.Option(help="a name: the same command joins the run, or goes on with it")] = None,
    python: Annotated[Path | None, typer.Option(help="the interpreter that has the package of a scheme")] = None,
    processes: Annotated[int | None, typer.Option(min=1, max=64, help="of the environment of a scheme: 1")] = None,
    variable: Annotated[list[str] | None, typer.Option(help="a variable that these processes get, too")] = None,
    answer_seconds: Annotated[float | None, typer.Option(min=0.1, help="of a reset or a step in them: 30")] = None,
    start_seconds: Annotated[float | None, typer.Option(min=1, help="until they have opened it: 120")] = None,
    json: Json = False,
) -> None:
    """Play tasks of an environment with the policy. Each attempt is an episode, attempts at one task are a group.

    Processes that are started with the same command and the same --run, on any machine, play one run together. Ctrl-C
    ends the open attempts as abandoned: nothing is learned from them, and they are played again by the others, or by
    the next command. The exit status is 1 if no attempt of the run has a reward.
    """
    if version not in get_args(VersionRule):
        raise typer.BadParameter(f"{version!r} is none of {', '.join(get_args(VersionRule))}", param_hint="--version")
    values = parse_json(arguments, "--arguments")
    if not isinstance(values, dict):
        raise CommandError("--arguments is no JSON object")
    settings = get_settings()
    plan = RunPlan(
        name=run or f"run-{uuid4().hex[:12]}",
        policy=policy or settings.policy,
        num_tasks=tasks,
        group_size=group,
        concurrency=concurrency,
        split=split,
        seed=seed,
        version=version,
        limits=Limits(max_turns, max_tokens, max_reply_tokens, deadline),
        metadata=_metadata(environment, values),
    )
    sys.path.insert(0, os.getcwd())  # as uvicorn and celery do: the environment may be a file beside
    options = _HostOptions(processes, variable or None, answer_seconds, start_seconds)
    opened = open_environment(environment, values, _host(python, options))
    summary, status = asyncio.run(_run(opened, plan, settings))
    print_object(summary.model_dump(), json, lambda _: map(printable, render(summary)))
    if status == 0 and summary.mean_reward is None and summary.mean_outcome is None:
        status = 1
    raise typer.Exit(status)


def _metadata(environment: str, arguments: JsonObject) -> dict[str, str]:
    """Return what is recorded with each episode. Of the arguments a digest is: they may hold keys.

    So the service refuses to go on with a run whose arguments are other ones.
    """
    metadata = {"environment": environment[:512]}
    if arguments:
        metadata["arguments"] = sha256(dump_json(arguments, sort_keys=True).encode()).hexdigest()[:32]
    return metadata


class _HostOptions(NamedTuple):
    """What is said of the processes of an environment of others, or None."""

    processes: int | None
    variable: list[str] | None
    answer_seconds: float | None
    start_seconds: float | None


def _host(python: Path | None, options: _HostOptions) -> HostConfig | None:
    """Return how environments of others are run. Variables are named, lest their values be in the shell's history."""
    if python is None:
        named = [name for name, value in options._asdict().items() if value is not None]
        if named:
            hint = f"--{named[0].replace('_', '-')}"
            raise typer.BadParameter("it is for the processes of --python, which is not given", param_hint=hint)
        return None
    variables = options.variable or []
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise typer.BadParameter(f"{missing[0]} is not set", param_hint="--variable")
    config = HostConfig(
        python=python.absolute(),
        paths=(Path.cwd(),),
        environment={name: os.environ[name] for name in variables},
        processes=options.processes or 1,
    )
    return replace(
        config,
        answer_seconds=options.answer_seconds or config.answer_seconds,
        start_seconds=options.start_seconds or config.start_seconds,
    )


async def _run(environment: Environment, plan: RunPlan, settings: Settings) -> tuple[RunSummary, int]:
    """Return the summary and the exit status."""
    verify = tls_context(settings)
    http = ServiceHttp(connections=plan.concurrency + 8, verify=verify)
    if isinstance(environment, LoopEnvironment):
        environment.verify = verify  # the loop's chats go to the same service
    service = ServiceClient(service_url(settings), load_api_key(settings), http)
    run = EnvironmentRun(environment, service, plan, _Progress(plan).show)
    task = asyncio.ensure_future(run.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task, 0
    except asyncio.CancelledError:
        return run.summary(), INTERRUPTED
    except (InfrastructureFailure, ServiceRefusal, UnavailableEnvironment) as error:
        typer.echo(printable(f"attune: the run {plan.name} has ended: {error}"), err=True)
        return run.summary(), 1
    finally:
        with suppress(Exception):  # the run is over, and its error matters more
            await environment.close()
        await http.close()


class _Progress:
    """Lines of progress on standard error: about twenty for a run, each error, and the first one with its traceback."""

    def __init__(self, plan: RunPlan) -> None:
        self._num_planned = plan.num_tasks * plan.group_size
        self._every = max(1, self._num_planned // PROGRESS_LINES)
        self._num_done = 0
        self._rewards: list[float] = []
        self._has_shown_traceback = False

    def show(self, result: Result) -> None:
        self._num_done += not result.is_lost
        if result.reward is not None:
            self._rewards.append(result.reward)
        if result.error is not None:
            typer.echo(printable(f"{result.episode_id or 'an attempt'} of {result.task}: {result.error}"), err=True)
        if result.traceback is not None and not self._has_shown_traceback:
            self._has_shown_traceback = True
            typer.echo(f"the first error:\n{printable(result.traceback)}", err=True)
        if not result.is_lost and self._num_done % self._every == 0:
            mean = f", mean reward {sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else ""
            typer.echo(f"{self._num_done} of {self._num_planned} attempts{mean}", err=True)


def render(summary: RunSummary) -> Iterator[str]:
    """Yield the summary in sentences."""
    state = "complete" if summary.is_complete else f"not complete; go on with --run {summary.run}"
    yield f"run {summary.run}: {summary.num_attempts} attempts in {summary.seconds:.1f} s, {state}"
    if summary.planned is not None:
        yield f"planned attempts, those of other processes too: {describe_counts(summary.planned.model_dump())}"
    if summary.mean_reward is not None:
        yield f"mean reward {summary.mean_reward:.3f}, deviation {summary.reward_deviation or 0.0:.3f}"
    if summary.mean_turns is not None:
        yield f"mean turns {summary.mean_turns:.1f}; {summary.num_turns} turns, {summary.turns_per_second:.1f} a second"
    yield "ends: " + (", ".join(f"{name} {number}" for name, number in summary.ends.items()) or "none")
    if summary.planned is not None and summary.planned.lost:
        yield (
            f"{summary.planned.lost} planned attempts have no result: they were lost twice, by the environment or what "
            "it runs on, or their processes died each time"
        )
    if summary.planned is not None and summary.planned.cancelled:
        yield f"{summary.planned.cancelled} were cancelled: their groups began at a version that is too old by now"
    yield from (f"simulated user: {user}, {number} attempts" for user, number in summary.users.items())
    yield from (f"{name} {value:.3f}" for name, value in summary.metrics.items())
    yield from (f"{number} × {error}" for error, number in summary.errors.items())
