"""PPO for chats that have one answer per prompt.

Credit by a running baseline: the reward minus the mean of earlier batches, given to every token of the reply, then
scaled by its deviation over all tokens of the batch (tokens and not replies, because the loss averages over
tokens). The baseline remembers, so a batch that is better than usual is praised as a whole.

Credit by a critic (`estimator="gae"`): the reward falls on the last token, and each token gets what it is better
than the critic expected before it (Schulman et al., 2016). The critic is an adapter and a value head on the trunk.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import MicroBatch, TrainData
from alignment.algorithms.policy_gradient import PolicyGradient
from alignment.config.algorithm import PPOConfig, UpdateConfig
from alignment.functional import (
    aggregate,
    gae_advantage,
    kl_estimate,
    masked_mean,
    running_baseline,
    turn_credit,
    value_loss,
    whiten,
)
from alignment.types import Sample


class PPO(PolicyGradient):
    Config: ClassVar[type[UpdateConfig]] = PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.baseline = 0.0
        self._told: dict[str, float] = {}
        self.needs_critic = config.estimator == "gae"
        self.needs_parent = self.needs_parent or (config.kl_in == "reward" and self.needs_reference)

    def credit(self, data: TrainData) -> Tensor:
        rewards_B = self.shape(data)
        if self.config.turn_discount:
            conversation_B, turn_B = _places(data.samples)
            rewards_B = turn_credit(
                rewards_B, conversation_B.to(rewards_B.device), turn_B.to(rewards_B.device), self.config.turn_discount
            )
        penalty_BT = self._kl_penalty(data)
        if self.config.estimator == "gae":
            assert data.values_BT is not None, "the learner scores what needs_critic asks for"
            last_BT = torch.zeros_like(data.mask_BT).scatter(1, data.length_B.long()[:, None] - 1, rewards_B[:, None])
            advantages_BT, data.returns_BT = gae_advantage(
                last_BT + penalty_BT, data.values_BT, data.mask_BT, self.config.gamma, self.config.lam
            )
            self._told = {
                "critic/vf_explained_var": explained_variance(data.values_BT, data.returns_BT, data.mask_BT),
                "critic/values/mean": float(masked_mean(data.values_BT, data.mask_BT)),
                "critic/returns/mean": float(masked_mean(data.returns_BT, data.mask_BT)),
            }
        else:
            rewards_B = rewards_B + (penalty_BT * data.mask_BT).sum(-1)
            advantages_B, self.baseline = running_baseline(rewards_B, self.baseline, self.config.baseline_decay)
            advantages_BT = advantages_B[:, None] * data.mask_BT
            self._told = {"critic/baseline": self.baseline}
        if self.config.whiten == "off":
            return advantages_BT
        return whiten(advantages_BT, data.mask_BT, centre=self.config.whiten == "full")

    def shape(self, data: TrainData) -> Tensor:
        """The rewards to learn from, [B]: as they came, unless a subclass has its say."""
        return data.rewards_B

    def compute_value_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        old_BT, returns_BT = data.cut(data.whole.values_BT), data.cut(data.whole.returns_BT)
        loss, clipped_BT = value_loss(
            data.values_BT,
            old_BT,
            returns_BT,
            data.mask_BT,
            clip=self.config.value_clip,
            denominator=data.num_tokens,
        )
        clipfrac = aggregate(clipped_BT, data.mask_BT, "token-mean", denominator=data.num_tokens)
        return {
            "loss": self.config.value_coef * loss,
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": clipfrac,
        }

    def get_metrics(self) -> dict[str, float]:
        return super().get_metrics() | self._told

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.baseline = float(state.get("baseline", 0.0))

    def _kl_in_loss(self) -> bool:
        return super()._kl_in_loss() and self.config.kl_in == "loss"

    def _kl_penalty(self, data: TrainData) -> Tensor:
        """−kl_coef · KL to the base model, token by token, where it is part of the reward."""
        if self.config.kl_in == "loss" or data.reference_BT is None or data.parent_BT is None:
            return torch.zeros_like(data.mask_BT)
        return -self.kl_coef * kl_estimate(data.parent_BT, data.reference_BT, self.config.kl_kind) * data.mask_BT


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 − var(returns − values) / var(returns) over the tokens: 1 is a critic that knows, 0 one that does not.

    0 where all returns are the same.
    """

    def variance(x_BT: Tensor) -> Tensor:
        return masked_mean((x_BT - masked_mean(x_BT, mask_BT)).square(), mask_BT)

    spread = variance(returns_BT)
    return float(1 - variance(returns_BT - values_BT) / spread) if spread > 0 else 0.0


def _places(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """A number for each sample's conversation, and its place there.

    Alone, as if there were no conversation, are samples without one, and replies that share their place with others:
    of the candidates for one prompt only one went on, and nobody says which.
    """
    places = Counter((sample.conversation, sample.turn) for sample in samples)
    numbers: dict[str, int] = {}
    names = [
        sample.conversation
        if sample.conversation and places[sample.conversation, sample.turn] == 1
        else f"alone {index}"
        for index, sample in enumerate(samples)
    ]
    conversation_B = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    return conversation_B, torch.tensor([sample.turn for sample in samples])
