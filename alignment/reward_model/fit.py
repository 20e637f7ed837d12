"""Fit the reward model on a dataset, step by step, distributed over the ranks."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from alignment.config.trainer import RewardModelConfig
from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs
from alignment.errors import NonFiniteUpdate
from alignment.functional import binary_feedback_loss, bradley_terry_loss
from alignment.models import parallel
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer

# Appended to a reply and never read: the hidden state that predicts it is that of the reply's last token.
END_TOKEN = 0
ExampleGroup = list[PreferencePair | BinaryLabel]  # one label, or all pairs of one ranking, which share computation


def make_sequence(reply: Reply) -> ScoredSequence:
    """Return the reply as a sequence that is scored once, at its end."""
    return ScoredSequence((*reply.ids, END_TOKEN), start=len(reply.ids))


def score_replies(trainer: Trainer, replies: Sequence[Reply], indices: Collection[int] | None = None) -> Tensor:
    """Return one uncalibrated score per reply, the same on every rank; 0 for replies not in `indices`.  → [B] float32

    All ranks must call it.
    """
    selected = sorted(range(len(replies)) if indices is None else indices)
    scores_B = torch.zeros(len(replies))
    if selected:
        scores_B1 = score_sequences(
            trainer.policy,
            [make_sequence(replies[index]) for index in selected],
            max_tokens=trainer.config.micro_batch_tokens,
            role="reward",
        )
        scores_B[torch.tensor(selected)] = scores_B1[:, 0].cpu()
    return scores_B


def group_examples(dataset: PreferenceDataset) -> list[ExampleGroup]:
    """Return one group per ranking and one per label."""
    rankings: dict[int, ExampleGroup] = defaultdict(list)
    for pair in dataset.pairs:
        rankings[pair.ranking].append(pair)
    labels: list[ExampleGroup] = [[label] for label in dataset.labels]
    return [*rankings.values(), *labels]


def _split_batches(groups: Sequence[ExampleGroup], num_batches: int) -> list[list[ExampleGroup]]:
    """Return up to `num_batches` batches with about equally many examples each, none empty."""
    batches: list[list[ExampleGroup]] = [[] for _ in range(num_batches)]
    total, before = sum(len(group) for group in groups), 0
    for group in groups:
        batches[before * num_batches // total].append(group)
        before += len(group)
    return [batch for batch in batches if batch]


def _reply_indices(examples: Iterable[PreferencePair | BinaryLabel]) -> list[int]:
    return sorted({index for example in examples for index in example.reply_indices})


class FitLoop:
    """The optimizer steps of one fit: several epochs of batches of about `batch_size` examples."""

    def __init__(self, trainer: Trainer, dataset: PreferenceDataset, config: RewardModelConfig) -> None:
        self.trainer, self.dataset = trainer, dataset
        self._groups = group_examples(dataset)
        self._generator = torch.Generator().manual_seed(trainer.config.seed)
        batch_size = min(config.batch_size, len(dataset))
        steps_per_epoch = math.ceil(len(dataset) / batch_size)
        self.epochs = min(config.max_epochs, max(1, math.ceil(config.min_steps / steps_per_epoch)))
        self.steps = self.epochs * steps_per_epoch
        self._losses: list[float] = []  # of the current epoch
        self._batches = self._iterate_batches(steps_per_epoch)

    @property
    def loss(self) -> float:
        """Return the mean loss per unit of weight over the last epoch."""
        return sum(self._losses) / max(1, len(self._losses))

    def advance(self, optimizer: Optimizer, steps: int) -> bool:
        """Make up to `steps` optimizer steps; return True if no step was left. Raises NonFiniteUpdate."""
        for _ in range(steps):
            if (batch := next(self._batches, None)) is None:
                return True
            loss = self._accumulate_gradient(batch)
            if not math.isfinite(loss):
                raise NonFiniteUpdate(f"The loss of the reward model is {loss}; the fit is aborted.")
            optimizer.step()
            self._losses.append(loss)
        return False

    def _iterate_batches(self, steps_per_epoch: int) -> Iterator[list[ExampleGroup]]:
        for _ in range(self.epochs):
            order = torch.randperm(len(self._groups), generator=self._generator).tolist()
            self._losses = []
            yield from _split_batches([self._groups[number] for number in order], steps_per_epoch)

    def _accumulate_gradient(self, batch: Sequence[ExampleGroup]) -> float:
        """Leave the batch's gradient on the parameters; return its loss, the same on every rank."""
        trainer = self.trainer
        reply_indices = _reply_indices(chain.from_iterable(batch))
        position = {index: number for number, index in enumerate(reply_indices)}
        sequences = [make_sequence(self.dataset.replies[index]) for index in reply_indices]
        packing = trainer.policy.packing
        micro_batches = make_micro_batches(
            sequences,
            trainer.config.micro_batch_tokens,
            trainer.num_ranks,
            coupled=[[position[index] for index in _reply_indices(group)] for group in batch],
            packing=packing,
        )
        total_weight = sum(sum(example.weight for example in group) for group in batch)
        total_loss = torch.zeros((), device=trainer.device)
        for micro_batch in micro_batches[trainer.rank :: trainer.num_ranks]:
            # A rank with an empty micro-batch computes any other one with weight 0, to take part in the collectives.
            rows = micro_batch or min((other for other in micro_batches if other), key=len)
            inputs = make_model_inputs([sequences[number] for number in rows], trainer.device, packing)
            scores_N = trainer.policy(inputs, "reward")
            score_index = {reply_indices[number]: index for index, number in enumerate(rows)}
            examples = [one for group in batch for one in group if one.reply_indices[0] in score_index]
            loss = _weighted_loss(examples, score_index, scores_N) / total_weight * float(bool(micro_batch))
            torch.autograd.backward(loss * trainer.num_ranks)  # FSDP averages over the ranks
            total_loss += loss.detach()
        return float(parallel.sum_over_ranks(total_loss))


def _weighted_loss(examples: ExampleGroup, score_index: dict[int, int], scores: Tensor) -> Tensor:
    """Return Σ weight · loss over the examples. `score_index` maps a reply to its score's index."""
    pairs = [example for example in examples if isinstance(example, PreferencePair)]
    labels = [example for example in examples if isinstance(example, BinaryLabel)]

    def scores_at(replies: Sequence[int]) -> Tensor:
        indices = torch.tensor([score_index[reply] for reply in replies], dtype=torch.long, device=scores.device)
        return scores[indices]

    def tensor(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=scores.device, dtype=scores.dtype)

    pair_loss_P = bradley_terry_loss(
        scores_at([pair.chosen for pair in pairs]), scores_at([pair.rejected for pair in pairs])
    )
    # The head's own bias, negated, is the bias of the binary loss: the scores contain it.
    label_loss_N = binary_feedback_loss(
        scores_at([label.reply for label in labels]), tensor([label.value for label in labels])
    )
    pair_loss = (tensor([pair.weight for pair in pairs]) * pair_loss_P).sum()
    return pair_loss + (tensor([label.weight for label in labels]) * label_loss_N).sum()
