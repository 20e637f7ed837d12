"""Rewards → Words: what people have said of a policy's replies, in token space, for a reward model to learn."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import preferred
from alignment.reward_model.dataset import BinaryLabel, Pair, PreferenceDataset, Reply
from app.models import Policy, Turn
from app.training.reward_models import human_labels
from app.training.reward_models.human_labels import Word

MOST_WORDS = 5_000  # the latest ones: a fit must come to an end, and tastes change
AT_ONCE = 500


async def read(session: AsyncSession, policy: Policy) -> PreferenceDataset:
    """Only what is on record in tokens: nothing is tokenised anew, so a correction counts by its number alone."""
    rows = await session.execute(human_labels.words(policy).limit(MOST_WORDS))
    said = human_labels.read(rows.all())
    replies = await _replies(session, {word.turn_id for word in said})
    return words_of([word for word in said if word.turn_id in replies], replies)


def words_of(said: Sequence[Word], replies: dict[str, Reply]) -> PreferenceDataset:
    """The oldest first. An order is kept as pairs of replies to the very same prompt, all together as much as one
    word for every reply but one; what is tied says nothing."""
    order = sorted({word.turn_id for word in said})
    place = {turn_id: number for number, turn_id in enumerate(order)}
    thumbs = [
        BinaryLabel(place[word.turn_id], word.value, word.weight, word.rater)
        for word in reversed(said)
        if not word.orders
    ]
    rankings: dict[tuple[str, tuple[int, ...]], list[Word]] = defaultdict(list)
    for word in said:
        if word.orders:
            rankings[word.source, replies[word.turn_id].prompt_ids].append(word)
    pairs: list[Pair] = []
    for number, mine in enumerate(rankings[key] for key in sorted(rankings)):
        one, share = mine[0], 2 / len(mine)  # k replies are k(k - 1)/2 pairs, and k - 1 comparisons would do
        for better, worse in preferred({word.turn_id: word.value for word in mine}):
            pairs.append(Pair(place[better], place[worse], one.weight * share, one.rater, number))
    return PreferenceDataset(tuple(replies[turn_id] for turn_id in order), tuple(pairs), tuple(thumbs))


async def _replies(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, Reply]:
    found: dict[str, Reply] = {}
    ids = sorted(turn_ids)
    for start in range(0, len(ids), AT_ONCE):
        rows = await session.execute(
            select(Turn.id, Turn.prompt_ids, Turn.output_ids, Turn.conversation_id).where(
                Turn.id.in_(ids[start : start + AT_ONCE]), Turn.prompt_ids.is_not(None), Turn.output_ids.is_not(None)
            )
        )
        for id, prompt_ids, output_ids, conversation_id in rows:
            if prompt_ids and output_ids:
                found[id] = Reply(id, tuple(prompt_ids), tuple(output_ids), conversation_id)
    return found
