"""verifiers 0.4 (`verifiers.v1`): tasksets, and environments of one agent. Runs where `verifiers` is installed.

The agent is a program of verifiers, its harness, that each attempt starts by `uv`: where neither the taskset nor the
user says which, the plain chat loop with the taskset's tools (`null`), as a process of this machine. Chats go through
a server of the attempt's own, which ends with it. The reward is what the task's rewards add up to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import uuid
from collections.abc import Iterator, Mapping

import verifiers
from pydantic import ValidationError

FIRST_VERSION = (0, 4)
if tuple(int(part) for part in verifiers.__version__.split(".")[:2]) < FIRST_VERSION:
    raise ImportError(f"verifiers {verifiers.__version__} is too old: before 0.4, environments are `verifiers:NAME`")

import verifiers.v1 as vf  # noqa: E402

TRAIN = "train"
LOWEST_REWARD = -1.0
CHAT_LOOP = "null"
NO_LOOP_OF_ITS_OWN = "bash"  # what verifiers would run for a taskset without one: it may do anything on this machine
LIMITS = {  # what a refusal of the service contains → the reason of the end
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_deadline": "deadline",
    "episode_idle_timeout": "deadline",
    "context_length_exceeded": "max_tokens",
}
STOPS = {  # the stop condition → the reason of the end
    "max_turns": "max_turns",
    "max_input_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_total_tokens": "max_tokens",
    "compaction_failed": "max_tokens",
    "agent_timeout": "deadline",
}
HOST_TIMEOUTS = ("setup_timeout", "finalize_timeout", "scoring_timeout")


class TasksetEnvironment:
    """An environment of verifiers, which plays the tasks of its taskset."""

    episodes_per_process = 8  # each is a process, too

    def __init__(self, environment: vf.Env, role: str) -> None:
        self._environment = environment
        self._role = role
        self._rest: Iterator[vf.Task] = iter(environment.taskset)
        self._loaded: list[vf.Task] = []
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    def tasks(self, split: str, seed: int, start: int, count: int) -> list[dict[str, object]]:
        """Return the tasks in the order that the seed decides, or, of a taskset without end, in its own."""
        if split != TRAIN:
            raise ValueError(f"a taskset has no split {split!r}, but {TRAIN!r} alone: name another, or its arguments")
        if self._environment.taskset.bounded:
            self._load(None)
            order = list(range(len(self._loaded)))
            random.Random(seed).shuffle(order)
        else:
            order = list(range(start + count))
        return [{"id": f"{split}-{row}", "data": {"row": row}, "seed": seed} for row in order[start : start + count]]

    async def run(self, episode: str, task: Mapping[str, object], agent: Mapping[str, object]) -> dict[str, object]:
        """Play one attempt with the agent."""
        data, limits, headers = task["data"], agent["limits"], agent["headers"]
        assert isinstance(data, dict) and isinstance(limits, dict) and isinstance(headers, dict)
        self._load(data["row"] + 1)
        self._apply_limits(limits)
        await self._serve()
        key = f"EPISODE_{uuid.uuid4().hex}_API_KEY"  # verifiers passes no such variable on to processes
        os.environ[key] = str(agent["api_key"])
        try:
            client = vf.EvalClientConfig(base_url=str(agent["base_url"]), api_key_var=key, headers=headers)
            sampling = vf.SamplingConfig(max_tokens=limits.get("max_reply_tokens"))
            context = vf.ModelContext(model=str(agent["model"]), client=client, sampling=sampling)
            played = await self._environment.run_episode(self._loaded[data["row"]], context)
        finally:
            del os.environ[key]
        return to_outcome(played)

    def _load(self, count: int | None) -> None:
        """Load the first tasks, or all of them."""
        while count is None or len(self._loaded) < count:
            task = next(self._rest, None)
            if task is None:
                return
            self._loaded.append(task)

    def _apply_limits(self, limits: Mapping[str, object]) -> None:
        """Let verifiers itself end the attempt at a limit: then it is scored. All attempts have the same limits."""
        role = getattr(self._environment.config, self._role)
        role.max_turns = least(role.max_turns, limits.get("max_turns"))
        role.max_output_tokens = least(role.max_output_tokens, limits.get("max_tokens"))
        role.timeout.rollout = least(role.timeout.rollout, limits.get("deadline_seconds"))

    async def _serve(self) -> None:
        """Start the servers that all attempts share, once. Raises what they raise."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold_servers(self._ready))
        await asyncio.shield(self._ready)

    async def _hold_servers(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                # Shared servers of chats would hold a client with its key for each attempt until the end.
                self._environment._interception = None
                ready.set_result(None)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


def to_outcome(episode: vf.Episode) -> dict[str, object]:
    """Return an outcome on the wire. Raises RuntimeError if the environment or its host has failed."""
    traces = episode.traces
    stops = [trace.stop_condition for trace in traces]
    reason = next((STOPS[stop] for stop in stops if stop in STOPS), "completed")
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if not episode.ok:
        error = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has failed"
        limits = [reason for text, reason in LIMITS.items() if text in error]
        if not limits:
            raise RuntimeError(error)
        reason = limits[0]
    elif late := [stop for stop in stops if stop in HOST_TIMEOUTS]:
        raise RuntimeError(late[0])
    scored = [trace.reward for trace in traces if any(reward is not None for reward in trace.rewards.values())]
    reward = sum(scored) / len(scored) if scored else LOWEST_REWARD
    metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
    return {"reward": reward, "metrics": metrics | {"score": reward}, "reason": reason}


def least(first: float | None, second: object) -> float | None:
    """Return the lower of two limits, of which None is none."""
    values = [value for value in (first, second) if isinstance(value, int | float)]
    return min(values, default=None)


def open_environment(name: str, arguments: dict[str, object]) -> TasksetEnvironment:
    """Return the environment of a taskset. `env` is its configuration; the other arguments are the taskset's."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if paths := sys.argv[3:]:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # tools are processes, too
    overrides = arguments.pop("env", None) or {}
    assert isinstance(overrides, dict), "`env` is an object"
    kind = vf.env_config_type(name, overrides.get("id", ""))
    roles = {
        role: field.default for role, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)
    }
    if len(roles) != 1:
        raise ValueError(f"it has {len(roles)} agents ({', '.join(roles)}): only environments of one can be played")
    [(role, default)] = roles.items()
    agent = dict(overrides.get(role) or {})
    if "runtime" not in default.model_fields_set:
        agent.setdefault("runtime", {"type": "subprocess"})
    if default.harness is None and vf.default_harness_id(name) == NO_LOOP_OF_ITS_OWN:
        agent.setdefault("harness", {"id": CHAT_LOOP})
    try:
        config = vf.resolve_env_config({**overrides, role: agent, "taskset": {**arguments, "id": name}})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return TasksetEnvironment(vf.load_environment(config), role)
