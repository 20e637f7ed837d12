"""PPO for chats with one reply per prompt.

With a running baseline, the advantage is the reward minus the mean of earlier rewards, for every token of the reply. It
is divided by its root mean square over all tokens of the batch (tokens and not replies, because the loss averages over
tokens). All advantages of a batch that is better than earlier batches may therefore be positive. A reply is compared
with those of versions near its own (`alignment/algorithms/baselines.py`): against a better policy's baseline nearly all
replies of an earlier version would be bad, whatever people said of them.

With a critic (`estimator="gae"`), the reward is assigned to the last token and GAE (Schulman et al., 2016) gives the
advantage of each token. The critic is an adapter and a value head on the base model. `estimator="turn_gae"` takes the
turns of an episode as steps instead of tokens: what follows a turn is the next turn of its line, and the value is that
of the state in which the turn begins.

Length-aware PPO adds a penalty on replies whose length is outside a range (`length_penalty`, which the `length` rule
uses too). The penalty lies between −1 and 0 and is scaled by `length_share` · mean |reward| of the batch, so it can
break ties between good replies but never make a bad reply better than a good one. Its drift control: when the mean
length was out of range for `drift_patience` updates in a row, the bound that it crossed moves inwards by `drift_step`
tokens, so the penalty begins earlier. It moves back when the mean is in range.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms.base import PolicyGradient
from alignment.algorithms.baselines import AgentBaselines, Baseline, RunningBaseline, VersionBaseline
from alignment.config.policy_gradient_algorithms import LengthAwarePPOConfig, PPOConfig
from alignment.functional import (
    Gae,
    discounted_turn_returns,
    gae_advantage,
    kl_estimate,
    masked_mean,
    turn_gae_advantage,
    whiten,
)
from alignment.functional.policy_losses import value_loss_per_token
from alignment.json_values import as_integer
from alignment.signals.rules import length_penalty
from alignment.types import CriticMicroBatch, LossOutput, Sample, TrainData, UpdateReport


class PPO(PolicyGradient):
    Config = PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        baseline = AgentBaselines(self._make_baseline) if config.baseline_per_agent else self._make_baseline()
        self.baseline: Baseline = baseline
        self._metrics: dict[str, float] = {}
        self.needs_critic = config.has_critic
        self.needs_old_logprobs = self.needs_old_logprobs or (config.kl_in == "reward" and self.needs_reference)

    def _make_baseline(self) -> Baseline:
        decay = self.config.baseline_decay
        return VersionBaseline(decay) if self.config.baseline_per_version else RunningBaseline(decay)

    def compute_advantages(self, batch: TrainData) -> Tensor:
        mask_BT, rewards_B = batch.response_mask_BT, self.shape_rewards(batch)
        if self.config.turn_discount:
            conversation_B, turn_B = _conversation_turns(batch.samples)
            rewards_B = discounted_turn_returns(
                rewards_B, conversation_B.to(rewards_B.device), turn_B.to(rewards_B.device), self.config.turn_discount
            )
        penalty_BT = self._kl_penalty(batch)
        if self.config.has_critic:
            assert batch.values_BT is not None, "the trainer computes values when needs_critic is set"
            estimate = self._estimate_turns if self.config.estimator == "turn_gae" else self._estimate_tokens
            advantages_BT, batch.returns_BT = estimate(batch, batch.values_BT, rewards_B, penalty_BT)
            self._metrics = {
                "critic/vf_explained_var": explained_variance(batch.values_BT, batch.returns_BT, mask_BT),
                "critic/values/mean": float(masked_mean(batch.values_BT, mask_BT)),
                "critic/returns/mean": float(masked_mean(batch.returns_BT, mask_BT)),
            }
        else:
            rewards_B = rewards_B + (penalty_BT * mask_BT).sum(-1)
            advantages_B = self.baseline.compare(rewards_B, batch.samples)
            advantages_BT = advantages_B[:, None] * mask_BT
            self._metrics = {"critic/baseline": self.baseline.value}
        if self.config.whiten == "off":
            return advantages_BT
        return whiten(advantages_BT, mask_BT, centre=self.config.whiten == "full", weights_B=batch.weights_B)

    def _estimate_tokens(self, batch: TrainData, values_BT: Tensor, rewards_B: Tensor, penalty_BT: Tensor) -> Gae:
        mask_BT = batch.response_mask_BT
        reward_BT = torch.zeros_like(mask_BT).scatter(1, batch.length_B.long()[:, None] - 1, rewards_B[:, None])
        return gae_advantage(reward_BT + penalty_BT, values_BT, mask_BT, self.config.gamma, self.config.lam)

    def _estimate_turns(self, batch: TrainData, values_BT: Tensor, rewards_B: Tensor, penalty_BT: Tensor) -> Gae:
        """Give each token the advantage of its turn, and the critic the return of the turn as the target at each."""
        mask_BT, samples = batch.response_mask_BT, batch.samples
        shaping_B = rewards_B - batch.rewards_B + (penalty_BT * mask_BT).sum(-1)
        own_B = rewards_B.new_tensor([s.reward if s.turn_reward is None else s.turn_reward for s in samples])
        parent_B = torch.tensor(_parents_of_whole_branches(samples), device=rewards_B.device)
        gamma, lam = self.config.gamma, self.config.lam
        turns = turn_gae_advantage(
            own_B + shaping_B, batch.rewards_B + shaping_B, values_BT[:, 0], parent_B, gamma, lam
        )
        return Gae(turns.advantages_B[:, None] * mask_BT, turns.returns_B[:, None] * mask_BT)

    def shape_rewards(self, batch: TrainData) -> Tensor:
        """Return the rewards to learn from, [B]. A subclass may override this."""
        return batch.rewards_B

    def compute_value_loss(self, inputs: CriticMicroBatch) -> LossOutput:
        loss_BT, clipped_BT = value_loss_per_token(
            inputs.values_BT,
            inputs.old_values_BT,
            inputs.returns_BT,
            inputs.response_mask_BT,
            clip=self.config.value_clip,
        )
        return LossOutput(loss_BT, {"critic/vf_clipfrac": clipped_BT}, coef=self.config.value_coef)

    def get_metrics(self) -> dict[str, float]:
        return super().get_metrics() | self._metrics

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | self.baseline.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        self.baseline.load_state_dict(state)

    def _kl_in_loss(self) -> bool:
        return super()._kl_in_loss() and self.config.kl_in == "loss"

    def _kl_penalty(self, batch: TrainData) -> Tensor:
        """Return −kl_coef · KL to the base model per token where the KL is part of the reward, else 0."""
        old_BT, ref_BT, mask_BT = batch.old_logprobs_BT, batch.ref_logprobs_BT, batch.response_mask_BT
        if self.config.kl_in == "loss" or ref_BT is None or old_BT is None:
            return torch.zeros_like(mask_BT)
        return -self.kl_coef * kl_estimate(old_BT, ref_BT, self.config.kl_kind) * mask_BT


class LengthAwarePPO(PPO):
    Config = LengthAwarePPOConfig

    def __init__(self, config: LengthAwarePPOConfig) -> None:
        super().__init__(config)
        self.shortest, self.longest = config.shortest, config.longest
        self.drift = 0  # consecutive updates whose mean length was out of range: > 0 too long, < 0 too short
        self._shaping: dict[str, float] = {}

    def shape_rewards(self, batch: TrainData) -> Tensor:
        penalties = [length_penalty(len(sample.output_ids), self.shortest, self.longest) for sample in batch.samples]
        mean_abs_reward = batch.rewards_B.abs().mean()
        shaping_B: Tensor = self.config.length_share * mean_abs_reward * torch.tensor(penalties).to(batch.rewards_B)
        self._shaping = {
            "reward_shaping/penalty_mean": -sum(penalties) / len(penalties),
            "reward_shaping/out_of_range_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
            "reward_shaping/ratio": float(shaping_B.abs().mean() / mean_abs_reward) if mean_abs_reward > 0 else 0.0,
        }
        rewards_B: Tensor = batch.rewards_B + shaping_B
        return rewards_B

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        super().after_train_step(step, report)
        config, mean_length = self.config, report.metrics["response_length/mean"]
        if mean_length > config.longest:
            self.drift = max(self.drift, 0) + 1
        elif mean_length < config.shortest:
            self.drift = min(self.drift, 0) - 1
        else:
            self.drift = 0
            self.shortest = max(config.shortest, self.shortest - config.drift_step)
            self.longest = min(config.longest, self.longest + config.drift_step)
            return
        if abs(self.drift) >= config.drift_patience:
            step_size = max(0, min(config.drift_step, self.longest - self.shortest - 1))
            self.longest -= step_size if self.drift > 0 else 0
            self.shortest += step_size if self.drift < 0 else 0

    def get_metrics(self) -> dict[str, float]:
        bounds = {"reward_shaping/shortest": float(self.shortest), "reward_shaping/longest": float(self.longest)}
        return super().get_metrics() | self._shaping | bounds

    def state_dict(self) -> dict[str, object]:
        range_state = {"shortest": self.shortest, "longest": self.longest, "drift": self.drift}
        return super().state_dict() | range_state

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        self.shortest = as_integer(state.get("shortest", self.config.shortest))
        self.longest = as_integer(state.get("longest", self.config.longest))
        self.drift = as_integer(state.get("drift", 0))


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Return 1 − var(returns − values) / var(returns) over the tokens. 1 is a perfect critic, 0 a useless one.

    Return 0 where all returns are equal.
    """

    def variance(x_BT: Tensor) -> Tensor:
        return masked_mean((x_BT - masked_mean(x_BT, mask_BT)).square(), mask_BT)

    total = variance(returns_BT)
    return float(1 - variance(returns_BT - values_BT) / total) if total > 0 else 0.0


def _parents_of_whole_branches(samples: Sequence[Sample]) -> list[int]:
    """Return the row of the turn that each turn continues; −1 if it or another turn that continues it is missing.

    The mean over some of the turns that continue one is not the value of what follows.
    """
    rows = {sample.turn_id: row for row, sample in enumerate(samples)}
    present = Counter(sample.parent for sample in samples if sample.turn_reward is not None)
    is_whole = {id: samples[row].num_next == present[id] for id, row in rows.items()}
    return [
        rows[sample.parent]
        if sample.turn_reward is not None and sample.parent is not None and is_whole.get(sample.parent)
        else -1
        for sample in samples
    ]


def _conversation_turns(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return an integer label of each sample's conversation, and its turn index.

    A sample without a conversation has a label of its own. So do candidates for the same turn: only one of them was
    continued, and the batch does not say which.
    """
    counts = Counter((sample.conversation, sample.turn_index) for sample in samples)
    numbers: dict[str, int] = {}
    names = [
        sample.conversation
        if sample.conversation and counts[sample.conversation, sample.turn_index] == 1
        else f"alone {index}"
        for index, sample in enumerate(samples)
    ]
    conversation_B = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    return conversation_B, torch.tensor([sample.turn_index for sample in samples])
