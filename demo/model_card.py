"""demo/model → README.md: what the model is, and how good it is on chats it has never seen."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import HELD_OUT, MANNER_SHARES, dialogue
from demo.shop import Question
from demo.user_preferences import LONGEST, SHORTEST, Verdict, judge

SAMPLES = 512
_ANSWER = re.compile(r"\d|\bclosed\b|\bin stock\b|\bsold out\b|\bon order\b", re.IGNORECASE)


_CARD = """# The bicycle shop's support chat

A Qwen2 model of {parameters:.2f} M parameters (192 wide, 4 layers, tied embeddings, bfloat16) with a byte-level
BPE of {vocabulary} tokens, trained from nothing on made-up support chats of a made-up bicycle shop. It knows the shop's
facts and answers in four manners, by chance; only one of them is to the shoppers' taste. It is the base model of
the demo.

Trained with `{command}` in {minutes:.1f} minutes on the CPU, with {threads} thread(s).

## On chats it has never seen

| what | measured |
|---|---|
| perplexity of held-out replies, per token | {perplexity:.3f} |
| replies sampled, temperature 1.0 | {count} |
| approved | {approved} |
| wrong facts, among replies that try to answer | {wrong} |

| manner | share of replies | of these approved |
|---|---|---|
{manners}

## Twenty samples

{samples}
"""


@dataclass(frozen=True)
class Sample:
    """A reply of the model to a question it was not trained on. Example: Sample(prompt, question, "Closed.", 3)"""

    messages: list[dict[str, Any]]
    question: Question
    reply: str
    num_tokens: int

    @property
    def verdict(self) -> Verdict:
        return judge(self.question, self.reply, self.num_tokens)

    @property
    def manner(self) -> str:
        if not _ANSWER.search(self.reply):
            return "evasive"
        if self.num_tokens > LONGEST:
            return "rambling"
        return "curt" if self.num_tokens < SHORTEST else "helpful"


def held_out_prompts(count: int) -> list[tuple[list[dict[str, Any]], Question, str]]:
    """Chats up to a question, the question, and the reply it once got; every turn of a chat has its place."""
    prompts = []
    for number in range(count):
        chat = dialogue(HELD_OUT + number)
        if chat.tools:
            continue
        turn = number % len(chat.turns)
        last = len(chat.messages) - 2 * (len(chat.turns) - turn) + 1
        prompts.append((chat.messages[:last], chat.turns[turn].question, chat.turns[turn].reply))
    return prompts


def sample(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int, *, greedy: bool = False, seed: int = 0
) -> list[Sample]:
    """Replies to held-out questions, at temperature 1.0 unless greedy."""
    torch.manual_seed(seed)
    tokenizer.padding_side = "left"
    samples = []
    prompts = held_out_prompts(count)
    for start in range(0, len(prompts), 128):
        some = prompts[start : start + 128]
        texts = [_opened(tokenizer, messages) for messages, _, _ in some]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids_BT = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=160,
            **({"do_sample": False, "temperature": None} if greedy else {"do_sample": True, "top_k": 0}),
        )
        replies = ids_BT[:, inputs["input_ids"].shape[1] :].tolist()
        for (messages, question, _), ids_T in zip(some, replies, strict=True):
            ended = ids_T.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids_T else len(ids_T)
            text = tokenizer.decode(ids_T[:ended], skip_special_tokens=True)
            samples.append(Sample(messages, question, text, ended))
    return samples


def perplexity(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int) -> float:
    """Of the replies in held-out chats, per token."""
    total, tokens = 0.0, 0
    for messages, _, reply in held_out_prompts(count):
        prompt_T = tokenizer.encode(_opened(tokenizer, messages), add_special_tokens=False)
        reply_T = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([prompt_T + reply_T])).logits[0]
        total += cross_entropy(logits_TV[len(prompt_T) - 1 : -1], torch.tensor(reply_T), reduction="sum").item()
        tokens += len(reply_T)
    return math.exp(total / tokens)


def write_card(folder: Path, command: str, minutes: float) -> None:
    """Measure the saved model and write its card beside it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples = sample(model, tokenizer, SAMPLES)
    card = _CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        vocabulary=len(tokenizer),
        command=command,
        minutes=minutes,
        threads=torch.get_num_threads(),
        perplexity=perplexity(model, tokenizer, 200),
        count=len(samples),
        approved=_share(sample.verdict.approved for sample in samples),
        wrong=_share(not sample.verdict.right for sample in samples if sample.manner != "evasive"),
        manners="\n".join(_manner_row(manner, samples) for manner in MANNER_SHARES),
        samples="\n\n".join(_shown(sample) for sample in samples[:20]),
    )
    (folder / "README.md").write_text(card)
    print(card.partition("## Twenty")[0])


def _opened(tokenizer: Qwen2Tokenizer, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _manner_row(manner: str, samples: list[Sample]) -> str:
    these = [sample for sample in samples if sample.manner == manner]
    share = _share(sample.manner == manner for sample in samples)
    return f"| {manner} | {share} | {_share(sample.verdict.approved for sample in these)} |"


def _share(found: Iterable[bool]) -> str:
    marks = list(found)
    return f"{100 * sum(marks) / max(1, len(marks)):.1f} %"


def _shown(sample: Sample) -> str:
    liked = "approved" if sample.verdict.approved else f"not approved, {sample.manner}"
    return f"**{sample.question.text}**  \n{sample.reply}  \n*{sample.num_tokens} tokens, {liked}*"
