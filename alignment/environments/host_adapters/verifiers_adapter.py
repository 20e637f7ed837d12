"""verifiers 0.1.14 to 0.3 (`load_environment`): environments with a loop of their own. Runs where `verifiers` is.

A task is a row of the environment's data set, in the order that the seed decides. The reward is that of its rubric.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import verifiers

if not hasattr(verifiers, "load_environment"):
    raise ImportError(
        f"verifiers {verifiers.__version__} has no load_environment: environments are `verifiers.v1:NAME`"
    )

from openai import APIStatusError, AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

if TYPE_CHECKING:
    from httpx2 import Response

MAX_RETRIES = 2  # of a chat
TRAIN = "train"
LIMITS = {  # the code of a refusal of the service → the reason of the end
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_deadline": "deadline",
    "episode_idle_timeout": "deadline",
    "context_length_exceeded": "max_tokens",
}
OVERLONG = "OverlongPromptError"  # an error of verifiers: the prompt is longer than the context
STOPS = {  # the stop condition → the reason of the end
    "max_turns_reached": "max_turns",
    "max_total_completion_tokens_reached": "max_tokens",
    "prompt_too_long": "max_tokens",
    "timeout_reached": "deadline",
}
# What a tool raises whose host is not reached. A ToolCallError names its cause.
OF_HOSTS = (
    *("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectError", "ConnectTimeout"),
    *("ReadError", "RemoteProtocolError", "APIConnectionError", "ClientConnectorError"),
)
MISTAKES = ("InvalidModelResponseError", "EmptyModelResponseError", "ToolParseError", "ToolCallError")


class Client(AsyncOpenAI):
    """A client that keeps the code of the last refusal, which is not in every error's text."""

    refusal: str | None = None

    def _make_status_error(self, err_msg: str, *, body: object, response: Response) -> APIStatusError:
        error: APIStatusError = super()._make_status_error(err_msg, body=body, response=response)
        self.refusal = error.code
        return error


class VerifiersEnvironment:
    """An environment of verifiers."""

    def __init__(self, environment: verifiers.Environment) -> None:
        if environment.requires_group_rollouts:
            raise ValueError("it scores groups of rollouts, which are no attempts by themselves")
        self._environment = environment

    def tasks(self, split: str, seed: int, start: int, count: int) -> list[dict[str, object]]:
        """Return the rows of the split: "train", or the data set for evaluation for any other."""
        order = list(range(len(self._dataset(split))))
        random.Random(seed).shuffle(order)
        return [
            {"id": f"{split}-{row}", "data": {"split": split, "row": row}, "seed": seed}
            for row in order[start : start + count]
        ]

    async def run(self, episode: str, task: Mapping[str, object], agent: Mapping[str, object]) -> dict[str, object]:
        """Play one attempt with the agent."""
        data, limits, headers = task["data"], agent["limits"], agent["headers"]
        assert isinstance(data, dict) and isinstance(limits, dict) and isinstance(headers, dict)
        row = dict(self._dataset(data["split"])[data["row"]])
        sampling = dict(self._environment.sampling_args or {})
        if limits.get("max_reply_tokens"):
            sampling["max_tokens"] = limits["max_reply_tokens"]
        async with Client(
            base_url=str(agent["base_url"]),
            api_key=str(agent["api_key"]),
            default_headers=headers,
            timeout=limits["deadline_seconds"],
            max_retries=MAX_RETRIES,
        ) as client:
            result = await self._environment.run_rollout(
                row, OpenAIChatCompletionsClient(client), str(agent["model"]), sampling
            )
        metrics = {name: float(value) for name, value in (result["metrics"] or {}).items()}
        return {
            "reward": float(result["reward"]),
            "metrics": metrics | {"score": result["reward"]},
            "reason": self._reason(result, client.refusal),
        }

    def _reason(self, result: Mapping[str, object], refusal: str | None) -> str:
        """Return why the rollout ended. Raises RuntimeError if the environment or its host has failed."""
        if result.get("error"):
            error = str(result["error"])
            if refusal in LIMITS or OVERLONG in error:
                return LIMITS.get(str(refusal), "max_tokens")
            if any(name in error for name in MISTAKES) and not any(name in error for name in OF_HOSTS):
                return "failed"
            raise RuntimeError(error)
        stop = str(result.get("stop_condition"))
        if stop == "max_turns_reached" and getattr(self._environment, "max_turns", 1) == 1:
            return "completed"  # an environment of one turn
        return STOPS.get(stop, "completed")

    def _dataset(self, split: str) -> verifiers.types.Dataset:
        if split == TRAIN:
            return self._environment.get_dataset()
        if self._environment.build_eval_dataset() is None:
            raise ValueError(f"it has no data set for evaluation, so there is no split {split!r}")
        return self._environment.get_eval_dataset()


def open_environment(name: str, arguments: dict[str, object]) -> VerifiersEnvironment:
    """Return the environment that is installed under this name."""
    return VerifiersEnvironment(verifiers.load_environment(name, **arguments))
