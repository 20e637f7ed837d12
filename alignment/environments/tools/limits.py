"""Limits of tool calls."""

from pydantic import Field

from alignment.config.frozen_model import Frozen


class ToolLimits(Frozen):
    """How long, how large and how often. What exceeds a limit is told to the model in the call's result.

    Example: ToolLimits(call_seconds=30, calls_per_episode=100)
    """

    call_seconds: float = Field(10.0, gt=0, le=3600, description="for one call")
    result_bytes: int = Field(8192, ge=256, description="of a result; from a longer one the middle is cut")
    calls_per_turn: int = Field(4, ge=1, le=64, description="of one reply; they run at the same time")
    calls_per_episode: int = Field(32, ge=1, description="calls that were refused count too")
    create_seconds: float = Field(60.0, gt=0, le=3600, description="until a tool is ready for an episode")
