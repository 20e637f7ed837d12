"""AdamW over named tensors, with state that can be taken out whole and put back bit for bit."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from alignment.config.trainer import OptimConfig
from alignment.errors import NonFiniteUpdate
from alignment.models import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimConfig) -> None:
        self.parameters = parameters
        self.config = config
        self.adamw = torch.optim.AdamW(
            parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    def norm(self) -> Tensor:
        """The gradient's, which all ranks see alike. Raises NonFiniteUpdate if it is not finite."""
        norm = parallel.whole(get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None]))
        if not math.isfinite(norm):
            raise NonFiniteUpdate(f"The gradient's norm is {norm.item()}; the policy stays as it was.")
        return norm

    def step(self) -> float:
        """Clip by the global norm and step; return the norm before clipping."""
        norm = self.norm()
        clip_grads_with_norm_(list(self.parameters.values()), self.config.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate
        self.adamw.step()
        self.adamw.zero_grad()
        return norm.item()

    def forget(self) -> None:
        """Drop gradients that are not to be stepped on."""
        self.adamw.zero_grad()

    def reset(self) -> None:
        """As if no step had been made."""
        zeros = {
            f"{moment}.{name}": torch.zeros(parameter.shape)
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }
        self.load(zeros, steps=0)

    @property
    def rate(self) -> float:
        """Of the next step."""
        return rate(self.config, self.steps)

    @property
    def steps(self) -> int:
        return int(self.adamw.state[next(iter(self.parameters.values()))]["step"].item())

    def everything(self) -> list[Tensor]:
        """What a step changes: the parameters and their state, as they lie in memory."""
        states = (self.adamw.state[parameter] for parameter in self.parameters.values())
        return [*self.parameters.values(), *(tensor for state in states for tensor in state.values())]

    def moments(self) -> dict[str, Tensor]:
        """Both moments of every tensor, each rank's share."""
        return {
            f"{moment}.{name}": self.adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        self.adamw.zero_grad()
        for name, parameter in self.parameters.items():
            state = self.adamw.state[parameter]
            state["step"] = torch.tensor(float(steps))
            for moment in MOMENTS:
                state[moment] = parallel.like(moments[f"{moment}.{name}"], parameter).clone()


def rate(config: OptimConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: a function of the step alone, so that resuming needs no more."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.total_steps is None or config.schedule == "constant":
        return config.lr
    length = max(1, config.total_steps - config.warmup_steps)
    left = 1 - min(1.0, (step - config.warmup_steps) / length)
    if config.schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return config.lr * (config.final_share + (1 - config.final_share) * left)
