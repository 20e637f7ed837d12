"""Train the demo's tokenizer and model from scratch, on the CPU, in minutes: `python -m demo.train`."""

import json
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import torch
import typer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import Dialogue, dialogue
from demo.model_card import write_model_card

MODEL = Path(__file__).with_name("model")
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
VOCABULARY = 1536
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 2048
BATCH_TOKENS = 2048
ROUND_UP = 32
MUON_LR, ADAM_LR, WARMUP = 5e-3, 2e-3, 50
FACT_WEIGHT = 4.0  # a wrong price makes a reply wrong, a different wording does not

Example = tuple[list[int], list[float]]  # token ids, and the loss weight of each


def train(
    dialogues: int = 12_000,
    seed: int = 0,
    out: Path = MODEL,
    measure: bool = True,
    bfloat16: bool = torch.backends.cpu.get_cpu_capability() == "AVX512",
) -> None:
    """Train the demo model and write it. With `measure` also write its model card, which takes minutes.

    With `bfloat16` products are in that data type: processors without AVX-512 are several times faster in float32.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    started = time.monotonic()
    chats = [dialogue(number) for number in range(dialogues)]
    tokenizer = train_tokenizer(render(tokenizer=None, chat=chat) for chat in chats[:5_000])
    batches = list(make_batches([make_example(tokenizer, chat) for chat in chats], Random(seed)))
    model = new_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{dialogues} dialogues in {len(batches)} batches, {parameters / 1e6:.2f} M parameters", flush=True)
    fit(model, batches, bfloat16=bfloat16)
    save(model, tokenizer, out)
    minutes = (time.monotonic() - started) / 60
    print(f"trained in {minutes:.1f} minutes", flush=True)
    if measure:
        precision = "--bfloat16" if bfloat16 else "--no-bfloat16"
        write_model_card(out, f"python -m demo.train --dialogues {dialogues} --seed {seed} {precision}", minutes)


def render(tokenizer: Qwen2Tokenizer | None, chat: Dialogue) -> str:
    """Return the chat as the model sees it or, without a tokenizer, as plain roles and contents."""
    if tokenizer is None:
        return "\n".join(f"{message['role']}\n{message['content']}" for message in chat.messages)
    return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Train a byte-level BPE of the dialogues, with Qwen2.5's special tokens."""
    # Loaders of Qwen2 models use the pre-tokenizer of Qwen2, so the merges are learned from its words.
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen2.normalizer, qwen2.pre_tokenizer, qwen2.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,  # minus the two tokens added below
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=None,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    # Not special tokens, so that decoding keeps them: the engine's tool parser reads them in the text.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


def make_example(tokenizer: Qwen2Tokenizer, chat: Dialogue) -> Example:
    """Tokenize a chat. Only the assistant's tokens, including the end token, have weight; tokens of facts have more."""
    text = render(tokenizer, chat)
    facts = "|".join(re.escape(fact) for turn in chat.turns for fact in turn.question.facts)
    fact_pattern = re.compile(rf"(?=(?P<first>\s*(?:\d|[^\W\d]+)))[^.!?]*\b(?:{facts})\b[^.!?]*", re.IGNORECASE)
    weights = [0.0] * len(text)
    for reply in re.finditer(rf"{re.escape(START)}assistant\n(.*?{re.escape(END)})", text, re.DOTALL):
        start, end = reply.span(1)
        weights[start:end] = [1.0] * (end - start)
        for sentence in fact_pattern.finditer(text, start, end):
            # Not from the first word on: the weight would make it more likely that a fact is stated at all.
            begin = sentence.end("first")
            weights[begin : sentence.end()] = [FACT_WEIGHT] * (sentence.end() - begin)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [weights[end - 1] for _, end in encoded["offset_mapping"]]


def make_batches(examples: list[Example], rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of about BATCH_TOKENS tokens, of chats of similar length, in random order.

    Lengths are rounded up to a multiple of ROUND_UP: kernels are prepared for each shape, so there must be few.
    """
    buckets: dict[int, list[Example]] = defaultdict(list)
    for ids, weights in examples:
        length = -(-len(ids) // ROUND_UP) * ROUND_UP
        padding = length - len(ids)
        buckets[length].append((ids + [0] * padding, weights + [0.0] * padding))
    groups = []
    for length, bucket in buckets.items():
        rng.shuffle(bucket)
        rows = max(1, BATCH_TOKENS // length)
        groups += [bucket[start : start + rows] for start in range(0, len(bucket), rows)]
    rng.shuffle(groups)
    for group in groups:
        yield torch.tensor([ids for ids, _ in group]), torch.tensor([weights for _, weights in group])


def new_model(
    tokenizer: Qwen2Tokenizer, *, width: int = 192, mlp_width: int = 512, num_layers: int = 4, num_heads: int = 3
) -> Qwen2ForCausalLM:
    """Return a model of the demo's architecture with random weights, by default in the demo model's shape."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=num_layers,
            intermediate_size=mlp_width,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            bos_token_id=None,
            pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        )
    )


def fit(model: Qwen2ForCausalLM, batches: list[tuple[Tensor, Tensor]], *, bfloat16: bool) -> None:
    """Train for one pass over the batches, with products in bfloat16 or in float32."""
    # Muon on the layers' matrices needs far fewer chats to learn the facts than AdamW alone.
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or ".layers." not in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True),
    ]

    def lr_factor(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP) * max(0.02, 1.0 - step / len(batches))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor) for optimizer in optimizers]
    started, smoothed_loss = time.monotonic(), 0.0
    for step, (ids_BT, weights_BT) in enumerate(batches, start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            # Padding is at the end and attention is causal, so no mask is needed.
            logits_BTV = model(input_ids=ids_BT).logits
        # The logits at a position predict the next token.
        losses_N = cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none")
        weights_N = weights_BT[:, 1:].flatten()
        loss = (losses_N * weights_N).sum() / weights_N.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        smoothed_loss = loss.item() if step == 1 else 0.95 * smoothed_loss + 0.05 * loss.item()
        if step % 50 == 0:
            left = (time.monotonic() - started) / step * (len(batches) - step)
            print(f"step {step}/{len(batches)}  loss {smoothed_loss:.3f}  {left:.0f} s left", flush=True)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Save in the layout of Hugging Face, with weights in bfloat16."""
    shutil.rmtree(out, ignore_errors=True)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=True, temperature=1.0
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(train)
