"""Which version spoke? A reply's log-probs, computed again under the version it claims."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from alignment.config import LoRAConfig
from alignment.manifest import ADAPTER
from alignment.model import adapter
from alignment.model.load import pick_device
from alignment.model.policy import PolicyModel
from alignment.samples import Sample
from alignment.trainer.logprobs import score_all
from alignment.trainer.packing import Scored


def recompute_logprobs(
    base_model: Path,
    adapter_directory: Path | None,
    samples: Sequence[Sample],
    *,
    dtype: str = "float32",
    device: str = "auto",
    microbatch_tokens: int = 2048,
) -> list[npt.NDArray[np.float32]]:
    """One log-prob per output token of every sample, at its own temperature. None is the base model."""
    lora = LoRAConfig() if adapter_directory is None else adapter.read_config(adapter_directory)
    policy = PolicyModel(base_model, lora, dtype, pick_device(device))  # a new adapter changes nothing
    if adapter_directory is not None:
        policy.wear(load_file(adapter_directory / ADAPTER))
    logprobs = score_all(policy, [Scored.of(sample) for sample in samples], budget=microbatch_tokens)
    rows = zip(logprobs.cpu().numpy(), samples, strict=True)
    return [row[: len(sample.output_ids)] for row, sample in rows]
