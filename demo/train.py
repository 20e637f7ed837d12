"""Dialogues → demo/model: trains the tokenizer and the model from nothing, on the CPU, in minutes.

Run it with `python -m demo.train`.
"""

import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import Dialogue, dialogue
from demo.model_card import write_card
from demo.tokenizer import CONTEXT, END, END_OF_TEXT, START, train_tokenizer

MODEL = Path(__file__).with_name("model")
BATCH_TOKENS = 2048
ROUND_UP = 32
MUON_LR, ADAM_LR, WARMUP = 5e-3, 2e-3, 50
FACT_WEIGHT = 4.0  # a wrong price spoils a reply, another turn of phrase does not

Example = tuple[list[int], list[float]]  # token ids, and how much each is worth learning


def train(dialogues: int = 12_000, seed: int = 0, out: Path = MODEL) -> None:
    """Train the demo model and write it with its card."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    chats = [dialogue(number) for number in range(dialogues)]
    tokenizer = train_tokenizer(render(tokenizer=None, chat=chat) for chat in chats[:5_000])
    batches = list(batch_up([learnable(tokenizer, chat) for chat in chats], Random(seed)))
    model = new_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{dialogues} dialogues in {len(batches)} batches, {parameters / 1e6:.2f} M parameters", flush=True)
    fit(model, batches)
    save(model, tokenizer, out)
    minutes = (time.monotonic() - began) / 60
    print(f"trained in {minutes:.1f} minutes; measuring", flush=True)
    write_card(out, f"python -m demo.train --dialogues {dialogues} --seed {seed}", minutes)


def render(tokenizer: Qwen2Tokenizer | None, chat: Dialogue) -> str:
    """The chat as the model sees it; without a tokenizer, just who says what."""
    if tokenizer is None:
        return "\n".join(f"{message['role']}\n{message['content']}" for message in chat.messages)
    return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))


def learnable(tokenizer: Qwen2Tokenizer, chat: Dialogue) -> Example:
    """Only what the assistant says, its end included, is to be learned; what it states as a fact above all."""
    text = render(tokenizer, chat)
    facts = "|".join(re.escape(fact) for turn in chat.turns for fact in turn.question.facts)
    stated = re.compile(rf"(?=(?P<first>\s*(?:\d|[^\W\d]+)))[^.!?]*\b(?:{facts})\b[^.!?]*", re.IGNORECASE)
    marks = [0.0] * len(text)
    for said in re.finditer(rf"{re.escape(START)}assistant\n(.*?{re.escape(END)})", text, re.DOTALL):
        begin, end = said.span(1)
        marks[begin:end] = [1.0] * (end - begin)
        for sentence in stated.finditer(text, begin, end):
            # Not from the first word on: the weight would make it likelier that a fact is stated at all.
            start = sentence.end("first")
            marks[start : sentence.end()] = [FACT_WEIGHT] * (sentence.end() - start)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [marks[end - 1] for _, end in encoded["offset_mapping"]]


def batch_up(examples: list[Example], rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of BATCH_TOKENS, of chats about as long, in random order.

    Lengths are rounded up, so that there are few shapes: the kernels are prepared anew for each one.
    """
    shelves: dict[int, list[Example]] = defaultdict(list)
    for ids, weights in examples:
        length = -(-len(ids) // ROUND_UP) * ROUND_UP
        short = length - len(ids)
        shelves[length].append((ids + [0] * short, weights + [0.0] * short))
    groups = []
    for length, shelf in shelves.items():
        rng.shuffle(shelf)
        rows = max(1, BATCH_TOKENS // length)
        groups += [shelf[start : start + rows] for start in range(0, len(shelf), rows)]
    rng.shuffle(groups)
    for group in groups:
        yield torch.tensor([ids for ids, _ in group]), torch.tensor([weights for _, weights in group])


def new_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            num_hidden_layers=4,
            intermediate_size=512,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            bos_token_id=None,
            pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        )
    )


def fit(model: Qwen2ForCausalLM, batches: list[tuple[Tensor, Tensor]]) -> None:
    """One pass over the batches, in bfloat16 where it is safe."""
    # Muon on the layers' matrices learns the facts from far fewer chats than AdamW alone.
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or ".layers." not in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True),
    ]

    def pace(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP) * max(0.02, 1.0 - step / len(batches))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, pace) for optimizer in optimizers]
    began, recent = time.monotonic(), 0.0
    for step, (ids_BT, weights_BT) in enumerate(batches, start=1):
        with torch.autocast("cpu", torch.bfloat16):
            # Padding is at the end and never looked at by what comes before it, so no mask is needed.
            logits_BTV = model(input_ids=ids_BT).logits
        # The logit at a position speaks of the next token.
        losses_N = cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none")
        weights_N = weights_BT[:, 1:].flatten()
        loss = (losses_N * weights_N).sum() / weights_N.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        if step % 50 == 0:
            left = (time.monotonic() - began) / step * (len(batches) - step)
            print(f"step {step}/{len(batches)}  loss {recent:.3f}  {left:.0f} s left", flush=True)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Hugging Face layout, weights rounded to bfloat16."""
    shutil.rmtree(out, ignore_errors=True)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=True, temperature=1.0
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(train)
