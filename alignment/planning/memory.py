"""The memory of one update of an adapter and of one engine, in bytes by part.

The constants of the activations were fitted to what FSDP2 does with the trainer's own model on fake tensors, those of
experts to published peaks; tests/alignment/planning holds the formulas to both.
"""

from dataclasses import dataclass
from typing import Literal

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.planning.hardware import GIB

ADAPTER_STATE_BYTES = 16  # of a trained parameter: value, gradient and AdamW's two averages, all float32
LOGIT_BYTES = 8  # of one logit in a chunk of the head: in bfloat16, in float32, and its derivative
CONTEXT_BYTES = GIB  # of CUDA and NCCL
FRAGMENTATION = 1.08  # of what an update allocates; assumed
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class UpdateShape:
    """How an update is computed. `shards` ranks share one copy of the weights; 1: each rank has all of them."""

    shards: int
    micro_batch_tokens: int
    activation_checkpointing: bool
    logits_chunk: int = 1 << 24
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    adapters: int = 1  # trained ones: the actor, and the critic


def adapter_parameters(spec: AdapterSpec) -> int:
    return sum(rows * columns for rows, columns in spec.shapes.values())


def layer_activations(model: ModelSpec, dtype_bytes: int = 2) -> float:
    """Return the bytes a token that one decoder layer keeps for the backward pass, without checkpointing.

    The frozen linear layers keep no input; those with an adapter keep theirs. Attention keeps queries, keys and values
    and its output; the MLP its gate, the factors and their product; norms their input and the normalized values.
    """
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    attention = 4 * queries + 6 * keys + (6 * (queries + keys) if model.has_qk_norm else 0)
    if model.experts:
        mlp = (8.0 * _expert_width(model) + 14 * hidden) * model.experts_per_token
    else:
        mlp = 8.0 * _mlp_width(model)
    return (18.5 * hidden + attention + mlp) * dtype_bytes / 2


def backward_temporaries(model: ModelSpec, dtype_bytes: int = 2) -> float:
    """Return the bytes a token that the backward pass of a recomputed layer holds besides: gradients of its MLP."""
    if model.experts:  # of a copy of the token for each of its experts, too
        mlp = (4.0 * _expert_width(model) + 6 * model.hidden_size) * model.experts_per_token
    else:
        mlp = 4.0 * _mlp_width(model)
    return (mlp + 2 * model.hidden_size) * dtype_bytes / 2


def update_memory(model: ModelSpec, spec: AdapterSpec, shape: UpdateShape) -> dict[str, float]:
    """Return the bytes on each GPU at the peak of an update by part. Their sum is the peak without fragmentation."""
    width = DTYPE_BYTES[shape.dtype]
    is_sharded = shape.shards > 1
    # A layer is gathered while the one before it is computed; embeddings and head stay gathered during a pass.
    gathered = 2 * model.largest_unit + model.embedding_parameters + model.head_parameters
    layer, backward = layer_activations(model, width), backward_temporaries(model, width)
    tokens, layers = shape.micro_batch_tokens, model.num_layers
    if shape.activation_checkpointing:
        stored, in_layer = float(layers * width * model.hidden_size), layer + backward
    else:
        stored, in_layer = layers * layer, 10.0 * model.hidden_size  # the rest of the last layer is free by then
    # The last norm computes in float32 for all tokens; the tables of the rotary embeddings are small.
    ends = 4 * model.hidden_size + 2 * width * model.head_dim
    logits = LOGIT_BYTES * min(shape.logits_chunk, tokens * model.vocab_size)
    computing = {
        "gathered weights": float(width * gathered) if is_sharded else 0.0,
        "stored activations": float(tokens * (stored + ends)),
        # The head is done before the backward pass of the last layer begins.
        "layer or logits": float(max(tokens * in_layer, logits)),
    }
    # While embeddings, head and the first layer are gathered, they are there twice: as received, and as weights. With
    # few tokens or layers that is more.
    first = model.largest_unit + model.embedding_parameters + model.head_parameters
    gathering = {
        "gathered weights": float(2 * width * first) if is_sharded else 0.0,
        "stored activations": float(tokens * ends),
        "layer or logits": 0.0,
    }
    return {
        "weights": width * model.parameters / shape.shards,
        "adapters and optimizer": shape.adapters * ADAPTER_STATE_BYTES * adapter_parameters(spec) / shape.shards,
        **max(computing, gathering, key=lambda parts: sum(parts.values())),
    }


def update_peak(parts: dict[str, float]) -> float:
    """Return what a GPU must have for an update: the sum of the parts, fragmentation, and CUDA's context."""
    still = parts["weights"] + parts["adapters and optimizer"]
    return still + FRAGMENTATION * (sum(parts.values()) - still) + CONTEXT_BYTES


def slot_bytes(model: ModelSpec, spec: AdapterSpec, tp: int, dtype_bytes: int = 2) -> float:
    """Return the bytes of one adapter slot on each of `tp` GPUs.

    A layer that splits its output over the GPUs (q, k, v, gate, up) splits B; one that splits its input (o, down)
    splits A. SGLang keeps A of q, k and v, and of gate and up, apart also where the model has them fused.
    """
    total = 0.0
    for path in spec.module_paths:
        name = path.rpartition(".")[2]
        a_rows, a_columns = spec.shapes[f"base_model.model.{path}.lora_A.weight"]
        b_rows, b_columns = spec.shapes[f"base_model.model.{path}.lora_B.weight"]
        copies = {"qkv_proj": 3, "gate_up_proj": 2}.get(name, 1)
        splits_input = name in ("o_proj", "down_proj")
        total += copies * a_rows * a_columns / (tp if splits_input else 1) + b_rows * b_columns / (
            1 if splits_input else tp
        )
    return total * dtype_bytes


def kv_bytes_per_token(model: ModelSpec, tp: int, dtype_bytes: int = 2) -> float:
    """Return the bytes of one token in the KV cache on each of `tp` GPUs. Fewer heads than GPUs are held twice."""
    heads = model.num_key_value_heads / min(tp, model.num_key_value_heads)
    return 2 * model.num_layers * heads * model.head_dim * dtype_bytes


def engine_reserve(tp: int, gpu_memory: float) -> float:
    """Return the bytes that SGLang leaves free for activations and CUDA graphs where the share is its own choice.

    It computes fewer tokens of a prompt at once on a smaller GPU.
    """
    chunked_prefill = 2048 if gpu_memory < 35 * GIB else 4096 if gpu_memory < 60 * GIB else 8192
    return max(10.0, 0.5 + 1.5 * chunked_prefill / 1024 + tp / 8) * GIB


def _mlp_width(model: ModelSpec) -> int:
    names = ("down_proj", "c_proj", "fc2", "w2")
    widths = [linear.in_features for linear in model.linears if linear.name in names and "lm_head" not in linear.path]
    return max(widths, default=4 * model.hidden_size)


def _expert_width(model: ModelSpec) -> int:
    """Return the inner width of an expert: one gate_up matrix is twice as tall as its down matrix is wide."""
    sizes = {size for weights in model.experts for size in weights.shape[1:]} - {model.hidden_size}
    return min(sizes) if sizes else model.hidden_size
