"""What a base model is made of, as `alignment.models.describe` finds it by one walk. Torch-free.

The adapter's specification, the engine's target modules, the units that are sharded and the planner's numbers all come
from here, so that they cannot differ.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Self

from pydantic import TypeAdapter

# Linear layers that SGLang attaches adapters to, as parts of attention and of a dense MLP. It takes some by their fused
# names (Phi-3, GLM-4), and others, such as dense, fc1 and c_proj, not at all.
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer. `is_targetable`: it belongs to a decoder layer and is of a kind that an engine adapts.

    Example: LinearLayer("model.layers.0.self_attn.q_proj", 4096, 4096, False, True)
    """

    path: str
    in_features: int
    out_features: int
    has_bias: bool
    is_targetable: bool

    @property
    def name(self) -> str:
        """Return the last part of the path, which is what adapters are configured by."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class ExpertWeights:
    """A parameter that holds one matrix of every expert.  [experts, out_features, in_features], or transposed

    Example: ExpertWeights("model.layers.0.mlp.experts.down_proj", (128, 2048, 768))
    """

    path: str
    shape: tuple[int, int, int]

    @property
    def parameters(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass(frozen=True)
class Buffer:
    """A buffer. One that is not persistent is in no file, so whoever builds a model without values must compute it."""

    path: str
    shape: tuple[int, ...]
    is_persistent: bool


@dataclass(frozen=True)
class ModelSpec:
    """A base model. All counts are of parameters; tied embeddings count once, as part of the input embeddings."""

    architecture: str
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    has_qk_norm: bool
    tied_embeddings: bool
    experts_per_token: int
    linears: tuple[LinearLayer, ...]
    experts: tuple[ExpertWeights, ...]
    buffers: tuple[Buffer, ...]
    windows: tuple[int | None, ...]  # of attention, in tokens, by decoder layer; None: the layer attends to all
    units: Mapping[str, int]  # decoder layers, which are sharded and gathered one by one, with their parameters
    embedding_parameters: int
    head_parameters: int  # 0 if tied
    parameters: int

    @property
    def num_layers(self) -> int:
        return len(self.units)

    @property
    def num_experts(self) -> int:
        """Return the number of experts of a layer; 0 for a dense model."""
        return self.experts[0].shape[0] if self.experts else 0

    @property
    def largest_unit(self) -> int:
        return max(self.units.values())

    @cached_property
    def inactive_parameters(self) -> int:
        """Return how many parameters one token does not meet: those of the experts that it is not routed to."""
        if not self.experts:
            return 0
        return (
            sum(weights.parameters for weights in self.experts)
            * (self.num_experts - self.experts_per_token)
            // (self.num_experts)
        )

    @property
    def matmul_parameters(self) -> int:
        """Return how many parameters are multiplied with each token: all but input embeddings and inactive experts."""
        head = self.head_parameters or self.embedding_parameters
        return self.parameters - self.embedding_parameters - self.head_parameters - self.inactive_parameters + head

    @cached_property
    def target_modules(self) -> tuple[str, ...]:
        """Return the names of all layers that can have adapters.

        Engines attach them by name, and a name that experts share would reach the experts too. So a model with experts
        has adapters on attention only.
        """
        allowed = ATTENTION_MODULES if self.experts else ATTENTION_MODULES + MLP_MODULES
        present = {linear.name for linear in self.linears if linear.is_targetable}
        return tuple(name for name in allowed if name in present)

    def layers_called(self, names: frozenset[str]) -> tuple[LinearLayer, ...]:
        """Return the layers with these names that can have adapters, in the model's order."""
        return tuple(linear for linear in self.linears if linear.is_targetable and linear.name in names)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        return TypeAdapter(cls).validate_json(text)
