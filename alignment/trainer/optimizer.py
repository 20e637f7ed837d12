"""AdamW over named tensors, with a state that can be gathered and restored bit for bit."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from alignment.config.trainer import OptimConfig
from alignment.errors import NonFiniteUpdate
from alignment.models import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with gradient clipping and a learning-rate schedule."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimConfig) -> None:
        self.parameters = parameters
        self.lr_scale = 1.0  # see alignment/trainer/trust_region.py
        self.config = config
        self.adamw = torch.optim.AdamW(
            parameters.values(), **config.model_dump(include={"lr", "betas", "eps", "weight_decay"}), foreach=True
        )

    def step(self) -> float:
        """Clip the gradient by its global norm, make a step, and return the norm before clipping, equal on every rank.

        Raises NonFiniteUpdate.
        """
        norm = parallel.full_tensor(get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None]))
        if not math.isfinite(norm):
            raise NonFiniteUpdate(f"The norm of the gradient is {norm.item()}; the policy was not changed.")
        clip_grads_with_norm_(list(self.parameters.values()), self.config.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad()
        return norm.item()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.adamw.zero_grad()

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return self.lr_scale * learning_rate(self.config, self.steps)

    @property
    def steps(self) -> int:
        """Return the number of steps made."""
        return int(self.adamw.state[next(iter(self.parameters.values()))]["step"].item())

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step changes: the parameters and their state, sharded, not copied."""
        states = (self.adamw.state[parameter] for parameter in self.parameters.values())
        return [*self.parameters.values(), *(tensor for state in states for tensor in state.values())]

    def moments(self) -> dict[str, Tensor]:
        """Return both moments of every parameter, sharded, as `exp_avg.<name>` and `exp_avg_sq.<name>`."""
        return {
            f"{moment}.{name}": self.adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }

    def load(self, moments: Mapping[str, Tensor] | None = None, steps: int = 0) -> None:
        """Restore full moments under the names of `moments()`, None for zeros, and the step count. Drop gradients."""
        self.adamw.zero_grad()
        for name, parameter in self.parameters.items():
            state = self.adamw.state[parameter]
            state["step"] = torch.tensor(float(steps))
            for moment in MOMENTS:
                full = torch.zeros(parameter.shape) if moments is None else moments[f"{moment}.{name}"]
                state[moment] = parallel.shard_like(full, parameter).clone()


def learning_rate(config: OptimConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0. It depends on the step only, so resuming needs no state."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.total_steps is None or config.schedule == "constant":
        return config.lr
    length = max(1, config.total_steps - config.warmup_steps)
    remaining = 1 - min(1.0, (step - config.warmup_steps) / length)
    if config.schedule == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    return config.lr * (config.final_share + (1 - config.final_share) * remaining)
