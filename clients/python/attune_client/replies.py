"""Find the completion id of a reply, whichever library it came from."""

from collections.abc import Mapping
from typing import Any

RELAYED = "llm_provider-"  # LiteLLM's proxy puts this before the headers of the service behind it
ID_PREFIXES = ("chatcmpl-", "resp_", "msg_", "req-")  # the API takes each of them as a completion id


def completion_id(reply: Any) -> str:
    """Return the completion id of a reply.

    A reply is a completion id, a reply or stream of this package, a completion, chunk, response or stream of OpenAI's
    client (also as a raw response), a message of Anthropic's client, or a message of ChatAttune or of ChatOpenAI with
    `include_response_headers`.
    Raises ValueError for an object without an id.
    """
    candidate = _find_id(reply)
    if not candidate:
        raise ValueError(f"this {type(reply).__name__} has no completion id: give feedback on a reply of Attune")
    return candidate


def choice_index(reply: Any) -> int:
    """Return which choice of its completion a message of ChatAttune is. Other replies are choice 0."""
    metadata = getattr(reply, "response_metadata", None)
    index = metadata.get("choice_index") if isinstance(metadata, dict) else None
    return index if isinstance(index, int) else 0


def is_reply(value: Any) -> bool:
    """Return whether a value names a reply; a mapping without an id is a target of the API."""
    return not isinstance(value, Mapping) or _find_id(value) is not None


def read_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header of the service, also where LiteLLM's proxy passed it on under its own name."""
    return headers.get(name) or headers.get(RELAYED + name)


def _find_id(reply: Any) -> str | None:
    if isinstance(reply, str):
        return reply or None
    if isinstance(reply, Mapping):
        return _known_id(reply.get("id"))
    own = getattr(reply, "completion_id", None)
    if isinstance(own, str):
        return own or None
    metadata = getattr(reply, "response_metadata", None)
    if isinstance(metadata, dict):  # a message of LangChain, whose own id is another
        headers = metadata.get("headers") or {}  # of ChatOpenAI(include_response_headers=True)
        found = metadata.get("id") or read_header(headers, "x-completion-id")
        return found if isinstance(found, str) else None
    return _known_id(getattr(reply, "id", None)) or _header_id(reply)


def _known_id(value: Any) -> str | None:
    return value if isinstance(value, str) and value.startswith(ID_PREFIXES) else None


def _header_id(reply: Any) -> str | None:
    """Return the id in the response headers of a stream or of a raw response of OpenAI's client."""
    for holder in (reply, getattr(reply, "response", None), getattr(reply, "_response", None)):
        headers = getattr(holder, "headers", None)
        if headers is not None and (found := read_header(headers, "x-completion-id")):
            return found
    return None
