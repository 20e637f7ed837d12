"""What people have said of replies, in token space, as it travels to the trainer; and which of it is held out."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

LOUD = 0.1  # a rater with more than this share of the words ties nothing together: nothing could be held out
MOST_HELD_OUT = 1.5  # times the share that was asked for


@dataclass(frozen=True)
class Reply:
    """A turn exactly as the engine saw and said it.

    Example: Reply(turn_id="chatcmpl-7", prompt_ids=(1, 5), output_ids=(9, 2), conversation="c-1")
    """

    turn_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    conversation: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True)
class Pair:
    """Of two replies to one prompt, by their places in `Words.replies`, the one that somebody preferred."""

    chosen: int
    rejected: int
    weight: float = 1.0
    rater: str | None = None
    ranking: int = 0  # that it was taken from: its pairs are learned from together

    @property
    def about(self) -> tuple[int, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class BinaryLabel:
    """What somebody said of one reply, in [-1, 1]. Example: Thumb(reply=3, value=-1.0, weight=0.4)"""

    reply: int
    value: float
    weight: float = 1.0
    rater: str | None = None

    @property
    def about(self) -> tuple[int, ...]:
        return (self.reply,)


@dataclass(frozen=True)
class PreferenceDataset:
    """All that a reward model is fitted on."""

    replies: tuple[Reply, ...]
    pairs: tuple[Pair, ...] = ()
    thumbs: tuple[BinaryLabel, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs) + len(self.thumbs)

    @property
    def words(self) -> tuple[Pair | BinaryLabel, ...]:
        return self.pairs + self.thumbs

    @property
    def raters(self) -> set[str]:
        return {word.rater for word in self.words if word.rater is not None}

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        fields = json.loads(raw)
        return cls(
            tuple(_reply(reply) for reply in fields["replies"]),
            tuple(Pair(**pair) for pair in fields["pairs"]),
            tuple(BinaryLabel(**thumb) for thumb in fields["thumbs"]),
        )


def replies_to_bytes(replies: Sequence[Reply]) -> bytes:
    return PreferenceDataset(tuple(replies)).to_bytes()


def held_out(words: PreferenceDataset, share: float, seed: int) -> set[int]:
    """The replies, by place, that nothing is fitted on: about `share` of the words is about them.

    What could give an answer away stays on one side: replies to one prompt, the turns of a conversation (a later
    prompt holds the earlier reply), the two sides of a pair, and all that one rater has spoken of, unless that rater
    has more than a tenth of all words. The choice is by hash: the same words and seed give the same part.
    """
    ties = _Ties(len(words.replies))
    for number, reply in enumerate(words.replies):
        ties.tie(number, ("prompt", reply.prompt_ids))
        if reply.conversation is not None:
            ties.tie(number, ("conversation", reply.conversation))
    spoken = Counter(word.rater for word in words.words if word.rater is not None)
    places = [(word.about, word.rater) for word in words.words]
    weight: Counter[int] = Counter()
    for members, rater in places:
        for member in members:
            ties.tie(member, ("pair", members))
            if rater is not None and spoken[rater] <= LOUD * len(words):
                ties.tie(member, ("rater", rater))
    for members, _ in places:
        weight[members[0]] += 1
    parts: dict[int, list[int]] = defaultdict(list)
    for number in range(len(words.replies)):
        parts[ties.root(number)].append(number)

    def place(part: list[int]) -> str:
        return hashlib.sha256(f"{seed}/{min(words.replies[n].turn_id for n in part)}".encode()).hexdigest()

    chosen: set[int] = set()
    taken, wanted = 0, share * len(words)
    for part in sorted(parts.values(), key=place):
        about = sum(weight[number] for number in part)
        if taken < wanted and taken + about <= MOST_HELD_OUT * wanted:
            chosen |= set(part)
            taken += about
    return chosen


def split(words: PreferenceDataset, out: set[int]) -> tuple[PreferenceDataset, PreferenceDataset]:
    """The words about other replies than `out`, and those about them. Places stay as they are."""

    def kept(inside: bool) -> PreferenceDataset:
        pairs = tuple(pair for pair in words.pairs if (pair.chosen in out) is inside)
        return PreferenceDataset(words.replies, pairs, tuple(t for t in words.thumbs if (t.reply in out) is inside))

    return kept(False), kept(True)


def _reply(fields: dict[str, Any]) -> Reply:
    lists = {name: tuple(fields[name]) for name in ("prompt_ids", "output_ids")}
    return Reply(**(fields | lists))


class _Ties:
    """Union-find: replies that anything ties together are one part."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))
        self._first: dict[Hashable, int] = {}

    def root(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    def tie(self, number: int, by: Hashable) -> None:
        one, other = self.root(number), self.root(self._first.setdefault(by, number))
        self._above[max(one, other)] = min(one, other)
