"""Which episode a chat request belongs to: its API key, its path, a header or its metadata says so.

Failing these, its trace may lead to an episode that was created for this trace (`episode_limits.find_traced`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from app.chat.request_origin import EPISODE_PARAMETER, RequestOrigin
from app.chat.traces import Trace, find_trace
from app.core.errors import BadRequest
from app.projects.auth import Caller

EPISODE_HEADER = "x-attune-episode"
METADATA_KEY = "attune_episode"
INVALID = "invalid_value"
MAX_ID_CHARS = 48


class NameTag(NamedTuple):
    """What a request may name beside its episode: by a header, or by a key of its metadata."""

    noun: str
    header: str
    metadata_key: str
    max_chars: int


AGENT = NameTag("agent", "x-attune-agent", "attune_agent", 63)
STATE = NameTag("state", "x-attune-state-key", "attune_state_key", 512)


@dataclass(frozen=True)
class EpisodeTag:
    """The episode that a request names, if any, the agent that sends it, its trace, and the state it is sent in.

    `param` is where the request names the episode.
    """

    episode_id: str | None = None
    param: str = ""
    agent: str | None = None
    trace: Trace | None = None
    state_key: str | None = None


def find_tag(caller: Caller, origin: RequestOrigin, metadata: Mapping[str, str]) -> EpisodeTag:
    """Return what a request says about its episode. It may name it in several ways, as long as they agree.

    Raises BadRequest for a request that names two episodes, agents or states, and for a name that cannot be stored.
    """
    headers = origin.headers
    ways = {
        "its API key": ("authorization", caller.episode_id),
        "its path": (EPISODE_PARAMETER, origin.episode_id),
        f"the header {EPISODE_HEADER}": (EPISODE_HEADER, headers.get(EPISODE_HEADER)),
        f"metadata.{METADATA_KEY}": (f"metadata.{METADATA_KEY}", metadata.get(METADATA_KEY)),
    }
    named = [(way, param, id) for way, (param, id) in ways.items() if id is not None]
    agent, state_key = _find_name(AGENT, headers, metadata), _find_name(STATE, headers, metadata)
    trace = find_trace(headers)
    if not named:
        return EpisodeTag(None, "", agent, trace, state_key)
    first_way, first_param, id = named[0]
    for way, param, other in named[1:]:
        if other != id:
            message = f"This request names two episodes: '{id}' by {first_way} and '{other}' by {way}. Name one."
            raise BadRequest(message, param=param, code="episode_conflict")
    return EpisodeTag(id, first_param, agent, trace, state_key)


def _find_name(tag: NameTag, headers: Mapping[str, str], metadata: Mapping[str, str]) -> str | None:
    """Return the name by the header or the metadata, which may not differ."""
    ways = {tag.header: headers.get(tag.header), f"metadata.{tag.metadata_key}": metadata.get(tag.metadata_key)}
    named = {param: name for param, name in ways.items() if name}
    for param, name in named.items():
        if len(name) > tag.max_chars or not name.isprintable():
            message = f"The name of the {tag.noun} may have at most {tag.max_chars} printable characters."
            raise BadRequest(message, param=param, code=INVALID)
    if len(set(named.values())) > 1:
        message = f"This request names two {tag.noun}s: '{named[tag.header]}' by its header, another in its metadata."
        raise BadRequest(message, param=f"metadata.{tag.metadata_key}", code=INVALID)
    return next(iter(named.values()), None)


def require_no_names(tag: EpisodeTag) -> None:
    """Raise BadRequest for a request outside of an episode that names an agent or a state."""
    for name, (noun, header, metadata_key, _) in ((tag.agent, AGENT), (tag.state_key, STATE)):
        if name is not None:
            message = f"{header} or metadata.{metadata_key} names the {noun}, and the request names no episode."
            raise BadRequest(message, param=header, code=INVALID)
