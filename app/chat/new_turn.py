"""A turn before it is inserted: what a chat's plan, a group sample, a shadow reply and a prompt set's reply write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.models import Origin, RouteReason


@dataclass(frozen=True)
class NewTurn:
    """The columns of a new turn by their names; `Turn` says what they mean.

    The first `num_history_messages` of the prompt are those of the turn `history_id`. A chat's plan gives the whole
    prompt as `own_messages` and no `episode_step`: the writer leaves out what the history has, and numbers the turn.
    """

    id: str
    completion_id: str
    choice_index: int
    project_id: str
    policy_id: str
    version_id: str
    origin: Origin
    engine: str
    own_messages: Sequence[Mapping[str, object]]
    sampling: Mapping[str, object]
    history_id: str | None = None
    num_history_messages: int = 0
    stream: bool = False
    route_reason: str = RouteReason.STABLE
    request_params: Mapping[str, object] = field(default_factory=dict)
    request_metadata: Mapping[str, str] = field(default_factory=dict)
    request_sha256: str | None = None
    key_id: str | None = None
    end_user: str | None = None
    conversation_id: str | None = None
    parent_id: str | None = None
    prefix_reuse: str | None = None
    episode_id: str | None = None
    episode_step: int | None = None
    agent: str | None = None
    state_key: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    shadow_of_id: str | None = None
    exclusion_reason: str | None = None
    processed: bool = False

    def columns(self) -> dict[str, object]:
        """Return the values of the columns by name."""
        return dict(vars(self))
