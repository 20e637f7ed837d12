"""Hints that clients of other vendors' models leave in requests. None can change the reply, so they are ignored.

A client that serves several models often writes one history for all of them: Anthropic's cache marks, signatures of
Google's thoughts, LiteLLM's and Vercel's own fields, ids that LangChain gives to parts.
"""

from typing import ClassVar

from pydantic import model_validator

from app.core.http import StrictModel

ANYWHERE = frozenset(
    {
        "cache_control",
        "extra_content",
        "thought_signature",
        "provider_specific_fields",
        "providerOptions",
        "providerMetadata",
    }
)
IN_PARTS = ANYWHERE | {"annotations", "citations", "extras", "id", "index", "logprobs"}
IN_TOOLS = ANYWHERE | {"eager_input_streaming"}
IN_REQUESTS = ANYWHERE | {
    "betas",
    "cache_control_injection_points",
    "include_reasoning",
    "provider",
    "reasoning",
    "route",
    "thinking",
    "usage",
}


class HintedModel(StrictModel):
    """A part of a request that may hold its fields and the hints that are ignored in it, and no others."""

    ignored_hints: ClassVar[frozenset[str]] = ANYWHERE

    @model_validator(mode="before")
    @classmethod
    def remove_hints(cls, value: object) -> object:
        if not isinstance(value, dict) or cls.ignored_hints.isdisjoint(value):
            return value
        return {name: each for name, each in value.items() if name not in cls.ignored_hints}
