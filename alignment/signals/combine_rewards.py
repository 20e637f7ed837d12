"""Which turns a reward source judges, how the signals about a turn become one reward, and rewards of later turns."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignment.config.rewards import LEARNED, VERIFIER, ExplicitSource, RewardsConfig, Source
from alignment.config.rollouts import GroupSamplingConfig
from alignment.tolerance import exceeds, sign

USER_FEEDBACK_SOURCES = ("explicit", "next_turn")  # they need a user, so they cannot score a rollout
GROUP_SAMPLING = "group_sampling"  # the name under which a completion's share is drawn
NUMERIC_KINDS = ("binary", "rating", "score")  # kinds of feedback whose value is a number in [-1, 1]


def is_in_share(turn_id: str, source: str, share: float) -> bool:
    """Return whether the turn is in the source's share. The result is stable, and independent between sources."""
    digest = hashlib.sha256(f"{source}/{turn_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def scores_unseen_replies(source: Source) -> bool:
    """Return whether the source can score a reply that no user has seen."""
    return source.type not in USER_FEEDBACK_SOURCES


def group_sampling_disabled_reason(config: GroupSamplingConfig, rewards: RewardsConfig) -> str | None:
    """Return why group sampling is disabled, None if it is enabled."""
    if config.extra_replies == 0:
        return "extra_replies is 0"
    if config.tokens_per_hour == 0:
        return "tokens_per_hour is 0"
    if not any(scores_unseen_replies(source) for source in rewards.sources):
        return "no reward source of the policy can score a reply that no user has seen"
    if rewards.discount > 0:
        return "rewards.discount uses the rewards of later turns, which group samples do not have"
    return None


def needs_group_samples(completion_id: str, config: GroupSamplingConfig, sources: Sequence[Source]) -> bool:
    """Return whether this completion gets group samples: it is in the share, and some source will score them."""
    if not is_in_share(completion_id, GROUP_SAMPLING, config.share):
        return False
    return any(
        scores_unseen_replies(source) and is_in_share(completion_id, source.name, getattr(source, "share", 1.0))
        for source in sources
    )


@dataclass(frozen=True)
class Signal:
    """One reward of one turn.

    `source` is the name of the configured source that it counts for, `weight` the trust in its rater, from 0 to 1.
    `person` is true for human feedback.
    """

    source: str
    value: float
    weight: float = 1.0
    person: bool = False


def feedback_reward(kind: str, value: float | None, label: object, source: ExplicitSource) -> float | None:
    """Return the reward of one piece of feedback, None if it states no preference (a comment, for example).

    `value` is the number of binary feedback (1 or -1), a score or a rating (in [-1, 1]); `label` is the label of
    categorical feedback. Raises ValueError for a value out of range.
    """
    if kind == "correction":
        return source.correction
    if kind == "categorical":
        return source.labels.get(label) if isinstance(label, str) else None
    if kind not in NUMERIC_KINDS:
        return None
    if value is None or not math.isfinite(value) or not -1 <= value <= 1:
        raise ValueError(f"The value of kind {kind} must be between -1 and 1, not {value!r}.")
    if kind == "binary" and abs(value) != 1:
        raise ValueError(f"The value of kind binary must be 1 or -1, not {value!r}.")
    return value


class CombinedReward(NamedTuple):
    """A reward in [-1, 1], and the confidence in it: above 0, and at most 1."""

    value: float
    weight: float


def combine_rewards(signals: Sequence[Signal], config: RewardsConfig) -> CombinedReward | None:
    """Combine the signals of a turn into one reward; None without a signal that counts.

    The reward is the weighted mean over the configured sources of the rater-weighted mean of each source's signals, and
    its weight that of the sums of their signals' weights, each at most 1. Where a person gave feedback, the weight of
    automated sources is multiplied by `automated_weight_factor`. A reward model's signal is ignored where a person's
    feedback counts, since it is a guess of that feedback, and where it contradicts a person.
    """
    sources = {**{source.name: source.weight for source in config.sources}, VERIFIER: 1.0}
    is_answered = any(signal.person and signal.weight > 0 and sources.get(signal.source, 0) > 0 for signal in signals)
    signals = [
        signal
        for signal in signals
        if signal.source != LEARNED or not (is_answered or is_contradicted(signal, signals))
    ]
    has_human_feedback = any(signal.person and signal.weight > 0 for signal in signals)
    total = total_weight = confidence = 0.0
    for name, source_weight in sources.items():
        own = [signal for signal in signals if signal.source == name and signal.weight > 0]
        if not own:
            continue
        if has_human_feedback and not any(signal.person for signal in own):
            source_weight *= config.automated_weight_factor
        rater_weight = sum(signal.weight for signal in own)
        total += source_weight * sum(signal.weight * signal.value for signal in own) / rater_weight
        total_weight += source_weight
        confidence += source_weight * min(1.0, rater_weight)
    return CombinedReward(total / total_weight, confidence / total_weight) if total_weight > 0 else None


def is_contradicted(signal: Signal, signals: Sequence[Signal]) -> bool:
    """Return whether a person with a weight above 0 gave a signal of the opposite sign."""
    return any(other.person and other.weight > 0 and sign(other.value) * sign(signal.value) < 0 for other in signals)


def discounted_return(reward: float | None, next_return: float | None, discount: float) -> float | None:
    """Return the discounted return of a turn, r_t + γ G_{t+1}; None if both parts are missing.

    A turn without a reward of its own has r_t = 0.

    Example: discounted_return(None, 1.0, 0.5) -> 0.5
    """
    discounted = discount * next_return if next_return is not None and discount > 0 else None
    if reward is None and discounted is None:
        return None
    return (reward or 0.0) + (discounted or 0.0)


def spread_over_turns(value: float, num_turns: int, config: RewardsConfig) -> list[float]:
    """Return the reward of each turn from the reward of the whole conversation.  → [num_turns], in [-1, 1]

    With `config.spread` "even" all turns get the value; with "last" the last turn gets it and the others 0; with
    "discounted" earlier turns get less.
    """
    if config.spread == "even":
        return [value] * num_turns
    factor = 0.0 if config.spread == "last" else (config.discount or 0.9)
    return [value * factor ** (num_turns - 1 - index) for index in range(num_turns)]


def rewards_from_ranks(ranks: Mapping[str, int]) -> dict[str, float]:
    """Map ranks (0 is best) to rewards from 1 (best) to -1 (worst). Equal ranks get equal rewards; 0 if all are equal.

    Example: rewards_from_ranks({"a": 0, "b": 1}) -> {"a": 1.0, "b": -1.0}
    """
    positions = {rank: position for position, rank in enumerate(sorted(set(ranks.values())))}
    last = len(positions) - 1
    return {name: 1.0 - 2.0 * positions[rank] / last if last else 0.0 for name, rank in ranks.items()}


def preference_pairs(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs (better, worse) of an order by rewards, without ties.

    Example: preference_pairs({"a": 1.0, "b": 0.0, "c": 0.0}) -> [("a", "b"), ("a", "c")]
    """
    ranked = sorted(values, key=lambda name: (-values[name], name))
    pairs = [(better, worse) for index, better in enumerate(ranked) for worse in ranked[index + 1 :]]
    return [(better, worse) for better, worse in pairs if exceeds(values[better], values[worse])]
