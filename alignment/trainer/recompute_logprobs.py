"""Recompute the log-probs of replies under the version that is said to have generated them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from alignment.artifacts import ADAPTER
from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.models import lora as model_lora
from alignment.models.loading import pick_device
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score_sequences
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
    """Return one log-prob per output token of every sample, in nats, at the sample's temperature.

    `version` is the directory of an adapter or of full weights; None is the base model.
    """
    has_adapter = version is not None and (version / ADAPTER).exists()
    if version is not None and not has_adapter:
        base_model = version  # a version of full weights is a model of its own
    lora = model_lora.read_config(version) if version is not None and has_adapter else LoRAConfig()
    fields = {"lora": lora, "dtype": dtype, "device": device}
    config = TrainerConfig.model_validate(fields)
    policy = PolicyModel(base_model, config, pick_device(device))  # an untrained adapter changes nothing
    if version is not None and has_adapter:
        policy.load_adapter(load_file(version / ADAPTER))
    sequences = [ScoredSequence.from_sample(sample) for sample in samples]
    logprobs_BT = score_sequences(policy, sequences, max_tokens=microbatch_tokens)
    rows = zip(logprobs_BT.cpu().numpy(), samples, strict=True)
    return [row[: len(sample.output_ids)] for row, sample in rows]
