"""A few rows of random tokens, and policies whose every hat has something to say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.policy_model import PolicyModel, Rows
from tests.alignment.models.policy_model_ranks import LOGITS_CHUNK, LORA, draw_rows, dress

CPU = torch.device("cpu")
Build = Callable[..., PolicyModel]


@pytest.fixture
def rows() -> Rows:
    return draw_rows(range(5))


@pytest.fixture
def build(base_model: Path) -> Build:
    """A policy with all hats that its kind can have, each with weights of its own."""

    def build_policy(lora: LoRAConfig | None = LORA, **fields: object) -> PolicyModel:
        config = TrainerConfig.model_validate({"lora": lora, "logits_chunk": LOGITS_CHUNK, "device": "cpu", **fields})
        policy = PolicyModel(base_model, config, CPU, critic=True, anchor=lora is not None)
        dress(policy)
        return policy

    return build_policy
