"""The part of an update that learns from corrections (`alignment.algorithms.corrections`)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from alignment.algorithms.corrections import DIFFERS, CorrectionPairs
from alignment.config.algorithm import UpdateConfig
from alignment.config.preference_algorithms import CorrectionPairsConfig
from alignment.corrected_text import TextRule
from alignment.data.collate import collate
from alignment.data.corrections import CorrectionPair, TextTokenizer, make_pair
from alignment.data.micro_batches import ScoredSequence
from alignment.models.policy_model import PolicyModel
from alignment.trainer.loss_part import LossPart
from alignment.types import Batch

PREFIX = "correction/"


def make_pairs(
    batch: Batch, tokenizer: TextTokenizer, policy: PolicyModel
) -> tuple[list[CorrectionPair], dict[str, TextRule]]:
    """Return the pairs of a batch, and why other corrections are none, by their ids."""
    pairs: list[CorrectionPair] = []
    unused: dict[str, TextRule] = {}
    for correction in batch.corrected:
        result = make_pair(correction, tokenizer, policy.num_token_ids, policy.context_length)
        if isinstance(result, TextRule):
            unused[correction.id] = result
        else:
            pairs.append(result)
    return pairs, unused


def make_correction_part(
    pairs: Sequence[CorrectionPair], policy: PolicyModel, settings: UpdateConfig, share: float
) -> LossPart:
    """Return the part, not planned and not scored yet. `share` is its share of the loss of the update.

    DPO's gradient on the log-prob of a token that differs is at first beta / 2, that of a policy gradient with a
    whitened advantage about 1 / length. The weight makes them equal, times the share.
    """
    samples, differs = [], []
    for pair in pairs:
        rejected = pair.correction.sample
        # Nobody sampled the text, so it has no recorded log-probs, and it is not a reply of the policy.
        chosen = replace(
            rejected,
            output_ids=pair.chosen_ids,
            logprobs=(0.0,) * len(pair.chosen_ids),
            lag=max(1, rejected.lag),
            weight=pair.correction.weight,
        )
        samples += [chosen, replace(rejected, weight=pair.correction.weight)]
        differs += [pair.chosen_differs, pair.rejected_differs]
    data = collate(samples, policy.device)
    mask_BT = torch.zeros_like(data.response_mask_BT)
    for row, flags in enumerate(differs):
        mask_BT[row, : len(flags)] = torch.tensor(flags).to(mask_BT)
    data.extra[DIFFERS] = mask_BT
    config = CorrectionPairsConfig(epochs=settings.epochs, minibatches=settings.minibatches)
    num_tokens = float(mask_BT.sum()) / len(samples)
    weight = share * 2.0 / (config.beta * num_tokens)
    sequences = [ScoredSequence.from_sample(sample) for sample in samples]
    return LossPart(CorrectionPairs(config), samples, sequences, data, weight, PREFIX)
