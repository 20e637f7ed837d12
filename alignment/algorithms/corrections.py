"""Learning from corrections: DPO on pairs of a corrected text and the reply that was served.

Both share most of their tokens where somebody changed a few words, and the loss of whole replies would push the shared
ones down with the rejected reply. So the log-probs are summed over the tokens that differ (`differing_tokens`). The
reference is the policy before the update: its log-probs of a text that it has not generated are all that is needed.
"""

from collections.abc import Sequence

import torch

from alignment.algorithms.base import RLAlgorithm
from alignment.config.preference_algorithms import CorrectionPairsConfig
from alignment.functional import dpo_loss
from alignment.types import LossOutput, MicroBatch, Sample

DIFFERS = "differs_BT"  # in `TrainData.extra`: 1 for the tokens that the log-probs are summed over


class CorrectionPairs(RLAlgorithm):
    """The samples alternate: the corrected text, then the reply. Internal: a part of the update beside the policy's own
    algorithm."""

    Config = CorrectionPairsConfig
    needs_old_logprobs = True
    needs_reference = False

    def select(self, samples: Sequence[Sample]) -> list[int]:
        return list(range(len(samples)))

    def coupled_samples(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        return [(index, index + 1) for index in range(0, len(samples), 2)]

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        mask_BT = inputs.rows(inputs.batch.extra[DIFFERS])
        logps_B = (inputs.logprobs_BT * mask_BT).sum(-1)
        old_logps_B = (inputs.old_logprobs_BT * mask_BT).sum(-1)
        rows_P2 = torch.tensor(inputs.coupled_rows, dtype=torch.long, device=mask_BT.device)
        chosen, rejected = rows_P2.view(-1, 2).unbind(-1)
        sides = (logps_B[chosen], logps_B[rejected], old_logps_B[chosen], old_logps_B[rejected])
        result = dpo_loss(*sides, beta=self.config.beta)
        metrics = {
            "rewards/chosen": result.chosen_rewards_P,
            "rewards/rejected": result.rejected_rewards_P,
            "rewards/margins": result.chosen_rewards_P - result.rejected_rewards_P,
        }
        return LossOutput(result.loss_P, metrics, unit="coupled_set")
