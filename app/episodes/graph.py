"""The graph of an episode: which turn each of its turns continues, where it branches, where a context was compacted.

Nothing is searched for here: a chat finds the turn that it continues by the hashes of its messages, and records how
many of that turn's tokens its own prompt begins with (`app.chat.conversations`, `app.chat.histories`).
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.conversations import EXACT, GENERATED_ID, NOT_CONTINUED
from app.core.rows import AnyRow
from app.models import Origin, Turn, TurnState

MAX_TURNS = 1000  # shown at once
COLUMNS = (
    *(Turn.id, Turn.choice_index, Turn.episode_step, Turn.agent, Turn.origin, Turn.state, Turn.conversation_id),
    *(Turn.parent_id, Turn.prefix_reuse, Turn.history_id, Turn.num_history_tokens, Turn.request_sha256),
    *(Turn.num_prompt_tokens, Turn.num_output_tokens, Turn.created_at, Turn.finished_at),
)
Edge = Literal["exact", "messages", "compaction"]


class GraphTurn(BaseModel):
    """A turn of an episode, and the earlier turn of it that it follows."""

    id: str
    choice_index: int
    step: int
    agent: str | None
    origin: str
    state: str
    parent_turn_id: str | None = Field(description="null: a root, such as the first chat of an agent")
    edge: Edge | None = Field(
        description="`exact`: its prompt begins with all tokens of the parent's prompt and reply; `messages`: with its "
        "messages, whose tokens differ; `compaction`: the agent goes on from the parent with a shorter prompt"
    )
    branch: int = Field(description="counts from 1; a branch is a line of turns of which each continues the one before")
    num_prompt_tokens: int | None
    num_output_tokens: int | None


async def read_graph(session: AsyncSession, project_id: str, episode_id: str) -> tuple[list[GraphTurn], bool]:
    """Return the first MAX_TURNS turns of an episode in the order of their steps, and whether there are more."""
    of_episode = (Turn.project_id == project_id, Turn.episode_id == episode_id)
    query = select(*COLUMNS).where(*of_episode).order_by(Turn.episode_step, Turn.choice_index, Turn.id)
    rows = (await session.execute(query.limit(MAX_TURNS + 1))).all()
    return build_graph(rows[:MAX_TURNS]), len(rows) > MAX_TURNS


def build_graph(rows: Sequence[AnyRow]) -> list[GraphTurn]:
    """Return the graph of these turns of an episode, given in the order of their steps."""
    by_id = {row.id: row for row in rows}
    latest: dict[str, AnyRow] = {}  # the latest turn of each agent that has a name
    branches: dict[str, int] = {}
    continued: set[str] = set()  # turns whose branch goes on
    turns = []
    for row in rows:
        parent, edge = _find_parent(row, by_id.get(row.parent_id), latest.get(row.agent))
        if parent is not None and edge != "compaction" and parent.id not in continued:
            branches[row.id] = branches[parent.id]
            continued.add(parent.id)
        else:
            branches[row.id] = max(branches.values(), default=0) + 1
        if row.agent is not None and row.origin == Origin.CHAT:
            latest[row.agent] = row
        turns.append(
            GraphTurn(
                **{name: getattr(row, name) for name in ("id", "choice_index", "agent", "origin", "state")},
                step=row.episode_step,
                parent_turn_id=None if parent is None else parent.id,
                edge=edge,
                branch=branches[row.id],
                num_prompt_tokens=row.num_prompt_tokens,
                num_output_tokens=row.num_output_tokens,
            )
        )
    return turns


def find_off_path(rows: Sequence[AnyRow], graph: Sequence[GraphTurn]) -> frozenset[str]:
    """Return the turns that no line of the graph of these rows goes through, and that are no branch of their own.

    Nothing continues them, and the reply failed, or another reply to the same request was continued: another choice, or
    the agent sent the request again. Of several such replies that nothing continues, each ends a line.
    """
    requests = {row.id: row.request_sha256 or str(row.episode_step) for row in rows}
    continued = {turn.parent_turn_id for turn in graph}
    answered = {(turn.parent_turn_id, requests[turn.id]) for turn in graph if turn.id in continued}
    return frozenset(
        turn.id
        for turn in graph
        if turn.id not in continued
        and (turn.state != TurnState.DONE or (turn.parent_turn_id, requests[turn.id]) in answered)
    )


def _find_parent(
    row: AnyRow, recorded: AnyRow | None, latest_of_agent: AnyRow | None
) -> tuple[AnyRow | None, Edge | None]:
    """Return the turn that this one follows, and how; nothing for a root.

    `recorded` is its recorded parent, if that is a turn of this episode.
    """
    if row.origin != Origin.CHAT:
        return None, None
    if recorded is not None and row.prefix_reuse != NOT_CONTINUED:
        return recorded, "exact" if _begins_with_tokens(row, recorded) else "messages"
    if recorded is not None and _is_shorter(row, recorded):  # the client names the conversation
        return recorded, "compaction"
    if recorded is None and latest_of_agent is not None and _replaces(row, latest_of_agent):
        return latest_of_agent, "compaction"
    return None, None


def _begins_with_tokens(row: AnyRow, parent: AnyRow) -> bool:
    """Whether the prompt begins with all tokens of the parent, which the engine may have rendered so by itself."""
    if row.prefix_reuse == EXACT:
        return True
    if row.history_id != parent.id or parent.num_prompt_tokens is None:
        return False
    return bool(row.num_history_tokens == parent.num_prompt_tokens + (parent.num_output_tokens or 0))


def _is_shorter(row: AnyRow, before: AnyRow) -> bool:
    if row.num_prompt_tokens is None or before.num_prompt_tokens is None:
        return False
    return bool(row.num_prompt_tokens < before.num_prompt_tokens + (before.num_output_tokens or 0))


def _replaces(row: AnyRow, before: AnyRow) -> bool:
    """Whether a root of an agent is taken for its compacted context: shorter, and begun after a turn that had a parent.

    A chat that the client puts into another conversation is another run of the agent instead.
    """
    has_begun_after = before.finished_at is not None and before.finished_at <= row.created_at
    is_generated = (row.conversation_id or "").startswith(f"{GENERATED_ID}-")
    names_other = row.conversation_id != before.conversation_id and not is_generated
    return before.parent_id is not None and has_begun_after and not names_other and _is_shorter(row, before)
