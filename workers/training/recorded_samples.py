"""Recorded turns in token space: the samples of a batch, and the replies that the KL of its update is measured on."""

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import types as alignment_types
from app.chat.histories import read_prompt_ids
from app.models import ApiKey, Origin, Project, Turn, TurnState, Version
from app.training.sample_conditions import is_consenting

MAX_HELD_OUT = 64  # replies: they have more than the 500 tokens that are needed, and take two forward passes


def to_sample(
    turn: Turn,
    prompt_ids: Sequence[int],
    reward: float,
    number: int,
    *,
    lag: int = 0,
    group: str | None = None,
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
        temperature=turn.sampling["temperature"],
        lag=lag,
        group=group or turn.completion_id,  # the choices of one completion are replies to one prompt
        conversation=turn.conversation_id,
        turn_index=turn.num_messages,  # the same for all replies to one prompt
        weight=weight,
    )


async def read_held_out(
    session: AsyncSession, parent: Version, in_batch: Collection[str]
) -> tuple[alignment_types.Sample, ...]:
    """Return the newest replies of the parent that are not in the batch, and that may be trained on."""
    query = (
        select(Turn)
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .where(
            Turn.version_id == parent.id,
            Turn.origin == Origin.CHAT,
            Turn.state == TurnState.DONE,
            Turn.exclusion_reason.is_(None),
            Turn.own_prompt_ids.is_not(None),
            is_consenting(),
        )
        .order_by(Turn.created_at.desc(), Turn.id)
        .limit(MAX_HELD_OUT + len(in_batch))
    )
    turns = [turn for turn in await session.scalars(query) if turn.id not in in_batch and turn.output_ids]
    chosen = turns[:MAX_HELD_OUT]
    prompt_ids = await read_prompt_ids(session, [turn.id for turn in chosen])
    return tuple(to_sample(turn, prompt_ids[turn.id], 0.0, parent.number) for turn in chosen if prompt_ids[turn.id])
