"""The base model, frozen, as it lies on disk."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(device: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_base(path: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Causal attention without a mask is what SDPA has its fast kernels for, on both kinds of device."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    return model.requires_grad_(False).eval().to(device)
