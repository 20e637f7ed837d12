"""What the trainer's benchmark learns from: replies in token space, and the models that they are for."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from alignment.data.micro_batches import Scored
from demo.dialogues import HELD_OUT, dialogue

DEMO = Path(__file__).parents[2] / "demo" / "model"
N = 4  # candidates of a group
WORDS = 32_000


@dataclass(frozen=True)
class Case:
    """Sequences to score and what each is worth; where they are compared with TRL, groups of N in a row."""

    name: str
    model: Path
    sequences: list[Scored]

    @property
    def tokens(self) -> int:
        """Real ones: no padding, and what two sequences have in common counts twice."""
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
    """N replies of 30 to 80 tokens to each of the demo's questions, whose prompts have 60 to 250."""
    random, replies = Random(0), [reply for *_, reply in _turns(400) if 30 <= len(reply) <= 80]
    prompts = [prompt for *_, prompt, _ in _turns(400) if 60 <= len(prompt) <= 250]
    sequences = [
        Scored((*prompt, *reply), len(prompt))
        for prompt in random.sample(prompts, num_prompts)
        for reply in random.sample(replies, N)
    ]
    return Case(f"demo model, groups of {N}", DEMO, sequences)


def demo_conversations(num_conversations: int) -> Case:
    """Every reply of the demo's conversations, each with all that was said before as its prompt."""
    turns = [turn for turn in _turns(num_conversations) if len(turn[2]) > 0]
    return Case(
        "demo model, whole conversations", DEMO, [Scored((*prompt, *out), len(prompt)) for _, prompt, out in turns]
    )


def wide_groups(directory: Path, num_prompts: int) -> Case:
    """Random tokens for a model of 100 M parameters: prompts of 256 tokens, N replies of 64 to 256 to each."""
    random = Random(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(random.randrange(WORDS) for _ in range(length))

    sequences = []
    for _ in range(num_prompts):
        prompt = draw(256)
        sequences += [Scored((*prompt, *draw(random.randint(64, 256))), 256) for _ in range(N)]
    return Case(f"100 M model, groups of {N}", directory, sequences)


def write_wide(directory: Path) -> None:
    """Random weights, and the demo's tokenizer, because a learner wants one."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
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
    """Conversation, prompt and reply of every turn, as the demo's model would read and write them."""
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
