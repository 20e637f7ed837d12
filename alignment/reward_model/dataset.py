"""The dataset of a reward model, people's feedback in token space, and the choice of its held-out part.

It does not import torch.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from alignment.data.components import connected_components

MAX_RATER_SHARE = 0.1  # a rater with a larger share of the examples connects no replies: nothing could be held out
MAX_HELD_OUT_FACTOR = 1.5  # the held-out part is at most this many times the requested share


@dataclass(frozen=True)
class Reply:
    """One turn: the exact tokens of its prompt and its output.

    Example: Reply(turn_id="chatcmpl-7", prompt_ids=(1, 5), output_ids=(9, 2), conversation="c-1")
    """

    turn_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    conversation: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the prompt and output ids."""
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True)
class PreferencePair:
    """A comparison of two replies to one prompt, by their indices in `PreferenceDataset.replies`."""

    chosen: int
    rejected: int
    weight: float = 1.0
    rater: str | None = None
    ranking: int = 0  # the ranking that the pair comes from; the pairs of one ranking stay in one optimizer step

    @property
    def reply_indices(self) -> tuple[int, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class BinaryLabel:
    """Feedback about one reply: ±1, or a soft label in between.

    Example: BinaryLabel(reply=3, value=-1.0, weight=0.4)
    """

    reply: int
    value: float
    weight: float = 1.0
    rater: str | None = None

    @property
    def reply_indices(self) -> tuple[int, ...]:
        return (self.reply,)


@dataclass(frozen=True)
class PreferenceDataset:
    """Replies, and the pairs and labels about them. Its length is the number of pairs and labels."""

    replies: tuple[Reply, ...]
    pairs: tuple[PreferencePair, ...] = ()
    labels: tuple[BinaryLabel, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs) + len(self.labels)

    @property
    def examples(self) -> tuple[PreferencePair | BinaryLabel, ...]:
        """Return all pairs and labels."""
        return self.pairs + self.labels

    @property
    def raters(self) -> set[str]:
        """Return the ids of all raters."""
        return {example.rater for example in self.examples if example.rater is not None}


def select_held_out(dataset: PreferenceDataset, share: float, seed: int) -> set[int]:
    """Return the indices of the replies to hold out: about `share` of the examples are about them.

    Replies stay on one side if one could reveal the label of the other: replies to one prompt, turns of a conversation
    (a later prompt contains the earlier reply), both sides of a pair, and all replies that one rater gave feedback on,
    unless that rater has more than MAX_RATER_SHARE of the examples. The choice is by hash: the same dataset and seed
    give the same result.
    """
    examples = dataset.examples
    examples_of_rater = Counter(example.rater for example in examples)
    keys: list[list[Hashable]] = [[("prompt", reply.prompt_ids)] for reply in dataset.replies]
    for index, reply in enumerate(dataset.replies):
        if reply.conversation is not None:
            keys[index].append(("conversation", reply.conversation))
    for example in examples:
        for index in example.reply_indices:
            keys[index].append(("pair", example.reply_indices))
            if example.rater is not None and examples_of_rater[example.rater] <= MAX_RATER_SHARE * len(examples):
                keys[index].append(("rater", example.rater))
    num_examples = Counter(example.reply_indices[0] for example in examples)  # by the first reply of each

    def component_hash(component: list[int]) -> str:
        turn_id = min(dataset.replies[index].turn_id for index in component)
        return hashlib.sha256(f"{seed}/{turn_id}".encode()).hexdigest()

    held_out: set[int] = set()
    held_out_examples, target = 0, share * len(dataset)
    for component in sorted(connected_components(keys), key=component_hash):
        count = sum(num_examples[index] for index in component)
        if held_out_examples < target and held_out_examples + count <= MAX_HELD_OUT_FACTOR * target:
            held_out |= set(component)
            held_out_examples += count
    return held_out


def split(dataset: PreferenceDataset, held_out: set[int]) -> tuple[PreferenceDataset, PreferenceDataset]:
    """Return (the examples about other replies, the examples about the held-out replies).

    Both keep all replies, so indices stay valid.
    """

    def select(inside: bool) -> PreferenceDataset:
        pairs = tuple(pair for pair in dataset.pairs if (pair.chosen in held_out) is inside)
        labels = tuple(label for label in dataset.labels if (label.reply in held_out) is inside)
        return PreferenceDataset(dataset.replies, pairs, labels)

    return select(False), select(True)
