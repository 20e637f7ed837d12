"""PPO for chats that have one answer per prompt.

Credit: the reward minus a running baseline, given to every token of the reply, then scaled by its deviation over
all tokens of the batch (tokens and not replies, because the loss averages over tokens). The baseline remembers
earlier batches, so a batch that is better than usual is praised as a whole; `whiten="full"` centres within the
batch instead.

Loss: PPO clip around the parent version's log-probs as the trainer recomputes them, times the truncated
weight of parent over engine (decoupled PPO, Hilton et al., 2022), plus kl_coef · KL(policy ‖ base model). For
samples of the parent itself the weight is 1 and this is plain PPO on the recorded log-probs.
"""

from torch import Tensor

from alignment.algorithms.base import LossInputs, LossOutputs
from alignment.config import PPOConfig
from alignment.functional import (
    RolloutCorrection,
    aggregate,
    kl_estimate,
    policy_loss,
    rollout_correction,
    running_baseline,
    whiten,
)


class PPO:
    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def credit(self, rewards_B: Tensor, mask_BT: Tensor, baseline: float) -> tuple[Tensor, float]:
        advantages_B, baseline = running_baseline(rewards_B, baseline, self.config.baseline_decay)
        advantages_BT = advantages_B[:, None] * mask_BT
        if self.config.whiten != "off":
            advantages_BT = whiten(advantages_BT, mask_BT, centre=self.config.whiten == "full")
        return advantages_BT, baseline

    def correct(self, parent_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> RolloutCorrection:
        return rollout_correction(parent_BT, rollout_BT, mask_BT, cap=self.config.rollout_cap)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        config, mask_BT = self.config, inputs.mask_BT
        pg = policy_loss(
            inputs.logprobs_BT,
            inputs.parent_BT,
            inputs.advantages_BT,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_c=config.clip_c,
            weights_BT=inputs.weights_BT,
        )
        kl_BT = kl_estimate(inputs.logprobs_BT, inputs.reference_BT, config.kl_kind)
        count = inputs.num_tokens if config.aggregation == "token-mean" else inputs.num_sequences
        pg_loss = aggregate(pg.loss_BT, mask_BT, config.aggregation, denominator=count)
        kl_loss = aggregate(kl_BT, mask_BT, config.aggregation, denominator=count)

        def token_mean(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT.detach(), mask_BT, "token-mean", denominator=inputs.num_tokens)

        metrics = {
            "actor/pg_loss": pg_loss.detach(),
            "actor/kl_loss": kl_loss.detach(),
            "actor/pg_clipfrac": token_mean(pg.clipped_BT),
            "actor/pg_clipfrac_lower": token_mean(pg.clipped_lower_BT),
            "actor/ppo_kl": token_mean(inputs.parent_BT - inputs.logprobs_BT),
            "reference_kl": token_mean(kl_estimate(inputs.logprobs_BT, inputs.reference_BT, "k3")),
        }
        return LossOutputs(pg_loss + config.kl_coef * kl_loss, metrics)
