"""Which episode a chat request belongs to: its API key, its path, a header or its metadata says so."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.errors import BadRequest
from app.projects.auth import Caller

EPISODE_HEADER = "x-attune-episode"
AGENT_HEADER = "x-attune-agent"
METADATA_KEY = "attune_episode"
PATH_PARAMETER = "episode_id"
MAX_ID_CHARS = 48
MAX_AGENT_CHARS = 63


@dataclass(frozen=True)
class EpisodeTag:
    """The episode that a request names, and the agent that sends it. `param` is where the request names it."""

    episode_id: str
    param: str
    agent: str | None = None


def find_tag(
    caller: Caller, path: Mapping[str, str], headers: Mapping[str, str], metadata: Mapping[str, str]
) -> EpisodeTag | None:
    """Return the episode of a request, or None. It may be named in several ways, as long as they agree.

    Raises BadRequest for a request that names two episodes, or an agent without an episode.
    """
    ways = {
        "its API key": ("authorization", caller.episode_id),
        "its path": (PATH_PARAMETER, path.get(PATH_PARAMETER)),
        f"the header {EPISODE_HEADER}": (EPISODE_HEADER, headers.get(EPISODE_HEADER)),
        f"metadata.{METADATA_KEY}": (f"metadata.{METADATA_KEY}", metadata.get(METADATA_KEY)),
    }
    named = [(way, param, id) for way, (param, id) in ways.items() if id is not None]
    agent = headers.get(AGENT_HEADER) or None
    if not named:
        if agent is not None:
            message = f"The header {AGENT_HEADER} names an agent of an episode, and this request names no episode."
            raise BadRequest(message, param=AGENT_HEADER, code="invalid_value")
        return None
    first_way, first_param, id = named[0]
    for way, param, other in named[1:]:
        if other != id:
            message = f"This request names two episodes: '{id}' by {first_way} and '{other}' by {way}. Name one."
            raise BadRequest(message, param=param, code="episode_conflict")
    if agent is not None and (len(agent) > MAX_AGENT_CHARS or not agent.isprintable()):
        message = f"An agent's name has at most {MAX_AGENT_CHARS} printable characters."
        raise BadRequest(message, param=AGENT_HEADER, code="invalid_value")
    return EpisodeTag(id, first_param, agent)
