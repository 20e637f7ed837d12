"""PPO that also asks for a length: replies out of range cost up to a tenth of what rewards are worth.

The penalty is `alignment.signals.length_penalty.length_penalty`, which the serving side flags replies with. It lies between −1 and
0 and is scaled by `length_share` · mean |reward| of the batch, so it can break ties between good replies but never
make a bad one good.

The drift hook: when the mean length has been out of range for `drift_patience` updates in a row, the side that was
passed moves in by `drift_step` tokens, so that the penalty sets in earlier; it moves back when the mean is in range.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.ppo import PPO
from alignment.config.algorithm import LengthAwarePPOConfig, UpdateConfig
from alignment.signals.length_penalty import length_penalty
from alignment.trainer.metrics import UpdateReport


class LengthAwarePPO(PPO):
    Config: ClassVar[type[UpdateConfig]] = LengthAwarePPOConfig

    def __init__(self, config: LengthAwarePPOConfig) -> None:
        super().__init__(config)
        self.shortest, self.longest = config.shortest, config.longest
        self.drift = 0  # updates in a row whose mean length was out of range: > 0 too long, < 0 too short
        self._shaping: dict[str, float] = {}

    def shape(self, data: TrainData) -> Tensor:
        penalties = [length_penalty(len(sample.output_ids), self.shortest, self.longest) for sample in data.samples]
        size = data.rewards_B.abs().mean()
        shaping_B = self.config.length_share * size * torch.tensor(penalties).to(data.rewards_B)
        self._shaping = {
            "reward_shaping/penalty_mean": -sum(penalties) / len(penalties),
            "reward_shaping/out_of_range_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
            "reward_shaping/ratio": float(shaping_B.abs().mean() / size) if size > 0 else 0.0,
        }
        return data.rewards_B + shaping_B

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        super().after_train_step(step, report)
        config, mean = self.config, report.metrics["response_length/mean"]
        if mean > config.longest:
            self.drift = max(self.drift, 0) + 1
        elif mean < config.shortest:
            self.drift = min(self.drift, 0) - 1
        else:
            self.drift = 0
            self.shortest = max(config.shortest, self.shortest - config.drift_step)
            self.longest = min(config.longest, self.longest + config.drift_step)
            return
        if abs(self.drift) >= config.drift_patience:
            room = max(0, min(config.drift_step, self.longest - self.shortest - 1))
            self.longest -= room if self.drift > 0 else 0
            self.shortest += room if self.drift < 0 else 0

    def get_metrics(self) -> dict[str, float]:
        bounds = {"reward_shaping/shortest": float(self.shortest), "reward_shaping/longest": float(self.longest)}
        return super().get_metrics() | self._shaping | bounds

    def state_dict(self) -> dict[str, Any]:
        mine = {"shortest": self.shortest, "longest": self.longest, "drift": self.drift}
        return super().state_dict() | mine

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shortest = int(state.get("shortest", self.config.shortest))
        self.longest = int(state.get("longest", self.config.longest))
        self.drift = int(state.get("drift", 0))
