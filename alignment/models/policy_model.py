"""The policy: one trunk under many hats, asked for the log-probs or values of given tokens and nothing else.

With LoRA the base weights are in memory once, frozen: actor, critic, anchor and reward model are adapters on them, and
the reference is the trunk without any. With full weights the actor is the trunk itself, in float32; the reference is
a second, frozen copy, whose states the reward model reads; the critic reads the trunk's and teaches it nothing.

It is the root that FSDP gathers, so all use of the model goes through `forward`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models import lora, master_weights, parallel
from alignment.models.activation_checkpointing import recompute
from alignment.models.base_model import BaseLM, Rows
from alignment.models.loading import DTYPES, load_base
from alignment.models.roles import ActiveRole, ModelRole

__all__ = ["ModelRole", "PolicyModel", "Rows"]

VALUE_HEAD = "value_head.weight"
REWARD_HEAD = "reward_head."


class PolicyModel(nn.Module):
    def __init__(
        self,
        base_model: Path,
        config: TrainerConfig,
        device: torch.device,
        *,
        critic: bool = False,
        reference: bool = True,
        anchor: bool = False,
    ) -> None:
        """Hats that are not asked for take no memory. All are made here, because FSDP takes none on later.

        Raises ValueError for an anchor without LoRA, and for a reward model on full weights without a reference.
        """
        super().__init__()
        self.base_model = base_model
        self.lora = config.lora
        self.dtype = DTYPES[config.dtype]
        self.anchored = anchor
        self.acting = ActiveRole()
        self.frozen: BaseLM | None = None
        self.value_head: nn.Linear | None = None
        self.reward_head: nn.Linear | None = None
        if config.lora is None:
            if anchor:
                raise ValueError("An anchor is an adapter; with full weights there is none.")
            if config.reward_model is not None and not reference:
                raise ValueError("With full weights a reward model reads the reference, and there is none.")
            model = load_base(base_model, "float32", device).requires_grad_(True)
            if self.dtype != torch.float32:
                master_weights.read_as(model, self.dtype)
            if reference:
                self.frozen = BaseLM(load_base(base_model, config.dtype, device), config.logits_chunk)
        else:
            model = load_base(base_model, config.dtype, device)
            lora.attach(model, config.lora, self.acting)
            lora.add(model, "actor", config.lora.rank, trainable=True)
            if critic:
                lora.add(model, "critic", config.critic.rank, trainable=True)
            if anchor:
                lora.add(model, "anchor", config.lora.rank, trainable=False)
            if config.reward_model is not None:
                lora.add(model, "reward", config.lora.rank, trainable=True)
        self.trunk = BaseLM(model, config.logits_chunk)
        width = model.get_output_embeddings().in_features
        if critic:
            self.value_head = nn.Linear(width, 1, bias=False, device=device, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)
        if config.reward_model is not None:
            self.reward_head = nn.Linear(width, 1, device=device, dtype=torch.float32)
            nn.init.zeros_(self.reward_head.weight)
            nn.init.zeros_(self.reward_head.bias)
        if config.gradient_checkpointing:
            recompute(self.trunk.layers, self.acting)

    @property
    def hats(self) -> tuple[ModelRole, ...]:
        """Those that this policy has."""
        there: dict[ModelRole, bool] = {
            "actor": True,
            "reference": self.lora is not None or self.frozen is not None,
            "critic": self.value_head is not None,
            "anchor": self.anchored,
            "reward": self.reward_head is not None,
        }
        return tuple(hat for hat in there if there[hat])

    @property
    def masks_allowed(self) -> bool:
        """May rows have a mask of their own?"""
        return self.trunk.masks_allowed

    def shard(self, device: torch.device) -> None:
        """Cut the weights over the ranks, if there are several. Optimizers are built after this."""
        units = [*self.trunk.layers]
        if self.frozen is not None:  # a unit of its own, so that its embeddings are not gathered with the trunk's
            units += [*self.frozen.layers, self.frozen]
        precise = [head for head in (self.value_head, self.reward_head) if head is not None]
        parallel.shard(self, units, precise, device, self.dtype)

    def tensors(self, hat: ModelRole) -> dict[str, nn.Parameter]:
        """What a hat consists of, by file name: nothing for the reference. Raises ValueError for a missing hat."""
        self._check(hat)
        parallel.at_rest(self)
        if self.lora is None and hat == "actor":
            return master_weights.parameters(self.trunk.model)
        named = lora.parameters(self.trunk.model, hat)
        if hat == "critic":
            assert self.value_head is not None
            named[VALUE_HEAD] = self.value_head.get_parameter("weight")
        if hat == "reward":
            assert self.reward_head is not None
            named |= {REWARD_HEAD + name: parameter for name, parameter in self.reward_head.named_parameters()}
        return named

    @torch.no_grad()
    def wear(self, tensors: dict[str, Tensor], hat: ModelRole = "actor") -> None:
        """Take on tensors, given whole; every rank keeps its share. Raises DamagedAdapter if they do not fit."""
        parameters = self.tensors(hat)
        shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if given != shapes:
            strange = min(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
            raise DamagedAdapter(
                f"The {hat} takes {strange} of shape {shapes.get(strange)}, and was given {given.get(strange)}."
            )
        for name, parameter in parameters.items():
            parameter.copy_(parallel.like(tensors[name], parameter))

    def fresh(self, hat: ModelRole, seed: int) -> dict[str, Tensor]:
        """Whole tensors of a hat that has learned nothing: they act as the base model does, or value all at 0."""
        if self.lora is None and hat == "actor":
            model = load_base(self.base_model, "float32", torch.device("cpu"))
            return {name: parameter.detach() for name, parameter in master_weights.parameters(model).items()}
        return lora.fresh({name: tuple(tensor.shape) for name, tensor in self.tensors(hat).items()}, seed)

    def forward(self, rows: Rows, hat: ModelRole = "actor") -> Tensor:
        """Log-probs of the wanted tokens, or, from critic and reward model, what the states before them are worth.
        → [N] float32"""
        self._check(hat)
        if hat == "reward":
            return self._scores(rows)
        if hat == "reference" and self.frozen is not None:
            return self.frozen(rows)
        with self.acting.wearing(hat):
            if hat != "critic":
                return self.trunk(rows)
            assert self.value_head is not None
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.lora is not None):
                hidden_ND = self.trunk.hidden(rows)
            return self.value_head(hidden_ND.float()).squeeze(-1).clone()  # FSDP's hooks want no view

    def _scores(self, rows: Rows) -> Tensor:
        """Linear in the state over the root of its width: then a step of the optimizer moves the scores of wide and
        narrow models alike. With full weights the head alone learns."""
        assert self.reward_head is not None
        if self.frozen is not None:
            with torch.no_grad():
                hidden_ND = self.frozen(rows, states=True)
        else:
            with self.acting.wearing("reward"):
                hidden_ND = self.trunk.hidden(rows)
        return self.reward_head(hidden_ND.float() / hidden_ND.shape[-1] ** 0.5).squeeze(-1).clone()

    def _check(self, hat: ModelRole) -> None:
        if hat not in self.hats:
            raise ValueError(f"This policy was built without {hat}.")
