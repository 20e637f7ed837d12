"""Write the model card of demo/model: what the model is, and its quality on held-out chats."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import HELD_OUT, STYLE_SHARES, dialogue
from demo.shop import Question
from demo.user_preferences import MAX_BRIEF_TOKENS, MIN_BRIEF_TOKENS, Verdict, judge

SAMPLES = 512
_ANSWER_PATTERN = re.compile(r"\d|\bclosed\b|\bin stock\b|\bsold out\b|\bon order\b", re.IGNORECASE)


_TEMPLATE = """# The bicycle shop's support chat

A Qwen2 model of {parameters:.2f} M parameters (192 wide, 4 layers, tied embeddings, bfloat16) with a byte-level
BPE of {vocabulary} tokens, trained from scratch on synthetic support chats of a bicycle shop. It knows the shop's
facts and answers in one of four styles at random; users approve of one of them. It is the base model of
the demo.

Trained with `{command}` in {minutes:.1f} minutes on the CPU, with {threads} thread(s).

## On held-out chats

| what | measured |
|---|---|
| perplexity of held-out replies, per token | {perplexity:.3f} |
| replies sampled, temperature 1.0 | {count} |
| approved | {approved} |
| wrong facts, among replies that answer | {wrong} |

| style | share of replies | of these approved |
|---|---|---|
{styles}

## Twenty samples

{samples}
"""


@dataclass(frozen=True)
class SampledReply:
    """A reply of the model to a held-out question. Example: SampledReply(prompt, question, "Closed.", 3)"""

    messages: list[dict[str, Any]]
    question: Question
    reply: str
    num_tokens: int

    @property
    def verdict(self) -> Verdict:
        return judge(self.question, self.reply, self.num_tokens)

    @property
    def style(self) -> str:
        if not _ANSWER_PATTERN.search(self.reply):
            return "evasive"
        if self.num_tokens > MAX_BRIEF_TOKENS:
            return "rambling"
        return "curt" if self.num_tokens < MIN_BRIEF_TOKENS else "helpful"


def held_out_prompts(count: int) -> list[tuple[list[dict[str, Any]], Question, str]]:
    """Return (messages up to a question, the question, the reply in the dialogue), from the first to the last turn."""
    prompts = []
    for number in range(count):
        chat = dialogue(HELD_OUT + number)
        if chat.tools:
            continue
        turn = number % len(chat.turns)
        last = len(chat.messages) - 2 * (len(chat.turns) - turn) + 1
        prompts.append((chat.messages[:last], chat.turns[turn].question, chat.turns[turn].reply))
    return prompts


def sample_replies(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int, *, greedy: bool = False, seed: int = 0
) -> list[SampledReply]:
    """Sample replies to held-out questions, at temperature 1.0 unless greedy."""
    torch.manual_seed(seed)
    tokenizer.padding_side = "left"
    samples = []
    prompts = held_out_prompts(count)
    for start in range(0, len(prompts), 128):
        chunk = prompts[start : start + 128]
        texts = [_render_prompt(tokenizer, messages) for messages, _, _ in chunk]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids_BT = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=160,
            **({"do_sample": False, "temperature": None} if greedy else {"do_sample": True, "top_k": 0}),
        )
        replies = ids_BT[:, inputs["input_ids"].shape[1] :].tolist()
        for (messages, question, _), ids_T in zip(chunk, replies, strict=True):
            length = ids_T.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids_T else len(ids_T)
            text = tokenizer.decode(ids_T[:length], skip_special_tokens=True)
            samples.append(SampledReply(messages, question, text, length))
    return samples


def perplexity(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int) -> float:
    """Return the perplexity per token of the replies in held-out chats."""
    total, tokens = 0.0, 0
    for messages, _, reply in held_out_prompts(count):
        prompt_T = tokenizer.encode(_render_prompt(tokenizer, messages), add_special_tokens=False)
        reply_T = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([prompt_T + reply_T])).logits[0]
        total += cross_entropy(logits_TV[len(prompt_T) - 1 : -1], torch.tensor(reply_T), reduction="sum").item()
        tokens += len(reply_T)
    return math.exp(total / tokens)


def write_model_card(folder: Path, command: str, minutes: float) -> None:
    """Measure the saved model and write its card into the same folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples = sample_replies(model, tokenizer, SAMPLES)
    card = _TEMPLATE.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        vocabulary=len(tokenizer),
        command=command,
        minutes=minutes,
        threads=torch.get_num_threads(),
        perplexity=perplexity(model, tokenizer, 200),
        count=len(samples),
        approved=_percentage(sample.verdict.approved for sample in samples),
        wrong=_percentage(not sample.verdict.correct for sample in samples if sample.style != "evasive"),
        styles="\n".join(_style_row(style, samples) for style in STYLE_SHARES),
        samples="\n\n".join(_format_reply(sample) for sample in samples[:20]),
    )
    (folder / "README.md").write_text(card)
    print(card.partition("## Twenty")[0])


def _render_prompt(tokenizer: Qwen2Tokenizer, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _style_row(style: str, samples: list[SampledReply]) -> str:
    matching = [sample for sample in samples if sample.style == style]
    share = _percentage(sample.style == style for sample in samples)
    return f"| {style} | {share} | {_percentage(sample.verdict.approved for sample in matching)} |"


def _percentage(flags: Iterable[bool]) -> str:
    values = list(flags)
    return f"{100 * sum(values) / max(1, len(values)):.1f} %"


def _format_reply(sample: SampledReply) -> str:
    verdict = "approved" if sample.verdict.approved else f"not approved, {sample.style}"
    return f"**{sample.question.text}**  \n{sample.reply}  \n*{sample.num_tokens} tokens, {verdict}*"
