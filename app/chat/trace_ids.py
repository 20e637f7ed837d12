"""The Langfuse trace of a reply, as one more pair of metadata that feedback can find the reply by.

LibreChat, and `create_trace_id(seed=…)` of Langfuse's SDKs, derive a trace's id from the id of a message. A client that
knows the trace itself sends it as the metadata `langfuse-trace-id`.
"""

import hashlib
from collections.abc import Mapping

MESSAGE_KEY = "message-id"
TRACE_KEY = "langfuse-trace-id"


def add_trace_id(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata with the trace that belongs to its message, unless it names a trace itself."""
    if MESSAGE_KEY not in metadata or TRACE_KEY in metadata:
        return metadata
    return {**metadata, TRACE_KEY: derive_trace_id(metadata[MESSAGE_KEY])}


def derive_trace_id(message_id: str) -> str:
    """Return the trace's id of 32 hexadecimal digits, as Langfuse's SDKs derive it from a seed."""
    return hashlib.sha256(message_id.encode()).hexdigest()[:32]
