"""Turns that store only what their prompts add to another turn."""

from typing import Any

from app.models import Turn

FOLLOW_UP = {"role": "user", "content": "and more"}
FOLLOW_UP_IDS = [7, 8]


def follow_up(turn: Turn) -> dict[str, Any]:
    """Return the columns of a turn whose prompt continues this turn's reply with one message."""
    return {
        "parent_id": turn.id,
        "history_id": turn.id,
        "num_history_messages": turn.num_messages + 1,
        "num_history_tokens": turn.num_history_tokens + len(turn.own_prompt_ids or ()) + len(turn.output_ids or ()),
        "own_messages": [FOLLOW_UP],
        "own_prompt_ids": FOLLOW_UP_IDS,
    }
