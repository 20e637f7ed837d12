"""The probe of a base model: random tokens, scored without an adapter and with a random one.

Engine and trainer must agree on it before anything is trained. A trained adapter is near zero at first, so that an
engine that attaches it to half of the layers would hardly differ; a random one is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import ADAPTER, AdapterSpec
from alignment.models import lora

NUM_SEQUENCES = 2
MIN_TOKENS = 96
BEYOND_WINDOW = 32  # tokens by which the sequences are longer than the shortest window of the model's attention
MAX_TOKENS = 8192
SEED = 20
B_BOUND = 0.05  # B is uniform within ±B_BOUND: the adapter's output is about a tenth of its layer's


@dataclass(frozen=True)
class BaseProbe:
    """Token ids, and the trainer's log-probs (nats) of each token but the first, without and with the adapter in
    `directory`."""

    ids: tuple[tuple[int, ...], ...]
    base_logprobs: tuple[tuple[float, ...], ...]
    adapter_logprobs: tuple[tuple[float, ...], ...]
    directory: Path


def random_sequences(model: ModelSpec, context_length: int | None) -> tuple[tuple[int, ...], ...]:
    """Return sequences that are longer than the shortest attention window, if the context allows."""
    windows = [window for window in model.windows if window is not None]
    limits = (MAX_TOKENS, context_length, model.max_position_embeddings)
    wanted = max(MIN_TOKENS, min(windows) + BEYOND_WINDOW if windows else 0)
    # The engine's context includes a token that is generated.
    length = max(2, min(wanted, *(limit - 1 for limit in limits if limit is not None)))
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.vocab_size, (NUM_SEQUENCES, length), generator=generator)
    return tuple(tuple(row) for row in ids.tolist())


def random_adapter(spec: AdapterSpec) -> dict[str, Tensor]:
    """Return an adapter that changes every layer that has one, the same on every rank. Float32, on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = lora.init_adapter(spec.shapes, SEED)
    for name in sorted(tensors):
        if name.endswith("lora_B.weight"):
            tensors[name].uniform_(-B_BOUND, B_BOUND, generator=generator)
    return tensors


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], spec: AdapterSpec, base_model: Path) -> None:
    """Write an adapter that an engine can load into an empty directory."""
    save_file(dict(tensors), directory / ADAPTER)
    lora.write_config(directory, spec, base_model)
