"""KTO (Ethayarajh et al., 2024): thumbs, each for itself. A reply is judged against what the policy has gained on
the base model on average, and losses weigh more than gains.

The reference point z₀ is the batch's own mean of log π(reply) − log base(reply) before the update, not below 0: the
replies are the policy's, so that is its KL to the base model as it stands. (The paper estimates it on mismatched
pairs of prompts and replies, because its replies were written by somebody else.)
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import MicroBatch, RLAlgorithm, TrainData
from alignment.algorithms.dpo import reference_metrics
from alignment.config.algorithm import KTOConfig, UpdateConfig
from alignment.functional import kto_loss
from alignment.types import Sample, check_variance


class KTO(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = KTOConfig

    def __init__(self, config: KTOConfig) -> None:
        self.config = config
        self._kl = 0.0
        self._weights = (1.0, 1.0)

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """A reward of 0 is no thumb: such a reply is left out."""
        thumbs = [index for index, sample in enumerate(samples) if sample.reward]
        check_variance([samples[index].reward for index in thumbs])
        return thumbs

    def before_train_step(self, step: int, data: TrainData) -> None:
        assert data.parent_BT is not None and data.reference_BT is not None
        gained_B = ((data.parent_BT - data.reference_BT) * data.mask_BT).sum(-1)
        self._kl = max(0.0, float(gained_B.mean()))
        good = int((data.rewards_B > 0).sum())
        bad = len(data.samples) - good
        # Unless told otherwise both sides weigh the same in all, whatever their numbers.
        balance = (good + bad) / 2
        self._weights = (
            self.config.desirable_weight or balance / max(1, good),
            self.config.undesirable_weight or balance / max(1, bad),
        )

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        mask_BT = data.mask_BT
        result = kto_loss(
            (data.logprobs_BT * mask_BT).sum(-1),
            (data.cut(data.whole.reference_BT) * mask_BT).sum(-1),
            data.cut(data.whole.rewards_B) > 0,
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
