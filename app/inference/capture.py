"""Capture: one reply in tokens, exactly as the engine processed it. Tokens are recorded, never reconstructed."""

import math
from dataclasses import dataclass, replace
from typing import TypedDict

from alignment.chat_messages import AssistantMessage, ToolCall
from app.inference.request import ChatCall


class WeightSpan(TypedDict):
    """The version of full weights that generated the output tokens from `start` to before `end`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Capture:
    """The tokens of one reply.

    `exclusion_reason` says why the reply must not be trained on; None when it may be. An excluded capture still holds
    everything that was received. A missing log-prob is NaN.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    text: str
    tool_calls: list[ToolCall]
    finish_reason: str | None
    weight_versions: list[WeightSpan]  # with full weights only
    exclusion_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether anything was generated. The ids of a stream come last, and are missing where it broke off."""
        return bool(self.output_ids or self.logprobs or self.text or self.tool_calls)

    @property
    def message(self) -> AssistantMessage:
        """The reply as OpenAI's assistant message."""
        message: AssistantMessage = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = self.tool_calls
        return message


def build_capture(call: ChatCall, received: Capture) -> Capture:
    """Return what the engine sent as the capture of this call.

    An exclusion reason that `received` has already, such as an interruption, takes precedence over what is found here.
    """
    return replace(
        received,
        tool_calls=received.tool_calls[: call.max_tool_calls],
        weight_versions=received.weight_versions if call.target.weights is not None else [],
        exclusion_reason=received.exclusion_reason or _exclusion_reason(call, received),
    )


def _exclusion_reason(call: ChatCall, received: Capture) -> str | None:
    num_ids, num_logprobs = len(received.output_ids), len(received.logprobs)
    if received.finish_reason is None:  # "abort" is a valid end: the policy generated all tokens before it
        return "the reply has no finish reason"
    if not received.prompt_ids or not received.output_ids:
        return "the engine sent no token ids"
    if num_ids != num_logprobs:
        return f"{num_ids} output ids came with {num_logprobs} log-probs"
    if not all(map(math.isfinite, received.logprobs)):
        return "a log-prob is not a finite number"
    if call.is_grammar_constrained:
        return "a grammar constrained the reply: its log-probs are not the model's own"
    versions = [span["version"] for span in received.weight_versions]
    if len(set(versions)) > 1:
        return f"the base weights changed during the reply: {', '.join(versions)}"
    if call.target.weights is not None and versions and versions[0] != call.target.weights:
        return f"the weights of {versions[0]} generated the reply, not those of {call.target.weights}"
    if len(received.tool_calls) > call.max_tool_calls:
        return "the reply holds several tool calls and only the first was sent to the client"
    return None


def to_logprob(value: float | None) -> float:
    """Return NaN for a log-prob that the engine did not report."""
    return math.nan if value is None else value
