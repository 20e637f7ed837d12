"""The trace of a request, as the header `traceparent` of W3C's Trace Context names it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "traceparent"
TRACE_ID = r"[0-9a-f]{32}"
_VALUE = re.compile(rf"([0-9a-f]{{2}})-({TRACE_ID})-([0-9a-f]{{16}})-[0-9a-f]{{2}}(-.*)?")
# A trace id, or a `traceparent` of it. That neither is all zero is a rule beside it.
TRACE_PATTERN = rf"^(\s*{_VALUE.pattern}\s*|{TRACE_ID})$"
_INVALID_VERSION = "ff"


@dataclass(frozen=True)
class Trace:
    """The trace of a request, and the span of its caller."""

    trace_id: str
    span_id: str


def parse_traceparent(value: str) -> Trace | None:
    """Return the trace that a `traceparent` names; None for a malformed one, which the standard has servers ignore.

    Example: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".
    """
    match = _VALUE.fullmatch(value.strip())
    if match is None:
        return None
    version, trace_id, span_id, rest = match.groups()
    if version == _INVALID_VERSION or (version == "00" and rest is not None):
        return None
    return Trace(trace_id, span_id) if is_trace_id(trace_id) and int(span_id, 16) else None


def is_trace_id(value: str) -> bool:
    """Whether this is a trace id: 32 hexadecimal digits in lower case that are not all zero."""
    return re.fullmatch(TRACE_ID, value) is not None and int(value, 16) != 0


def find_trace(headers: Mapping[str, str]) -> Trace | None:
    """Return the trace of a request, or None."""
    value = headers.get(HEADER)
    return None if value is None else parse_traceparent(value)
