"""Learning without the service: the demo model, its simulated users and an algorithm, in one process."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2Tokenizer

from alignment.artifacts.specs import ADAPTER
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.trainer import CriticConfig, OptimConfig, TrainerConfig
from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Sample
from demo.train import END, MODEL
from tests.support.adapters import make_adapter
from tests.support.offline.chats import Chat, ChatPool
from tests.support.offline.experiment import Experiment, ExperimentConfig
from tests.support.offline.sampler import Sampler


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(MODEL)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sampler_and_trainer_compute_the_same_logprobs(
    sampler: Sampler, tokenizer: Qwen2Tokenizer, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "v1", MODEL)
    sampler.load_adapter(load_file(tmp_path / "v1" / ADAPTER))
    chats = ChatPool(tokenizer, 12, seed=0)
    chats.add_replies(
        [replies[0] for replies in sampler.sample([prompt.prompt_ids for prompt in chats.prompts()], generator())]
    )
    prompts = chats.prompts()  # of all lengths: first questions and second ones
    sampled = sampler.sample([prompt.prompt_ids for prompt in prompts], generator(), count=2)
    sampler.load_adapter({})
    samples = [
        Sample(f"{prompt.conversation}-{number}", prompt.prompt_ids, reply.ids, reply.logprobs, reward=0.0, version=1)
        for prompt, replies in zip(prompts, sampled, strict=True)
        for number, reply in enumerate(replies)
    ]
    assert len({len(sample.prompt_ids) for sample in samples}) > 6
    recomputed = recompute_logprobs(MODEL, tmp_path / "v1", samples)
    assert max(np.abs(a - s.logprobs).max() for a, s in zip(recomputed, samples, strict=True)) < 1e-4
    base = recompute_logprobs(MODEL, None, samples)
    assert max(np.abs(b - s.logprobs).max() for b, s in zip(base, samples, strict=True)) > 0.01


def test_sampling_is_seeded_and_a_reply_has_one_end_token(sampler: Sampler, tokenizer: Qwen2Tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids(END)
    prompts = [prompt.prompt_ids for prompt in ChatPool(tokenizer, 8, seed=1).prompts()]
    sampled = sampler.sample(prompts, generator(), count=3, max_tokens=40)
    assert sampled == sampler.sample(prompts, generator(), count=3, max_tokens=40)
    assert sampled != sampler.sample(prompts, generator(1), count=3, max_tokens=40)
    replies = [reply for candidates in sampled for reply in candidates]
    assert len(replies) == 24
    cut = [reply for reply in replies if reply.ids[-1] != end]
    assert 0 < len(cut) < len(replies) and all(len(reply.ids) == 40 for reply in cut)
    assert all(end not in reply.ids[:-1] for reply in replies)


def test_a_chat_continues_from_the_recorded_tokens(sampler: Sampler, tokenizer: Qwen2Tokenizer) -> None:
    chat = Chat(tokenizer, seed=3_000_004)
    messages, first = [], chat.prompt
    if "system" in (first_text := tokenizer.decode(first.prompt_ids)):
        messages.append({"role": "system", "content": first_text.partition("system\n")[2].partition(END)[0]})
    while True:
        messages.append({"role": "user", "content": chat.prompt.question.text})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(chat.prompt.prompt_ids) == rendered
        if chat.is_last_turn:
            break
        ((reply,),) = sampler.sample([chat.prompt.prompt_ids], generator())
        before = chat.prompt.prompt_ids + reply.ids
        messages.append({"role": "assistant", "content": tokenizer.decode(reply.ids, skip_special_tokens=True)})
        chat.add_reply(reply)
        assert chat.prompt.prompt_ids[: len(before)] == before
    assert chat.prompt.turn > 0


@pytest.mark.journey
@pytest.mark.slow  # its outcome is one of chance, although it is seeded: another processor rounds otherwise
@pytest.mark.parametrize(
    ("algorithm", "lr", "candidates", "replies"),
    [
        (PPOConfig(estimator="gae", kl_coef=0.02), 3e-3, 1, 40),
        (GRPOConfig(kl_coef=0.02), 2e-3, 4, 64),
    ],
    ids=["PPO with a critic", "GRPO"],
)
def test_approval_rises(algorithm: PPOConfig | GRPOConfig, lr: float, candidates: int, replies: int) -> None:
    config = TrainerConfig(algorithm=algorithm, optim=OptimConfig(lr=lr), critic=CriticConfig(lr=2e-3))
    experiment = Experiment(MODEL, ExperimentConfig(config, replies_per_prompt=candidates, replies_per_update=replies))
    updates = [experiment.run_update() for _ in range(6)]
    assert [(update.behavior_version, update.version, update.samples) for update in updates] == [
        (v, v + 1, replies) for v in range(6)
    ]
    first = fmean(update.approval for update in updates[:2])
    last = experiment.evaluate(num_users=24)
    # Over at least 80 and 64 replies. If 35 % are liked, 0.25 is more than three standard deviations.
    assert last.approval > first + 0.25, [update.approval for update in updates]
    assert 0 < last.kl < 0.5
