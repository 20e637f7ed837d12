"""One walk over a model, which finds what everything else needs to know of it: `ModelSpec`.

`python -m alignment.models.describe FOLDER` prints it as JSON, for processes that do not import torch. The folder needs
a config.json only: the model is built on the meta device, without weights.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from alignment.artifacts.model_spec import (
    ATTENTION_MODULES,
    MLP_MODULES,
    Buffer,
    ExpertWeights,
    LinearLayer,
    ModelSpec,
)

ROUTED_PARTS = {"experts", "shared_expert", "shared_experts"}


def describe_folder(path: Path) -> ModelSpec:
    """Return what the model in a folder with a config.json is made of. No weights are read or allocated.

    Raises ValueError for a configuration that transformers does not know, and for a model that training does not
    support.
    """
    return describe(build_on_meta(path, torch.bfloat16))


def build_on_meta(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder, or of a config.json, on the meta device.

    Raises ValueError for a configuration that transformers does not know.
    """
    logging.set_verbosity_error()  # its warnings are about the values of the configuration
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, KeyError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} holds no configuration of a model that transformers knows: {reason}") from error
    return model.requires_grad_(False).eval()


def describe(model: PreTrainedModel) -> ModelSpec:
    """Return what a model is made of. It may be on any device, and must not have adapters yet.

    Raises ValueError for a model whose decoder has no list of layers, or whose head is not linear.
    """
    layers, head = require_supported_layout(model)
    config = model.config.get_text_config()
    modules = dict(model.named_modules())
    paths = {module: path for path, module in modules.items()}
    layer_paths = tuple(paths[layer] + "." for layer in layers)
    linears = tuple(
        LinearLayer(
            path,
            module.in_features,
            module.out_features,
            has_bias=module.bias is not None,
            is_targetable=path.startswith(layer_paths) and _is_targetable(path, modules),
        )
        for path, module in modules.items()
        if isinstance(module, nn.Linear)
    )
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    experts = tuple(
        ExpertWeights(name, (parameter.shape[0], parameter.shape[1], parameter.shape[2]))
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and parameter.shape[0] == num_experts and name.startswith(layer_paths)
    )
    persistent = model.state_dict().keys()
    embeddings = model.get_input_embeddings().weight
    is_tied = bool(config.tie_word_embeddings)
    heads = config.num_attention_heads
    return ModelSpec(
        architecture=type(model).__name__,
        model_type=config.model_type,
        hidden_size=head.in_features,
        vocab_size=head.out_features,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or head.in_features // heads,
        has_qk_norm=any(path.endswith("q_norm") for path in modules),
        tied_embeddings=is_tied,
        experts_per_token=(_first(config, "num_experts_per_tok") or 0) if experts else 0,
        linears=linears,
        experts=experts,
        buffers=tuple(Buffer(name, tuple(buffer.shape), name in persistent) for name, buffer in model.named_buffers()),
        windows=attention_windows(config, len(layers)),
        units={paths[layer]: sum(parameter.numel() for parameter in layer.parameters()) for layer in layers},
        embedding_parameters=embeddings.numel(),
        head_parameters=0 if is_tied else head.weight.numel(),
        parameters=sum(parameter.numel() for parameter in model.parameters()) - _untied_copy(model, is_tied),
    )


def require_supported_layout(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Linear]:
    """Return the decoder layers and the head. Raises ValueError if there is no list of layers or no linear head."""
    layers, head = getattr(model.get_decoder(), "layers", None), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} is not supported: its decoder must have a list of layers and its head must be "
            "linear, as in Llama and Qwen."
        )
    return layers, head


def attention_windows(config: object, num_layers: int) -> tuple[int | None, ...]:
    """Return how many tokens the attention of each layer reaches back, the token itself included; None: all of them.

    `config` is a text model's configuration of transformers.
    """
    window = getattr(config, "sliding_window", None) or None
    chunk = getattr(config, "attention_chunk_size", None) or None
    types = getattr(config, "layer_types", None)
    if not types:
        return (window or chunk,) * num_layers
    by_type = {"sliding_attention": window, "chunked_attention": chunk}
    return tuple(by_type.get(layer_type) for layer_type in types)


def _is_targetable(path: str, modules: Mapping[str, nn.Module]) -> bool:
    parts = path.split(".")
    if parts[-1] not in (*ATTENTION_MODULES, *MLP_MODULES) or not ROUTED_PARTS.isdisjoint(parts):
        return False
    # Engines fuse up_proj with gate_proj, and an adapter of an up_proj without one (Apertus) is attached nowhere.
    return parts[-1] != "up_proj" or f"{path.removesuffix('up_proj')}gate_proj" in modules


def _untied_copy(model: PreTrainedModel, is_tied: bool) -> int:
    """Return the size of a head that shares its values with the embeddings but is a tensor of its own, as on meta."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return int(head.numel()) if is_tied and embeddings is not head else 0


def _first(config: object, *names: str) -> int | None:
    for name in names:
        value: int | None = getattr(config, name, None)
        if value is not None:
            return value
    return None


if __name__ == "__main__":
    print(describe_folder(Path(sys.argv[1])).to_json())
