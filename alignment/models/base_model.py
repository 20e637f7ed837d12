"""The base model: the roles that it acts in, how it is loaded, and log-probs or hidden states of selected tokens.

actor       the policy that is trained
reference   the base model without any adapter
critic      returns a value for every token instead of a log-prob
reward      returns one score for a reply instead of log-probs

Tensor suffixes: B rows, T tokens of a row, N scored tokens of all rows, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from alignment.models.describe import attention_windows, require_supported_layout
from alignment.models.lm_head import (
    LikelyTokens,
    compute_logprobs,
    compute_logprobs_and_entropy,
    compute_logprobs_at,
    find_likely_tokens,
)

ModelRole = Literal["actor", "reference", "critic", "reward"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ActiveRole:
    """The role of the current forward pass. All LoRA layers of one base model share one instance."""

    role: ModelRole = "actor"

    @contextmanager
    def acting_as(self, role: ModelRole) -> Iterator[None]:
        """Set the role within a `with` block, and restore the previous one afterwards."""
        previous, self.role = self.role, role
        try:
            yield
        finally:
            self.role = previous


class ModelInputs(NamedTuple):
    """B rows of T tokens, padded on the right, and the N tokens in them that are scored.

    Without `attention_mask` attention is causal and a token's position is its column. Rows with shared prefixes that
    branch need an explicit mask and explicit positions.
    """

    input_ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor  # the column that predicts the token: one to the left of the token itself
    targets_N: Tensor  # the token ids to score
    temperatures_N: Tensor  # the sampling temperature of each token
    attention_mask: Tensor | None = None  # bool [B, 1, T, T]: whether a query (row) may attend to a key (column)
    position_ids_BT: Tensor | None = None


class BaseLM(nn.Module):
    """A Hugging Face causal language model behind the interface that training needs."""

    def __init__(self, model: PreTrainedModel, logits_chunk: int) -> None:
        super().__init__()
        self.model = model
        self.logits_chunk = logits_chunk
        self.logit_scale = logit_scale(model)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        layers: nn.ModuleList = self.model.get_decoder().layers
        return layers

    @property
    def supports_attention_mask(self) -> bool:
        """Return whether rows may have an explicit mask: False if any layer uses sliding-window or chunked attention,
        because such layers need masks of their own. So do layers that are not attention."""
        config = self.model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        return set(layer_types) == {"full_attention"} and not any(attention_windows(config, len(self.layers)))

    def forward(self, inputs: ModelInputs, *, return_hidden_states: bool = False) -> Tensor:
        """Return log_softmax(logits / temperature) at the scored tokens, in float32 and nats.  → [N]

        With `return_hidden_states` return the last layer's hidden states there instead.  → [N, D]
        """
        hidden_ND = self.hidden_states(inputs)
        return hidden_ND.clone() if return_hidden_states else self.logprobs(hidden_ND, inputs)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the last layer's hidden states at the columns that predict the scored tokens.  → [N, D]

        Right padding needs no mask, because attention is causal.
        Raises ValueError for inputs with a mask if the model does not support one.
        """
        if inputs.attention_mask is not None and not self.supports_attention_mask:
            raise ValueError(
                f"{type(self.model).__name__} has sliding-window or chunked attention layers, which take no explicit "
                'attention mask. Set packing to "chain" or "off".'
            )
        hidden_BTD: Tensor = self.model.get_decoder()(
            input_ids=inputs.input_ids_BT,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids_BT,
            use_cache=False,
        ).last_hidden_state
        return hidden_BTD[inputs.rows_N, inputs.columns_N]

    def logprobs(self, hidden_ND: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the log-probs of the scored tokens.  [N, D] → [N] float32

        Logits are the largest tensor of a step, so they are computed for scored tokens only.
        """
        head = self.model.get_output_embeddings()
        return compute_logprobs(hidden_ND, head, inputs.targets_N, self._temperatures(inputs), self.logits_chunk)

    def logprobs_and_entropy(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the scored tokens, and the entropy of each token's distribution.  → [N] each"""
        return compute_logprobs_and_entropy(
            self.hidden_states(inputs),
            self.model.get_output_embeddings(),
            inputs.targets_N,
            self._temperatures(inputs),
            self.logits_chunk,
        )

    def likely_tokens(self, inputs: ModelInputs, count: int) -> LikelyTokens:
        """Return the `count` likeliest tokens in the place of each scored token, without a gradient."""
        head, temperatures_N = self.model.get_output_embeddings(), self._temperatures(inputs)
        return find_likely_tokens(self.hidden_states(inputs), head, temperatures_N, self.logits_chunk, count)

    def logprobs_at(self, inputs: ModelInputs, ids_NK: Tensor) -> Tensor:
        """Return the log-probs of K tokens in the place of each scored token, without a gradient.  → [N, K]"""
        head, temperatures_N = self.model.get_output_embeddings(), self._temperatures(inputs)
        return compute_logprobs_at(self.hidden_states(inputs), head, ids_NK, temperatures_N, self.logits_chunk)

    def _temperatures(self, inputs: ModelInputs) -> Tensor:
        """Return what the head's output is divided by before the softmax.  → [N]

        A model that scales its logits is one that is sampled at another temperature.
        """
        return inputs.temperatures_N if self.logit_scale == 1 else inputs.temperatures_N / self.logit_scale


def pick_device(device: str) -> torch.device:
    """Return the device of that name; "auto" is the GPU if there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_base_model(path: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Return the model in `path`, frozen and in evaluation mode, in `dtype` on `device`.

    Attention is SDPA: it has fast kernels for causal attention without a mask on CPU and GPU.
    Raises ValueError for an architecture that `BaseLM` would compute wrongly.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    model = model.requires_grad_(False).eval().to(device)
    _check_architecture(model)
    return model


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor by which the model multiplies its head's output (Granite, Cohere); 1 for most models."""
    config = model.config.get_text_config()
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1 / float(divisor)
    return float(getattr(config, "logit_scale", None) or 1)


@torch.no_grad()
def _check_architecture(model: PreTrainedModel) -> None:
    """Check that the decoder has a list of layers and that its logits are the linear head's output, times a factor.

    Some models cap the logits after the head. Raises ValueError.
    """
    _, head = require_supported_layout(model)
    input_ids_BT = torch.arange(min(8, head.out_features), device=model.device)[None]
    expected = model(input_ids=input_ids_BT, use_cache=False).logits.float()
    hidden_BTD = model.get_decoder()(input_ids=input_ids_BT, use_cache=False).last_hidden_state
    logits = head(hidden_BTD).float() * logit_scale(model)
    if (logits - expected).abs().max() > 4 * torch.finfo(model.dtype).eps * expected.abs().max():
        raise ValueError(
            f"{type(model).__name__} is not supported: its logits are not those of its head; it caps them."
        )


class CastOnRead(nn.Module):
    """A parametrization that returns a float32 master weight in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def enable_master_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every weight of a float32 model read as `dtype`, in place. Gradients are float32.

    Optimizer steps are too small for bfloat16. On one rank this does what FSDP's mixed precision does on several: all
    computation is in the model's own dtype, so the log-probs are those of the weights as an engine holds them
    (Micikevicius et al., 2018).
    """
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, CastOnRead(dtype), unsafe=True)  # unsafe allows the dtype to change


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all weights by the names of a Hugging Face file. A tied weight appears once."""
    return {
        name.replace(".parametrizations.", ".").removesuffix(".original"): parameter
        for name, parameter in model.named_parameters()
    }


def enable_activation_checkpointing(layers: Iterable[nn.Module], active_role: ActiveRole) -> None:
    """Wrap the `forward` of every decoder layer, in place: it stores its input only and is recomputed when needed.

    The wrapper runs inside the hooks of FSDP, so a layer is gathered once in the backward pass. The switch of
    transformers is not used: it requires training mode, which enables dropout.
    """
    for layer in layers:
        layer.forward = partial(_checkpointed_forward, layer.forward, active_role)


def _checkpointed_forward(forward: Callable[..., Any], active_role: ActiveRole, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    role = active_role.role  # during the backward pass another role may be active
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # the forward pass draws no random numbers
        context_fn=lambda: (nullcontext(), active_role.acting_as(role)),
        **kwargs,
    )
