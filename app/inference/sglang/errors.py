"""What SGLang's error responses mean."""

import logging
import re

from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable, error_message

log = logging.getLogger("attune.engines")
CONTEXT_TOO_LONG = re.compile(r"context length|maximum allowed length|max_completion_tokens is too large")


def to_engine_error(status: int, content: bytes) -> EngineUnavailable | EngineRefused:
    """Return the error for an error response of SGLang."""
    message = error_message(content) or f"The engine responded with status {status}."
    if "LoRA adapter that has never been loaded" in message:
        return AdapterMissing("The engine does not hold the requested version.")
    if status >= 500 or status == 429:
        log.warning("an engine failed with status %s: %s", status, message)  # which may speak of other projects
        return EngineUnavailable("The engine failed on this request; its log has the reason.")
    return EngineRefused(status, message, is_too_long=CONTEXT_TOO_LONG.search(message) is not None)
