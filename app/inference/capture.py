"""Capture: one reply in tokens, exactly as the engine processed it. Tokens are recorded, never reconstructed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.inference.request import ChatCall


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
    tool_calls: list[dict[str, Any]]
    finish_reason: str | None
    weight_versions: list[dict[str, Any]]  # spans of output tokens: {version, start, end}; with full weights only
    exclusion_reason: str | None

    @property
    def message(self) -> dict[str, Any]:
        """The reply as OpenAI's assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = self.tool_calls
        return message


def build_capture(
    call: ChatCall,
    *,
    prompt_ids: Sequence[int] | None,
    output_ids: Sequence[int] | None,
    logprobs: Sequence[float | None],
    text: str,
    tool_calls: list[dict[str, Any]],
    finish_reason: str | None,
    weight_versions: list[dict[str, Any]],
    interruption: str | None = None,
) -> Capture:
    """Return the capture of a reply.

    `interruption` says what ended the reply early, if anything did; it takes precedence as the exclusion reason.
    """
    exclusion_reason = interruption or _exclusion_reason(
        call, prompt_ids, output_ids, logprobs, finish_reason, weight_versions
    )
    if exclusion_reason is None and len(tool_calls) > call.max_tool_calls:
        exclusion_reason = "the reply holds several tool calls and only the first was sent to the client"
    return Capture(
        prompt_ids=list(prompt_ids or ()),
        output_ids=list(output_ids or ()),
        logprobs=[math.nan if value is None else value for value in logprobs],
        text=text,
        tool_calls=tool_calls[: call.max_tool_calls],
        finish_reason=finish_reason,
        weight_versions=weight_versions if call.weights is not None else [],
        exclusion_reason=exclusion_reason,
    )


def _exclusion_reason(
    call: ChatCall,
    prompt_ids: Sequence[int] | None,
    output_ids: Sequence[int] | None,
    logprobs: Sequence[float | None],
    finish_reason: str | None,
    weight_versions: list[dict[str, Any]],
) -> str | None:
    if finish_reason is None:  # "abort" is a valid end: the policy generated all tokens before it
        return "the reply has no finish reason"
    if not prompt_ids or not output_ids:
        return "the engine sent no token ids"
    if len(output_ids) != len(logprobs):
        return f"{len(output_ids)} output ids came with {len(logprobs)} log-probs"
    if not all(value is not None and math.isfinite(value) for value in logprobs):
        return "a log-prob is not a finite number"
    if call.is_grammar_constrained:
        return "a grammar constrained the reply: its log-probs are not the model's own"
    versions = [span["version"] for span in weight_versions]
    if len(set(versions)) > 1:
        return f"the base weights changed during the reply: {', '.join(versions)}"
    if call.weights is not None and versions and versions[0] != call.weights:
        return f"the weights of {versions[0]} generated the reply, not those of {call.weights}"
    return None
