"""Recorded turns in token space: the samples of a batch, and the replies that the KL of its update is measured on."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import types as alignment_types
from alignment.json_values import as_number
from app.chat.histories import read_prompt_ids
from app.episodes import graph
from app.models import ApiKey, Batch, Origin, Project, Turn, TurnState, Version
from app.training.sample_conditions import is_consenting

MAX_HELD_OUT = 64  # replies: most often they have the tokens that are needed, and take a few forward passes


class Place(NamedTuple):
    """Where a turn is in its episode: after how many turns of its line, after which one, None for a root, and before
    how many turns that go on from it."""

    depth: int
    parent: str | None
    num_next: int = 0


def to_sample(
    turn: Turn,
    prompt_ids: Sequence[int],
    reward: float,
    number: int,
    *,
    lag: int = 0,
    group: str | None = None,
    place: Place | None = None,
    turn_return: float | None = None,
    turn_reward: float | None = None,
    weight: float = 1.0,
) -> alignment_types.Sample:
    """Return a recorded turn in token space; `number` is that of the version that generated it."""
    assert prompt_ids and turn.output_ids and turn.logprobs, f"turn {turn.id} was never trainable"
    return alignment_types.Sample(
        turn_id=turn.id,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(turn.output_ids),
        logprobs=tuple(turn.logprobs),
        reward=reward,
        version=number,
        temperature=as_number(turn.sampling["temperature"]),
        lag=lag,
        group=group or turn.completion_id,  # the choices of one completion are replies to one prompt
        conversation=turn.conversation_id,
        turn_index=turn.num_messages,  # the same for all replies to one prompt
        episode=turn.episode_id,
        agent=turn.agent,
        state_key=turn.state_key,
        depth=None if place is None else place.depth,
        parent=None if place is None else place.parent,
        num_next=0 if place is None else place.num_next,
        turn_return=turn_return,
        turn_reward=turn_reward,
        weight=weight,
    )


async def read_places(session: AsyncSession, turns: Collection[Turn]) -> dict[str, Place]:
    """Return the places in their episodes of the turns that are in one, by turn.

    The other turns of the episodes count too: a turn before it need not be in the batch.
    """
    episodes = {turn.episode_id for turn in turns if turn.episode_id is not None}
    query = select(*graph.COLUMNS, Turn.episode_id).where(Turn.episode_id.in_(episodes))
    order = (Turn.episode_id, Turn.episode_step, Turn.choice_index, Turn.id)
    places: dict[str, Place] = {}
    for _, found in groupby(await session.execute(query.order_by(*order)), lambda row: row.episode_id):
        rows = list(found)
        shown = graph.build_graph(rows)
        off_path = graph.find_off_path(rows, shown)
        num_next = Counter(turn.parent_turn_id for turn in shown if turn.id not in off_path)
        for turn in shown:
            parent = turn.parent_turn_id
            places[turn.id] = Place(0 if parent is None else places[parent].depth + 1, parent, num_next[turn.id])
    return places


async def read_held_out(
    session: AsyncSession, batch: Batch, parent: Version, in_batch: Collection[str]
) -> tuple[alignment_types.Sample, ...]:
    """Return the newest replies of the policy that are not in the batch, and that may be trained on.

    They may be of any version, since a KL is measured at their tokens and does not need to be of the parent's own. All
    were finished before the batch was frozen: so a repeated update is the same one.
    """
    query = (
        select(Turn, Version.number)
        .join(Version, Version.id == Turn.version_id)
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .where(
            Turn.policy_id == parent.policy_id,
            Turn.origin == bindparam(None, Origin.CHAT.value, literal_execute=True),  # for the partial index
            Turn.state == TurnState.DONE,
            Turn.exclusion_reason.is_(None),
            Turn.own_prompt_ids.is_not(None),
            Turn.finished_at <= batch.created_at,
            is_consenting(),
        )
        .order_by(Turn.created_at.desc(), Turn.id)
        .limit(MAX_HELD_OUT + len(in_batch))
    )
    rows = [(turn, number) for turn, number in await session.execute(query) if turn.output_ids]
    chosen = [(turn, number) for turn, number in rows if turn.id not in in_batch][:MAX_HELD_OUT]
    prompt_ids = await read_prompt_ids(session, [turn.id for turn, _ in chosen])
    return tuple(
        to_sample(turn, prompt_ids[turn.id], 0.0, number, lag=abs(parent.number - number))
        for turn, number in chosen
        if prompt_ids[turn.id]
    )
