"""Read human feedback on a policy's replies as a preference dataset in token space, for a reward model to fit."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply
from alignment.signals.combine_rewards import preference_pairs
from app.models import Policy, Turn
from app.training.reward_models import human_labels
from app.training.reward_models.human_labels import HumanLabel

MAX_LABELS = 5_000  # the newest ones: this bounds the duration of a fit, and preferences change
CHUNK_SIZE = 500


async def read_preferences(session: AsyncSession, policy: Policy) -> PreferenceDataset:
    """Return the newest human labels of replies whose tokens are recorded.

    Nothing is tokenized here. The text of a correction is therefore not used, only its reward.
    """
    rows = await session.execute(human_labels.select_labels(policy).limit(MAX_LABELS))
    labels = human_labels.read_labels(rows.all())
    replies = await _read_replies(session, {label.turn_id for label in labels})
    return build_dataset([label for label in labels if label.turn_id in replies], replies)


def build_dataset(labels: Sequence[HumanLabel], replies: dict[str, Reply]) -> PreferenceDataset:
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
    rankings: dict[tuple[str, tuple[int, ...]], list[HumanLabel]] = defaultdict(list)
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
    replies: dict[str, Reply] = {}
    ids = sorted(turn_ids)
    for start in range(0, len(ids), CHUNK_SIZE):
        rows = await session.execute(
            select(Turn.id, Turn.prompt_ids, Turn.output_ids, Turn.conversation_id).where(
                Turn.id.in_(ids[start : start + CHUNK_SIZE]), Turn.prompt_ids.is_not(None), Turn.output_ids.is_not(None)
            )
        )
        for id, prompt_ids, output_ids, conversation_id in rows:
            if prompt_ids and output_ids:
                replies[id] = Reply(id, tuple(prompt_ids), tuple(output_ids), conversation_id)
    return replies
