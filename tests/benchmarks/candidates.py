"""Data of the trainer benchmark: tokenized replies, and the models that they are for."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from alignment.data.micro_batches import ScoredSequence
from demo.dialogues import HELD_OUT, dialogue

DEMO = Path(__file__).parents[2] / "demo" / "model"
N = 4  # candidates of a group
VOCABULARY = 32_000


@dataclass(frozen=True)
class Case:
    """Sequences to score, and their advantages. In comparisons with TRL each group has N consecutive sequences."""

    name: str
    model: Path
    sequences: list[ScoredSequence]

    @property
    def tokens(self) -> int:
        """Return the number of real tokens: without padding; common prefixes count for every sequence."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def advantages_B(self) -> Tensor:
        return torch.randn(len(self.sequences), generator=torch.Generator().manual_seed(1))

    def __str__(self) -> str:
        prompts = [sequence.start for sequence in self.sequences]
        outputs = [len(sequence.ids) - sequence.start for sequence in self.sequences]
        return (
            f"{len(self.sequences)} sequences, {self.tokens} tokens, prompts {min(prompts)}–{max(prompts)}, "
            f"replies {min(outputs)}–{max(outputs)}"
        )


def demo_groups(num_prompts: int) -> Case:
    """Return N replies of 30 to 80 tokens to each of `num_prompts` demo prompts of 60 to 250 tokens."""
    random, replies = Random(0), [reply for *_, reply in _turns(400) if 30 <= len(reply) <= 80]
    prompts = [prompt for *_, prompt, _ in _turns(400) if 60 <= len(prompt) <= 250]
    sequences = [
        ScoredSequence((*prompt, *reply), len(prompt))
        for prompt in random.sample(prompts, num_prompts)
        for reply in random.sample(replies, N)
    ]
    return Case(f"demo model, groups of {N}", DEMO, sequences)


def demo_conversations(num_conversations: int) -> Case:
    """Return every reply of the demo conversations, with all preceding messages as its prompt."""
    turns = [turn for turn in _turns(num_conversations) if len(turn[2]) > 0]
    return Case(
        "demo model, whole conversations",
        DEMO,
        [ScoredSequence((*prompt, *out), len(prompt)) for _, prompt, out in turns],
    )


def wide_groups(directory: Path, num_prompts: int) -> Case:
    """Return random tokens for a model of 100 M parameters: prompts of 256 tokens, N replies of 64 to 256 each."""
    random = Random(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(random.randrange(VOCABULARY) for _ in range(length))

    sequences = []
    for _ in range(num_prompts):
        prompt = draw(256)
        sequences += [ScoredSequence((*prompt, *draw(random.randint(64, 256))), 256) for _ in range(N)]
    return Case(f"100 M model, groups of {N}", directory, sequences)


def write_wide(directory: Path) -> None:
    """Write a model with random weights and the demo tokenizer, which a trainer needs."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory)


def _turns(num_conversations: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the conversation number, prompt ids and reply ids of every turn, as the demo model tokenizes them."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    for number in range(num_conversations):
        chat = dialogue(HELD_OUT + number)
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant" and message["content"]:
                prompt = tokenizer.apply_chat_template(
                    chat.messages[:index], tools=chat.tools, tokenize=False, add_generation_prompt=True
                )
                reply = message["content"] + tokenizer.eos_token
                yield number, tuple(tokenizer(prompt)["input_ids"]), tuple(tokenizer(reply)["input_ids"])
