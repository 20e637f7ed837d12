"""Words → a reward hat that has learned them: the loop, a step at a time, each rank doing its share."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from alignment.config.trainer import RewardModelConfig
from alignment.data.micro_batches import Scored, plan, rows
from alignment.data.prefix_sharing import Packing
from alignment.errors import NonFiniteUpdate
from alignment.functional import bradley_terry_loss, thumb_loss
from alignment.models import parallel
from alignment.reward_model.dataset import BinaryLabel, Pair, PreferenceDataset, Reply
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.scoring import score_alone
from alignment.trainer.trainer import Trainer

END = 0  # stands behind a reply and is never read: the state before it is that of the reply's last token


def whole(reply: Reply) -> Scored:
    """A reply as a sequence with one place to look at: its end."""
    return Scored((*reply.ids, END), start=len(reply.ids))


def scores_of(learner: Trainer, replies: Sequence[Reply], places: Collection[int] | None = None) -> Tensor:
    """A score a reply, alike on every rank; 0 for those that are in no one of `places`.  → [B]"""
    wanted = sorted(range(len(replies)) if places is None else places)
    scores_B = torch.zeros(len(replies))
    if wanted:
        scored_B1 = score_alone(
            learner.policy,
            [whole(replies[place]) for place in wanted],
            budget=learner.config.microbatch_tokens,
            rank=learner.rank,
            num_ranks=learner.num_ranks,
            hat="reward",
        )
        scores_B[torch.tensor(wanted)] = scored_B1[:, 0].cpu()
    return scores_B


class Part:
    """One thumb, or the pairs of one ranking: what shares its computation."""

    def __init__(self, pairs: Sequence[Pair], thumbs: Sequence[BinaryLabel]) -> None:
        self.pairs, self.thumbs = tuple(pairs), tuple(thumbs)
        words: list[Pair | BinaryLabel] = [*pairs, *thumbs]
        self.places = sorted({place for word in words for place in word.about})

    @property
    def words(self) -> int:
        return len(self.pairs) + len(self.thumbs)

    @property
    def weight(self) -> float:
        return sum(pair.weight for pair in self.pairs) + sum(thumb.weight for thumb in self.thumbs)


def parts_of(words: PreferenceDataset) -> list[Part]:
    rankings: dict[int, list[Pair]] = defaultdict(list)
    for pair in words.pairs:
        rankings[pair.ranking].append(pair)
    return [Part(pairs, ()) for pairs in rankings.values()] + [Part((), (thumb,)) for thumb in words.thumbs]


def _cut(parts: Sequence[Part], pieces: int) -> list[list[Part]]:
    """In so many pieces, or a few less, with about as many words in each."""
    cut: list[list[Part]] = [[] for _ in range(pieces)]
    total, before = sum(part.words for part in parts), 0
    for part in parts:
        cut[before * pieces // total].append(part)
        before += part.words
    return [piece for piece in cut if piece]


class Fitting:
    """One fit: epochs of steps, each of about `batch_words` words."""

    def __init__(self, learner: Trainer, words: PreferenceDataset, config: RewardModelConfig) -> None:
        self.learner, self.words = learner, words
        self._parts = parts_of(words)
        self._order = torch.Generator().manual_seed(learner.config.seed)
        self._batch = min(config.batch_words, len(words))
        by_epoch = math.ceil(len(words) / self._batch)
        self.epochs = min(config.max_epochs, max(1, math.ceil(config.min_steps / by_epoch)))
        self.steps = self.epochs * by_epoch
        self._losses: list[float] = []
        self._pieces = self._read(by_epoch)

    @property
    def loss(self) -> float:
        """The mean of the last epoch, a word."""
        return sum(self._losses) / max(1, len(self._losses))

    def advance(self, optimizer: Optimizer, steps: int) -> bool:
        """So many steps; True when there were no more. Raises NonFiniteUpdate."""
        for _ in range(steps):
            if (piece := next(self._pieces, None)) is None:
                return True
            loss = self._learn(piece)
            if not math.isfinite(loss):
                raise NonFiniteUpdate(f"The loss is {loss}; the reward model is given up.")
            optimizer.step()
            self._losses.append(loss)
        return False

    def _read(self, by_epoch: int) -> Iterator[list[Part]]:
        for _ in range(self.epochs):
            shuffled = torch.randperm(len(self._parts), generator=self._order).tolist()
            self._losses = []
            yield from _cut([self._parts[number] for number in shuffled], by_epoch)

    def _learn(self, piece: Sequence[Part]) -> float:
        """Leave the step's gradient on the parameters; the same loss on every rank."""
        learner = self.learner
        places = sorted({place for part in piece for place in part.places})
        at = {place: number for number, place in enumerate(places)}
        sequences = [whole(self.words.replies[place]) for place in places]
        packing: Packing = learner.config.packing if learner.policy.masks_allowed else "chain"
        groups = plan(
            sequences,
            learner.config.microbatch_tokens,
            learner.num_ranks,
            together=[[at[place] for place in part.places] for part in piece if len(part.places) > 1],
            packing=packing,
        )
        total = sum(part.weight for part in piece)
        tally = torch.zeros((), device=learner.device)
        for group in groups[learner.rank :: learner.num_ranks]:
            # An empty micro-batch still meets the other ranks, and adds 0.
            present = group or min((one for one in groups if one), key=len)
            scores = learner.policy(rows([sequences[number] for number in present], learner.device, packing), "reward")
            mine = {places[number]: index for index, number in enumerate(present)}
            held = [part for part in piece if part.places[0] in mine]
            loss = _loss(held, mine, scores) / total * float(bool(group))
            (loss * learner.num_ranks).backward()  # FSDP averages over the ranks
            tally += loss.detach()
        return float(parallel.sum_over_ranks(tally) if learner.num_ranks > 1 else tally)


def _loss(parts: Sequence[Part], at: dict[int, int], scores: Tensor) -> Tensor:
    """Σ weight · loss over the words of these parts; `at` says where in `scores` a reply's is."""
    pairs = [pair for part in parts for pair in part.pairs]
    thumbs = [thumb for part in parts for thumb in part.thumbs]

    def told(places: Sequence[int]) -> Tensor:
        return scores[torch.tensor([at[place] for place in places], dtype=torch.long, device=scores.device)]

    def tensor(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=scores.device, dtype=scores.dtype)

    preferred_P = bradley_terry_loss(told([pair.chosen for pair in pairs]), told([pair.rejected for pair in pairs]))
    # The bias that a thumb is held against is the head's own, its sign turned: scores have it in them.
    liked_N = thumb_loss(told([thumb.reply for thumb in thumbs]), tensor([thumb.value for thumb in thumbs]))
    weighed = (tensor([pair.weight for pair in pairs]) * preferred_P).sum()
    return weighed + (tensor([thumb.weight for thumb in thumbs]) * liked_N).sum()
