"""What another wire format adds to a chat request, beside the request itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WireDetails:
    """Parameters of a wire format that a chat request does not have.

    Attributes:
        conversation_id: The conversation that it continues, unless the client names one.
        recorded_params: Parameters that a chat request does not have, for the turn's `request_params`.
        top_k: How many of the most probable tokens may be sampled; None for all.
        clamps_max_tokens: The request's length limit is a ceiling: beyond the settings' limit, or the room behind the
            prompt, that is the limit, and the request is not refused.
        names_stop_text: The client's choices have `matched_stop`, and its chunks the usage so far.
    """

    conversation_id: str | None = None
    recorded_params: Mapping[str, object] = field(default_factory=dict)
    top_k: int | None = None
    clamps_max_tokens: bool = False
    names_stop_text: bool = False


NO_DETAILS = WireDetails()
