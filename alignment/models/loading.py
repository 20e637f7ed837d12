"""Load the base model from disk, frozen."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


@torch.no_grad()
def _check_architecture(model: PreTrainedModel) -> None:
    """Check that the decoder has a list of layers and that its logits are the linear head's output.

    Some models scale or cap the logits after the head. Raises ValueError.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(head, nn.Linear):
        raise ValueError(
            f"{name} is not supported: its decoder must have a list of layers and its head must be linear, "
            "as in Llama and Qwen."
        )
    input_ids_BT = torch.arange(min(8, head.out_features), device=model.device)[None]
    expected = model(input_ids=input_ids_BT, use_cache=False).logits.float()
    logits = head(decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state).float()
    if (logits - expected).abs().max() > 4 * torch.finfo(model.dtype).eps * expected.abs().max():
        raise ValueError(f"{name} is not supported: its logits are not those of its head; it scales or caps them.")
