"""Which version spoke? A reply's log-probs, computed again under the version it claims."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from alignment.artifacts import ADAPTER
from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.data.micro_batches import Scored
from alignment.models import lora as model_lora
from alignment.models.loading import pick_device
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score_alone
from alignment.types import Sample


def recompute_logprobs(
    base_model: Path,
    version: Path | None,
    samples: Sequence[Sample],
    *,
    dtype: str = "float32",
    device: str = "auto",
    microbatch_tokens: int = 2048,
) -> list[npt.NDArray[np.float32]]:
    """One log-prob per output token of every sample, at its own temperature.

    `version` is the directory of an adapter, or of full weights; None is the base model.
    """
    adapted = version is not None and (version / ADAPTER).exists()
    if version is not None and not adapted:
        base_model = version  # full weights are a model themselves
    lora = model_lora.read_config(version) if version is not None and adapted else LoRAConfig()
    fields = {"lora": lora, "dtype": dtype, "device": device}
    config = TrainerConfig.model_validate(fields)
    policy = PolicyModel(base_model, config, pick_device(device))  # a new adapter changes nothing
    if version is not None and adapted:
        policy.wear(load_file(version / ADAPTER))
    logprobs = score_alone(policy, [Scored.of(sample) for sample in samples], budget=microbatch_tokens)
    rows = zip(logprobs.cpu().numpy(), samples, strict=True)
    return [row[: len(sample.output_ids)] for row, sample in rows]
