"""Learning without the service: the demo model, its simulated users and an algorithm, in one process."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2Tokenizer

from alignment.artifacts import ADAPTER
from alignment.config.algorithm import GRPOConfig, PPOConfig
from alignment.config.trainer import CriticConfig, OptimConfig, TrainerConfig
from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.types import Sample
from demo.offline.chats import Chat, ChatPool
from demo.offline.experiment import Experiment, ExperimentConfig
from demo.offline.sampler import Sampler
from demo.tokenizer import END
from demo.train import MODEL
from tests.support.adapters import make_adapter


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(MODEL)


def order(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_the_sampler_records_is_what_the_trainer_computes(
    sampler: Sampler, tokenizer: Qwen2Tokenizer, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "v1", MODEL)
    sampler.load_adapter(load_file(tmp_path / "v1" / ADAPTER))
    crowd = ChatPool(tokenizer, 12, seed=0)
    crowd.add_replies(
        [replies[0] for replies in sampler.sample([asked.prompt_ids for asked in crowd.prompts()], order())]
    )
    asked = crowd.prompts()  # of all lengths: first questions and second ones
    drawn = sampler.sample([each.prompt_ids for each in asked], order(), count=2)
    sampler.load_adapter({})
    samples = [
        Sample(f"{each.conversation}-{number}", each.prompt_ids, reply.ids, reply.logprobs, reward=0.0, version=1)
        for each, replies in zip(asked, drawn, strict=True)
        for number, reply in enumerate(replies)
    ]
    assert len({len(sample.prompt_ids) for sample in samples}) > 6
    again = recompute_logprobs(MODEL, tmp_path / "v1", samples)
    assert max(np.abs(a - s.logprobs).max() for a, s in zip(again, samples, strict=True)) < 1e-4
    base = recompute_logprobs(MODEL, None, samples)
    assert max(np.abs(b - s.logprobs).max() for b, s in zip(base, samples, strict=True)) > 0.01


def test_the_same_seed_draws_the_same_and_a_reply_ends_once(sampler: Sampler, tokenizer: Qwen2Tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids(END)
    prompts = [asked.prompt_ids for asked in ChatPool(tokenizer, 8, seed=1).prompts()]
    drawn = sampler.sample(prompts, order(), count=3, max_tokens=40)
    assert drawn == sampler.sample(prompts, order(), count=3, max_tokens=40)
    assert drawn != sampler.sample(prompts, order(1), count=3, max_tokens=40)
    replies = [reply for candidates in drawn for reply in candidates]
    assert len(replies) == 24
    cut = [reply for reply in replies if reply.ids[-1] != end]
    assert 0 < len(cut) < len(replies) and all(len(reply.ids) == 40 for reply in cut)
    assert all(end not in reply.ids[:-1] for reply in replies)


def test_a_chat_goes_on_from_the_tokens_that_were_said(sampler: Sampler, tokenizer: Qwen2Tokenizer) -> None:
    chat = Chat(tokenizer, seed=3_000_004)
    messages, first = [], chat.prompt
    if "system" in (opened := tokenizer.decode(first.prompt_ids)):
        messages.append({"role": "system", "content": opened.partition("system\n")[2].partition(END)[0]})
    while True:
        messages.append({"role": "user", "content": chat.prompt.question.text})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(chat.prompt.prompt_ids) == rendered
        if chat.is_last_turn:
            break
        ((reply,),) = sampler.sample([chat.prompt.prompt_ids], order())
        before = chat.prompt.prompt_ids + reply.ids
        messages.append({"role": "assistant", "content": tokenizer.decode(reply.ids, skip_special_tokens=True)})
        chat.add_reply(reply)
        assert chat.prompt.prompt_ids[: len(before)] == before
    assert chat.prompt.turn > 0


@pytest.mark.journey
@pytest.mark.parametrize(
    ("algorithm", "lr", "candidates", "replies"),
    [
        pytest.param(PPOConfig(estimator="gae", kl_coef=0.02), 3e-3, 1, 40, marks=pytest.mark.slow),
        (GRPOConfig(kl_coef=0.02), 2e-3, 4, 64),
    ],
    ids=["PPO with a critic", "GRPO"],
)
def test_approval_rises(algorithm: PPOConfig | GRPOConfig, lr: float, candidates: int, replies: int) -> None:
    config = TrainerConfig(algorithm=algorithm, optim=OptimConfig(lr=lr), critic=CriticConfig(lr=2e-3))
    study = Experiment(MODEL, ExperimentConfig(config, replies_per_prompt=candidates, replies_per_update=replies))
    rounds = [study.run_update() for _ in range(6)]
    assert [(done.behavior_version, done.version, done.samples) for done in rounds] == [
        (v, v + 1, replies) for v in range(6)
    ]
    first = fmean(done.approval for done in rounds[:2])
    last = study.evaluate(num_users=24)
    # Of at least 80 replies and 64: with 35 % of all liked, 0.25 is over three deviations, luck of one run in 1,000.
    assert last.approval > first + 0.25, [done.approval for done in rounds]
    assert 0 < last.kl < 0.5
