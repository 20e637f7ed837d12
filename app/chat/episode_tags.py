"""Which episode a chat request belongs to: its API key, its path, a header or its metadata says so.

Failing these, its trace may lead to an episode that was created for this trace (`episode_limits.find_traced`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.chat.traces import Trace, find_trace
from app.core.errors import BadRequest
from app.projects.auth import Caller

EPISODE_HEADER = "x-attune-episode"
AGENT_HEADER = "x-attune-agent"
METADATA_KEY = "attune_episode"
AGENT_METADATA_KEY = "attune_agent"
PATH_PARAMETER = "episode_id"
MAX_ID_CHARS = 48
MAX_AGENT_CHARS = 63


@dataclass(frozen=True)
class EpisodeTag:
    """The episode that a request names, if any, the agent that sends it, and its trace.

    `param` is where the request names the episode.
    """

    episode_id: str | None = None
    param: str = ""
    agent: str | None = None
    trace: Trace | None = None


def find_tag(
    caller: Caller, path: Mapping[str, str], headers: Mapping[str, str], metadata: Mapping[str, str]
) -> EpisodeTag:
    """Return what a request says about its episode. It may name it in several ways, as long as they agree.

    Raises BadRequest for a request that names two episodes, and for an agent's name that cannot be stored.
    """
    ways = {
        "its API key": ("authorization", caller.episode_id),
        "its path": (PATH_PARAMETER, path.get(PATH_PARAMETER)),
        f"the header {EPISODE_HEADER}": (EPISODE_HEADER, headers.get(EPISODE_HEADER)),
        f"metadata.{METADATA_KEY}": (f"metadata.{METADATA_KEY}", metadata.get(METADATA_KEY)),
    }
    named = [(way, param, id) for way, (param, id) in ways.items() if id is not None]
    agent, trace = _find_agent(headers, metadata), find_trace(headers)
    if not named:
        return EpisodeTag(None, "", agent, trace)
    first_way, first_param, id = named[0]
    for way, param, other in named[1:]:
        if other != id:
            message = f"This request names two episodes: '{id}' by {first_way} and '{other}' by {way}. Name one."
            raise BadRequest(message, param=param, code="episode_conflict")
    return EpisodeTag(id, first_param, agent, trace)


def _find_agent(headers: Mapping[str, str], metadata: Mapping[str, str]) -> str | None:
    """Return the name of the agent by the header or the metadata, which may not differ."""
    ways = {AGENT_HEADER: headers.get(AGENT_HEADER), f"metadata.{AGENT_METADATA_KEY}": metadata.get(AGENT_METADATA_KEY)}
    named = {param: name for param, name in ways.items() if name}
    for param, name in named.items():
        if len(name) > MAX_AGENT_CHARS or not name.isprintable():
            message = f"An agent's name has at most {MAX_AGENT_CHARS} printable characters."
            raise BadRequest(message, param=param, code="invalid_value")
    if len(set(named.values())) > 1:
        message = f"This request names two agents: '{named[AGENT_HEADER]}' by its header, and another in its metadata."
        raise BadRequest(message, param=f"metadata.{AGENT_METADATA_KEY}", code="invalid_value")
    return next(iter(named.values()), None)


def require_no_agent(tag: EpisodeTag) -> None:
    """Raise BadRequest for a request outside of an episode that names an agent."""
    if tag.agent is not None:
        message = f"{AGENT_HEADER} or metadata.{AGENT_METADATA_KEY} names an agent, and the request names no episode."
        raise BadRequest(message, param=AGENT_HEADER, code="invalid_value")
