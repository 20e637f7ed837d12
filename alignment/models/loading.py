"""The base model, frozen, as it lies on disk."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(device: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_base(path: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Causal attention without a mask is what SDPA has its fast kernels for, on both kinds of device.

    Raises ValueError for a model that we would compute wrongly.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    model = model.requires_grad_(False).eval().to(device)
    _check_layout(model)
    return model


@torch.no_grad()
def _check_layout(model: PreTrainedModel) -> None:
    """A list of layers, and logits that are the head's own: some models scale or cap them afterwards."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(head, nn.Linear):
        raise ValueError(f"{name} is not laid out as Llama and Qwen are.")
    ids_BT = torch.arange(min(8, head.out_features), device=model.device)[None]
    wanted = model(input_ids=ids_BT, use_cache=False).logits.float()
    logits = head(decoder(input_ids=ids_BT, use_cache=False).last_hidden_state).float()
    if (logits - wanted).abs().max() > 4 * torch.finfo(model.dtype).eps * wanted.abs().max():
        raise ValueError(f"The logits of {name} are not those of its head.")
