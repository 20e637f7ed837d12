"""PPO with a penalty on replies whose length is outside a range. The penalty is at most a tenth of the mean |reward|.

The penalty is `alignment.signals.length_penalty.length_penalty`, which the `length` rule uses too. It lies between −1
and 0 and is scaled by `length_share` · mean |reward| of the batch, so it can break ties between good
replies but never make a bad reply better than a good one.

The drift control: when the mean length was out of range for `drift_patience` updates in a row, the bound that it
crossed moves inwards by `drift_step` tokens, so the penalty begins earlier. It moves back when the mean is in range.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithms.ppo import PPO
from alignment.config.algorithm import LengthAwarePPOConfig, UpdateConfig
from alignment.signals.length_penalty import length_penalty
from alignment.types import TrainData, UpdateReport


class LengthAwarePPO(PPO):
    Config: ClassVar[type[UpdateConfig]] = LengthAwarePPOConfig

    def __init__(self, config: LengthAwarePPOConfig) -> None:
        super().__init__(config)
        self.shortest, self.longest = config.shortest, config.longest
        self.drift = 0  # consecutive updates whose mean length was out of range: > 0 too long, < 0 too short
        self._shaping: dict[str, float] = {}

    def shape_rewards(self, data: TrainData) -> Tensor:
        penalties = [length_penalty(len(sample.output_ids), self.shortest, self.longest) for sample in data.samples]
        mean_abs_reward = data.rewards_B.abs().mean()
        shaping_B = self.config.length_share * mean_abs_reward * torch.tensor(penalties).to(data.rewards_B)
        self._shaping = {
            "reward_shaping/penalty_mean": -sum(penalties) / len(penalties),
            "reward_shaping/out_of_range_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
            "reward_shaping/ratio": float(shaping_B.abs().mean() / mean_abs_reward) if mean_abs_reward > 0 else 0.0,
        }
        return data.rewards_B + shaping_B

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

    def state_dict(self) -> dict[str, Any]:
        range_state = {"shortest": self.shortest, "longest": self.longest, "drift": self.drift}
        return super().state_dict() | range_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shortest = int(state.get("shortest", self.config.shortest))
        self.longest = int(state.get("longest", self.config.longest))
        self.drift = int(state.get("drift", 0))
