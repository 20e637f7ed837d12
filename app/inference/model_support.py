"""What SGLang is known to compute differently from the model's definition, by the model's config.json.

Only silent differences are listed. What SGLang cannot load at all it says itself, and what nobody knows yet is found by
the parity check before the first update (`workers.parity`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.core.settings import Settings

# Measured with SGLang 0.5.23 (docs/models.md): it serves Mistral and Phi-3 by a class that never reads
# `sliding_window`, and gives Cohere 2 a window that is one token too wide.
WRONG_WINDOWS = {
    "mistral": "SGLang ignores that",
    "phi3": "SGLang ignores that",
    "cohere2": "SGLang attends to one token more",
}


def unsupported_reason(config: Mapping[str, Any], context_length: int | None) -> str | None:
    """Return why an engine would compute this model wrongly, and what to change; None if nothing is known.

    `config` is the model's config.json; `context_length` the longest prompt and reply, None for the model's own.
    """
    difference, window = WRONG_WINDOWS.get(str(config.get("model_type"))), config.get("sliding_window")
    if difference is None or not window:
        return None
    context = context_length or config.get("max_position_embeddings")
    if context is not None and context <= window:
        return None
    return (
        f"{config['model_type']} has layers that attend to the last {window} tokens only, and {difference}: "
        f"beyond them its replies would not be the model's. Set ATTUNE_ENGINE__CONTEXT_LENGTH={window}"
    )


def require_supported(settings: Settings, directory: Path) -> None:
    """Raise ValueError if the base model in a directory is one that engines compute wrongly."""
    if settings.engine.kind != "sglang":
        return
    config = json.loads((directory / "config.json").read_text())
    if (reason := unsupported_reason(config, settings.engine.context_length)) is not None:
        raise ValueError(f"the base model {settings.model} is refused: {reason}")
