"""The policy model: one base model that acts in several roles and returns log-probs or values of given tokens.

With LoRA the frozen base weights are in memory once: actor, critic and reward model are adapters on them, and the
reference is the base model without an adapter. With full weights the actor is the base model itself, in float32;
the reference is a second, frozen copy, whose hidden states the reward model reads; the critic reads the actor's hidden
states without a gradient to them.

The model is the FSDP root, so all use of it goes through `forward`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.artifacts.specs import AdapterSpec
from alignment.config.trainer import Packing, TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models import base_model as base
from alignment.models import lora, parallel
from alignment.models.base_model import ActiveRole, BaseLM, ModelInputs, ModelRole, load_base_model
from alignment.models.describe import describe
from alignment.models.lm_head import LikelyTokens

VALUE_HEAD = "value_head."
REWARD_HEAD = "reward_head."


class PolicyModel(nn.Module):
    """All model roles of one policy on one base model."""

    def __init__(
        self,
        base_model: Path,
        config: TrainerConfig,
        device: torch.device,
        *,
        critic: bool = False,
        reference: bool = True,
    ) -> None:
        """Load the base model and add the requested roles. A role that is not requested takes no memory.

        All roles are created here, because FSDP accepts no parameters later.
        Raises ValueError for a reward model on full weights without a reference, and for target modules that the base
        model does not have.
        """
        super().__init__()
        self.base_model = base_model
        self.device = device
        self.lora = config.lora
        self.dp_shard = config.dp_shard
        self.dtype = base.DTYPES[config.dtype]
        self.active_role = ActiveRole()
        self.adapter_spec: AdapterSpec | None = None  # of the adapters in an engine; None: full weights are trained
        self.reference_lm: BaseLM | None = None
        self.value_head: nn.Linear | None = None
        self.reward_head: nn.Linear | None = None
        if config.lora is None:
            if config.reward_model is not None and not reference:
                raise ValueError("With full weights a reward model needs the reference model; set reference=True.")
            model = load_base_model(base_model, "float32", device).requires_grad_(True)
            self.model_spec = describe(model)
            if self.dtype != torch.float32:
                base.enable_master_weights(model, self.dtype)
            if reference:
                self.reference_lm = BaseLM(load_base_model(base_model, config.dtype, device), config.logits_chunk)
        else:
            model = load_base_model(base_model, config.dtype, device)
            self.model_spec = describe(model)
            self.adapter_spec = AdapterSpec.from_model(self.model_spec, config.lora)
            lora.insert_lora_layers(model, self.adapter_spec, self.active_role)
            lora.add_adapter(model, "actor", config.lora.r)
            if critic:
                lora.add_adapter(model, "critic", config.critic.r or config.lora.r)
            if config.reward_model is not None:
                lora.add_adapter(model, "reward", config.lora.r)
        self.base_lm = BaseLM(model, config.logits_chunk)
        # Rows that branch need an explicit attention mask, which not every model supports.
        can_branch = config.packing != "tree" or self.base_lm.supports_attention_mask
        self.packing: Packing = config.packing if can_branch else "chain"
        width = model.get_output_embeddings().in_features
        if critic:
            self.value_head = nn.Linear(width, 1, bias=False, device=device, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)
        if config.reward_model is not None:
            self.reward_head = nn.Linear(width, 1, device=device, dtype=torch.float32)
            nn.init.zeros_(self.reward_head.weight)
            nn.init.zeros_(self.reward_head.bias)
        if config.activation_checkpointing:
            base.enable_activation_checkpointing(self.base_lm.layers, self.active_role)

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """Return the roles that this policy was built with."""
        available: dict[ModelRole, bool] = {
            "actor": True,
            "reference": self.lora is not None or self.reference_lm is not None,
            "critic": self.value_head is not None,
            "reward": self.reward_head is not None,
        }
        return tuple(role for role in available if available[role])

    @property
    def num_token_ids(self) -> int:
        """Return the number of token ids of the base model."""
        return int(self.base_lm.model.config.get_text_config().vocab_size)

    @property
    def context_length(self) -> int | None:
        """Return the most tokens that the base model was made for; None if its configuration does not say."""
        length = getattr(self.base_lm.model.config.get_text_config(), "max_position_embeddings", None)
        return None if length is None else int(length)

    def shard(self) -> None:
        """Shard the weights over the ranks, if there are several. Optimizers must be built after this."""
        units = [*self.base_lm.layers]
        if self.reference_lm is not None:  # a unit of its own: its embeddings are not gathered with the actor's
            units += [*self.reference_lm.layers, self.reference_lm]
        heads = [head for head in (self.value_head, self.reward_head) if head is not None]
        parallel.apply_fsdp(self, units, heads, self.device, self.dtype, self.dp_shard)

    def role_parameters(self, role: ModelRole) -> dict[str, nn.Parameter]:
        """Return a role's parameters, sharded, by the names of its file; the reference has none.

        Raises ValueError for a role that the policy does not have.
        """
        self._check_role(role)
        parallel.reshard(self)
        if self.lora is None and role == "actor":
            return base.named_weights(self.base_lm.model)
        named = lora.adapter_parameters(self.base_lm.model, role)
        heads = {"critic": (VALUE_HEAD, self.value_head), "reward": (REWARD_HEAD, self.reward_head)}
        prefix, head = heads.get(role, ("", None))
        if head is not None:
            named |= {prefix + name: parameter for name, parameter in head.named_parameters()}
        return named

    @torch.no_grad()
    def load_adapter(self, tensors: dict[str, Tensor], role: ModelRole = "actor") -> None:
        """Copy full tensors, an adapter or full weights, into a role's parameters. Every rank keeps its shard.

        Raises DamagedAdapter if names or shapes do not match.
        """
        parameters = self.role_parameters(role)
        expected = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if actual != expected:
            name = min(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
            raise DamagedAdapter(
                f"The tensors do not fit the {role}: {name} has shape {actual.get(name)}, "
                f"expected {expected.get(name)} (None: no such tensor)."
            )
        for name, parameter in parameters.items():
            parameter.copy_(parallel.shard_like(tensors[name], parameter))

    def initial_tensors(self, role: ModelRole, seed: int) -> dict[str, Tensor]:
        """Return the full tensors of an untrained role, in float32 on the CPU.

        An untrained actor is the base model; an untrained critic or reward model returns 0 for every token.
        """
        if self.lora is None and role == "actor":
            model = load_base_model(self.base_model, "float32", torch.device("cpu"))
            return {name: parameter.detach() for name, parameter in base.named_weights(model).items()}
        return lora.init_adapter(
            {name: tuple(tensor.shape) for name, tensor in self.role_parameters(role).items()}, seed
        )

    def forward(
        self,
        inputs: ModelInputs,
        role: ModelRole = "actor",
        *,
        with_entropy: bool = False,
        num_likely_tokens: int = 0,
        token_ids_NK: Tensor | None = None,
    ) -> Tensor | LikelyTokens:
        """Return the log-probs of the scored tokens, in nats; for the critic and the reward model the value or score at
        the hidden state that predicts each of them.  → [N] float32

        For the actor there are three other results:
        - `with_entropy` adds the entropy of each token's distribution.  → [2, N]
        - `num_likely_tokens` returns so many of the likeliest tokens in the place of each scored token instead.
        - `token_ids_NK` returns the log-probs of these tokens in its place instead.  → [N, K]
        The last two are without a gradient.

        Raises ValueError for a role that the policy does not have.
        """
        self._check_role(role)
        if num_likely_tokens or token_ids_NK is not None:
            with self.active_role.acting_as("actor"):
                if token_ids_NK is None:
                    return self.base_lm.likely_tokens(inputs, num_likely_tokens)
                return self.base_lm.logprobs_at(inputs, token_ids_NK)
        if with_entropy:
            with self.active_role.acting_as("actor"):
                return torch.stack(self.base_lm.logprobs_and_entropy(inputs))
        if role == "reward":
            return self._reward_scores(inputs)
        if role == "reference" and self.reference_lm is not None:
            reference_logprobs_N: Tensor = self.reference_lm(inputs)
            return reference_logprobs_N
        with self.active_role.acting_as(role):
            if role != "critic":
                logprobs_N: Tensor = self.base_lm(inputs)
                return logprobs_N
            assert self.value_head is not None
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.lora is not None):
                hidden_ND = self.base_lm.hidden_states(inputs)
            values_N1: Tensor = self.value_head(hidden_ND.float())
            return values_N1.squeeze(-1).clone()  # FSDP's hooks reject a view

    def _reward_scores(self, inputs: ModelInputs) -> Tensor:
        """Return the reward head's output for hidden states divided by the square root of their width.  → [N] float32

        The division makes an optimizer step change the scores of wide and narrow models alike. With full weights only
        the head is trained.
        """
        assert self.reward_head is not None
        if self.reference_lm is not None:
            with torch.no_grad():
                hidden_ND = self.reference_lm(inputs, return_hidden_states=True)
        else:
            with self.active_role.acting_as("reward"):
                hidden_ND = self.base_lm.hidden_states(inputs)
        scores_N1: Tensor = self.reward_head(hidden_ND.float() / hidden_ND.shape[-1] ** 0.5)
        return scores_N1.squeeze(-1).clone()

    def _check_role(self, role: ModelRole) -> None:
        if role not in self.roles:
            raise ValueError(f"This policy was built without {role}; its roles are {', '.join(self.roles)}.")
