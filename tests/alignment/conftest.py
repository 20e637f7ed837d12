"""Fixtures: a base model with two layers, width 64, byte vocabulary and random weights; a trainer config; batches."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.trainer import LoRAConfig, OptimConfig, TrainerConfig
from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Batch, Sample

VOCABULARY = 256


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.15,  # large enough for log-probs to differ
        bos_token_id=None,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture
def config() -> TrainerConfig:
    return TrainerConfig(
        algorithm=PPOConfig(epochs=2, minibatches=2),
        lora=LoRAConfig(r=4, alpha=8),
        optim=OptimConfig(lr=1e-3),
        micro_batch_tokens=64,
        seed=7,
        device="cpu",
    )


@pytest.fixture
def draw(base_model: Path) -> Callable[..., Batch]:
    """Return a factory of batches of random turns with a version's log-probs; outputs with token 7 are rewarded."""

    def draw_batch(
        count: int, seed: int = 0, adapter: Path | None = None, temperature: float = 1.0, per_prompt: int = 1
    ) -> Batch:
        random = np.random.default_rng(seed)

        def ids(low: int, high: int) -> tuple[int, ...]:
            return tuple(int(i) for i in random.integers(1, VOCABULARY, size=random.integers(low, high)))

        drafts, prompt = [], tuple[int, ...]()
        for index in range(count):
            output = (7, *ids(2, 12)) if index % 2 else (9, *ids(2, 12))
            prompt = prompt if index % per_prompt else ids(3, 9)
            drafts.append(
                Sample(
                    turn_id=f"turn-{index}",
                    prompt_ids=prompt,
                    output_ids=output,
                    logprobs=(0.0,) * len(output),
                    reward=1.0 if index % 2 else -1.0,
                    version=0,
                    temperature=temperature,
                )
            )
        scored = recompute_logprobs(base_model, adapter, drafts, device="cpu")
        return Batch(
            id=f"batch-{seed}",
            policy="shop",
            samples=tuple(
                Sample(
                    turn_id=draft.turn_id,
                    prompt_ids=draft.prompt_ids,
                    output_ids=draft.output_ids,
                    logprobs=tuple(float(p) for p in logprobs),
                    reward=draft.reward,
                    version=draft.version,
                    temperature=draft.temperature,
                )
                for draft, logprobs in zip(drafts, scored, strict=True)
            ),
        )

    return draw_batch
