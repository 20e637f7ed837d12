"""KTO (Ethayarajh et al., 2024): a loss on single replies with binary feedback. It compares the log-ratio of each reply
to the base model with the mean log-ratio of the policy.

The reference point z₀ is the batch mean of log π(reply) − log base(reply) before the update, clamped to at least 0. The
policy sampled the replies, so this is its current KL to the base model. (The paper estimates it on mismatched pairs of
prompts and replies, because other models or people wrote its replies.)
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.dpo import reference_metrics
from alignment.config.algorithm import KTOConfig, UpdateConfig
from alignment.functional import kto_loss
from alignment.types import MicroBatch, Sample, TrainData, check_variance


class KTO(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = KTOConfig

    def __init__(self, config: KTOConfig) -> None:
        self.config = config
        self._kl = 0.0
        self._weights = (1.0, 1.0)

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Select the replies whose reward is not 0: a reward of 0 is neither positive nor negative."""
        labelled = [index for index, sample in enumerate(samples) if sample.reward]
        check_variance([samples[index].reward for index in labelled])
        return labelled

    def before_train_step(self, step: int, data: TrainData) -> None:
        assert data.old_logprobs_BT is not None and data.ref_logprobs_BT is not None
        log_ratio_B = ((data.old_logprobs_BT - data.ref_logprobs_BT) * data.mask_BT).sum(-1)
        self._kl = max(0.0, float(log_ratio_B.mean()))
        num_desirable = int((data.rewards_B > 0).sum())
        num_undesirable = len(data.samples) - num_desirable
        # By default both classes have the same total weight, whatever their counts.
        balance = (num_desirable + num_undesirable) / 2
        self._weights = (
            self.config.desirable_weight or balance / max(1, num_desirable),
            self.config.undesirable_weight or balance / max(1, num_undesirable),
        )

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        mask_BT = data.mask_BT
        result = kto_loss(
            (data.logprobs_BT * mask_BT).sum(-1),
            (data.rows(data.batch.ref_logprobs_BT) * mask_BT).sum(-1),
            data.rows(data.batch.rewards_B) > 0,
            kl=self._kl,
            beta=self.config.beta,
            desirable_weight=self._weights[0],
            undesirable_weight=self._weights[1],
            kind=self.config.kind,
        )
        loss = result.loss_B.sum() / data.num_sequences
        return {"loss": loss, "actor/pg_loss": loss.detach()} | reference_metrics(data)

    def get_metrics(self) -> dict[str, float]:
        return {"kl": self._kl, "kto/desirable_weight": self._weights[0], "kto/undesirable_weight": self._weights[1]}
