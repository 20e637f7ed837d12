"""The dataset of a fit: the human labels of a policy's replies, as pairs of replies and single labels."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply
from alignment.signals.combine_rewards import preference_pairs
from app.chat.histories import read_prompt_ids
from app.models import Policy, Turn
from app.training import human_labels

MAX_LABELS = 5_000  # the newest ones: this bounds the duration of a fit, and preferences change


async def read_dataset(session: AsyncSession, policy: Policy) -> PreferenceDataset:
    """Return the newest human labels of replies whose tokens are recorded.

    Nothing is tokenized here. The text of a correction is therefore not used, only its reward.
    """
    rows = await session.execute(human_labels.select_labels(policy).limit(MAX_LABELS))
    labels = [human_labels.HumanLabel(*row) for row in rows]
    replies = await _read_replies(session, {label.turn_id for label in labels})
    return _build_dataset([label for label in labels if label.turn_id in replies], replies)


def _build_dataset(labels: Sequence[human_labels.HumanLabel], replies: dict[str, Reply]) -> PreferenceDataset:
    """Build the dataset from labels, newest first. In the dataset the oldest label comes first.

    A ranking becomes pairs of replies to the same prompt. A ranking of k replies weighs as much as k - 1 comparisons.
    Tied replies form no pair.
    """
    turn_ids = sorted({label.turn_id for label in labels})
    positions = {turn_id: position for position, turn_id in enumerate(turn_ids)}
    binary_labels = [
        BinaryLabel(positions[label.turn_id], label.value, label.weight, label.rater)
        for label in reversed(labels)
        if not label.is_ranking
    ]
    rankings: dict[tuple[str, tuple[int, ...]], list[human_labels.HumanLabel]] = defaultdict(list)
    for label in labels:
        if label.is_ranking:
            rankings[label.source, replies[label.turn_id].prompt_ids].append(label)
    pairs: list[PreferencePair] = []
    for number, ranking in enumerate(rankings[key] for key in sorted(rankings)):
        first, share = ranking[0], 2 / len(ranking)  # k(k - 1)/2 pairs share the weight of k - 1 comparisons
        for chosen, rejected in preference_pairs({label.turn_id: label.value for label in ranking}):
            pair = PreferencePair(positions[chosen], positions[rejected], first.weight * share, first.rater, number)
            pairs.append(pair)
    return PreferenceDataset(tuple(replies[turn_id] for turn_id in turn_ids), tuple(pairs), tuple(binary_labels))


async def _read_replies(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, Reply]:
    rows = await session.execute(
        select(Turn.id, Turn.output_ids, Turn.conversation_id).where(
            Turn.id.in_(turn_ids), Turn.own_prompt_ids.is_not(None), Turn.output_ids.is_not(None)
        )
    )
    prompt_ids = await read_prompt_ids(session, turn_ids)
    return {
        id: Reply(id, tuple(prompt_ids[id]), tuple(output_ids), conversation_id)
        for id, output_ids, conversation_id in rows
        if id in prompt_ids and output_ids
    }
