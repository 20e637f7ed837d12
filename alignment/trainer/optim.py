"""AdamW over the adapter, with state that can be taken out whole and put back bit for bit."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from alignment.config import OptimConfig
from alignment.errors import NonFiniteUpdate
from alignment.model import shard

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimConfig) -> None:
        self.parameters = parameters
        self.max_grad_norm = config.max_grad_norm
        self.adamw = torch.optim.AdamW(
            parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    def step(self) -> float:
        """Clip by the global norm and step; return the norm before clipping. All ranks see the same norm."""
        parameters = list(self.parameters.values())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = shard.whole(get_total_norm(gradients))
        if not math.isfinite(norm):
            raise NonFiniteUpdate(f"The gradient's norm is {norm.item()}; the policy stays as it was.")
        clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return norm.item()

    def reset(self) -> None:
        """As if no step had been made."""
        zeros = {
            f"{moment}.{name}": torch.zeros(parameter.shape)
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }
        self.load(zeros, steps=0)

    @property
    def steps(self) -> int:
        return int(self.adamw.state[next(iter(self.parameters.values()))]["step"].item())

    def moments(self) -> dict[str, Tensor]:
        """Both moments of every tensor, whole. All ranks call."""
        return {
            f"{moment}.{name}": shard.whole(self.adamw.state[parameter][moment])
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        self.adamw.zero_grad()
        for name, parameter in self.parameters.items():
            state = self.adamw.state[parameter]
            state["step"] = torch.tensor(float(steps))
            for moment in MOMENTS:
                state[moment] = shard.like(moments[f"{moment}.{name}"], parameter).clone()
