"""A reply to a prompt of a dataset → what its verifier says."""

import math
from collections.abc import Mapping
from typing import Any

from alignment.errors import AlignmentError
from alignment.signals.verifiers import Attempt
from app.core.settings import Settings
from app.inference.capture import Capture
from app.training.rollouts.config import verifier
from workers.queue import run_user_code

SECONDS = 10.0


class Unverified(Exception):
    """The verifier failed, or said what is no worth."""


async def worth(told: dict[str, Any], settings: Settings, content: Mapping[str, Any], capture: Capture) -> float | None:
    """From -1 to 1; None when it has nothing to say. `told` is the verifier's settings, `content` the dataset's row."""
    attempt = Attempt(
        messages=tuple(content["messages"]),
        reply=capture.message,
        reference=content.get("reference"),
        finish_reason=capture.finish_reason,
        details=content.get("details", {}),
    )
    try:
        value = await run_user_code.run(
            lambda: verifier(told, settings)(attempt), SECONDS, noun="verifier", passes=(AlignmentError,)
        )
    except (run_user_code.Failed, AlignmentError) as error:
        raise Unverified(f"the verifier failed: {error}") from error
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1:
        raise Unverified(f"the verifier said {str(value)[:100]!r}, which is no number between -1 and 1")
    return float(value)
