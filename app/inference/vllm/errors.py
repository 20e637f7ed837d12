"""What vLLM's error responses mean."""

import logging
import re

from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable, error_message

log = logging.getLogger("attune.engines")
CONTEXT_TOO_LONG = re.compile(r"context length|maximum model length|max_tokens.* is too large")
# vLLM's JSON cannot hold a log-prob that is not a number, and so the whole response is this error.
NOT_A_NUMBER = "Out of range float values"


class NotANumber(EngineUnavailable):
    """The weights computed values that are not numbers."""


def to_engine_error(status: int, content: bytes) -> EngineUnavailable | EngineRefused:
    """Return the error for an error response of vLLM."""
    message = error_message(content) or f"The engine responded with status {status}."
    if status == 404 and "does not exist" in message:
        return AdapterMissing("The engine does not hold the requested version.")
    if status == 400 and NOT_A_NUMBER in message:
        return NotANumber("The engine computed log-probs that are not numbers.")
    if status == 500 and "add_lora" in message:  # it has read the adapter and cannot use it
        return EngineRefused(400, message)
    if status >= 500 or status == 429:
        log.warning("an engine failed with status %s: %s", status, message)  # which may speak of other projects
        return EngineUnavailable("The engine failed on this request; its log has the reason.")
    return EngineRefused(status, message, is_too_long=CONTEXT_TOO_LONG.search(message) is not None)
