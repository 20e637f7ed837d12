"""Recorded turns for tests."""

from typing import Any

from app.core.database import now
from app.models import Policy, Turn, TurnState, Version


def make_turn(policy: Policy, version: Version, id: str, /, **values: Any) -> Turn:
    """Return a finished, trainable turn; `values` override its columns."""
    return Turn(
        **{
            "id": id,
            "completion_id": id,
            "project_id": policy.project_id,
            "policy_id": policy.id,
            "version_id": version.id,
            "engine": "engine-0",
            "state": TurnState.DONE,
            "stream": False,
            "own_messages": [{"role": "user", "content": "hi"}],
            "sampling": {"temperature": 1.0},
            "own_prompt_ids": [1, 2, 3],
            "output_ids": [4, 5],
            "logprobs": [-0.5, -0.25],
            "num_output_tokens": 2,
            "reply": {"role": "assistant", "content": "hello"},
            "finish_reason": "stop",
            "finished_at": now(),
            **values,
        }
    )
