"""Corrections whose texts are learned from: which they are, and the pairs that a batch has of them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import and_, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT
from alignment.corrected_text import TextRule, check_text
from alignment.types import CorrectedReply
from alignment.types import Sample as RecordedSample
from app.core.database import chunked
from app.models import Feedback, Reward, Sample, SampleState, Turn

CORRECTION = "correction"
MAX_TEXTS = 16  # of one reply


async def find_usable(session: AsyncSession, rewards: Iterable[Reward]) -> set[int]:
    """Return the sequence numbers of the corrections behind these rewards whose texts can be learned from.

    Records why others cannot, as far as the texts tell; the trainer finds the rest.
    """
    seqs = [row.feedback_seq for row in rewards if row.feedback_seq is not None and _may_be_correction(row)]
    usable: set[int] = set()
    num_texts: dict[str, int] = defaultdict(int)
    for chunk in chunked(sorted(seqs)):
        rows = await session.execute(
            select(Feedback, Turn.id, Turn.reply)
            .join(Turn, Turn.id == Feedback.turn_id)
            .where(Feedback.seq.in_(chunk), Feedback.kind == CORRECTION, Feedback.text_rule.is_(None))
            .order_by(Feedback.seq)
        )
        for feedback, turn_id, reply in list(rows):
            text, served = feedback.raw_value, _served_text(reply)
            rule = check_text(served, text) if isinstance(text, str) else TextRule.NOT_TEXT
            if rule is None and num_texts[turn_id] == MAX_TEXTS:
                rule = TextRule.TOO_MANY
            if rule is None:
                num_texts[turn_id] += 1
                usable.add(feedback.seq)
            else:
                feedback.text_rule = rule
    return usable


def has_usable(rewards: Iterable[Reward], usable: Collection[int]) -> bool:
    """Return whether one of the rewards of a reply comes from a correction whose text can be learned from."""
    return any(row.feedback_seq in usable for row in rewards)


async def read_corrected(
    session: AsyncSession, batch_id: str, samples: Mapping[str, RecordedSample]
) -> list[CorrectedReply]:
    """Return the corrections that a batch learns from, in order of arrival; `samples` are its samples by turn.

    They are those that were effective when it was frozen. The texts of a reply together weigh at most 1.
    """
    rows = await session.execute(
        select(Feedback.id, Turn.id, Feedback.raw_value, Turn.reply, func.coalesce(Reward.weight, Sample.weight))
        .join(Turn, Turn.id == Feedback.turn_id)
        .join(Sample, Sample.turn_id == Feedback.turn_id)
        .outerjoin(Reward, and_(Reward.turn_id == Feedback.turn_id, Reward.feedback_seq == Feedback.seq))
        .where(
            Feedback.batch_id == batch_id,
            Feedback.kind == CORRECTION,
            Feedback.text_rule.is_(None),
            Sample.batch_id == batch_id,
            Sample.state == SampleState.BATCHED,
        )
        .order_by(Feedback.seq, Reward.id)
    )
    found = [
        (id, turn_id, text, _served_text(reply), weight)
        for id, turn_id, text, reply, weight in rows
        if weight > 0 and isinstance(text, str) and turn_id in samples
    ]
    total: dict[str, float] = defaultdict(float)
    for _, turn_id, _, _, weight in found:
        total[turn_id] += weight
    return [
        CorrectedReply(id, samples[turn_id], served, text, weight / max(1.0, total[turn_id]))
        for id, turn_id, text, served, weight in found
    ]


async def record_unused(session: AsyncSession, unused: Mapping[str, TextRule]) -> None:
    """Record why the texts of these corrections were not learned from."""
    for id, rule in sorted(unused.items()):
        await session.execute(update(Feedback).where(Feedback.id == id).values(text_rule=rule))


def _may_be_correction(row: Reward) -> bool:
    return row.source.startswith(f"{CORRECTION}/") and row.reward_source == EXPLICIT and row.weight > 0


def _served_text(reply: Mapping[str, object] | None) -> str:
    """Return the text of a reply; "" for one that calls tools."""
    content = (reply or {}).get("content")
    return content if isinstance(content, str) and not (reply or {}).get("tool_calls") else ""
