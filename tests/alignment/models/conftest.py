"""Fixtures: rows of random tokens, and policies with random weights in every role."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.base_model import ModelInputs
from alignment.models.policy_model import PolicyModel
from tests.alignment.models.policy_model_ranks import LOGITS_CHUNK, LORA, draw_inputs, randomize_roles

CPU = torch.device("cpu")
Build = Callable[..., PolicyModel]


@pytest.fixture
def inputs() -> ModelInputs:
    return draw_inputs(range(5))


@pytest.fixture
def build(base_model: Path) -> Build:
    """Return a factory of policies with all roles that their kind supports, each with random weights."""

    def build_policy(lora: LoRAConfig | None = LORA, **fields: object) -> PolicyModel:
        config = TrainerConfig.model_validate({"lora": lora, "logits_chunk": LOGITS_CHUNK, "device": "cpu", **fields})
        policy = PolicyModel(base_model, config, CPU, critic=True)
        randomize_roles(policy)
        return policy

    return build_policy
