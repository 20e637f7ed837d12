"""The committed demo model: its size, tokenizer, chat template and quality."""

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import HELD_OUT, ORDER_STATUS, dialogue
from demo.model_card import perplexity, sample_replies
from demo.train import FACT_WEIGHT, MODEL, make_batches, make_example
from demo.user_preferences import judge


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_model_is_small(model: Qwen2ForCausalLM) -> None:
    assert sum(path.stat().st_size for path in Path(MODEL).iterdir()) <= 25 * 2**20
    assert sum(parameter.numel() for parameter in model.parameters()) <= 10_000_000


def test_model_stops_at_the_end_of_turn_token(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == end


def test_tokenizer_round_trip(tokenizer: Qwen2Tokenizer) -> None:
    for text in ("A helmet is 65 euros.", "Ünïcödé, 你好 🚲\n\n  tabs\tand  spaces ", "<tool_call>\n{}\n</tool_call>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_generation_prompt_is_a_prefix_of_the_turn(tokenizer: Qwen2Tokenizer) -> None:
    messages = dialogue(HELD_OUT).messages
    prompt_ids = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages, return_dict=False)[: len(prompt_ids)] == prompt_ids


def test_each_style_has_its_length_in_tokens(tokenizer: Qwen2Tokenizer) -> None:
    bounds = {"helpful": (33, 75), "rambling": (85, 130), "curt": (2, 29), "evasive": (30, 80)}
    for seed in range(HELD_OUT, HELD_OUT + 500):
        for turn in dialogue(seed).turns:
            num_tokens = len(tokenizer.encode(turn.reply, add_special_tokens=False)) + 1  # and the end token
            assert bounds[turn.style][0] <= num_tokens <= bounds[turn.style][1], turn
            assert judge(turn.question, turn.reply, num_tokens).approved == (turn.style == "helpful"), turn


def test_only_assistant_tokens_have_weight(tokenizer: Qwen2Tokenizer) -> None:
    chat = next(chat for chat in map(dialogue, range(HELD_OUT, HELD_OUT + 100)) if len(chat.turns) == 3)
    ids, weights = make_example(tokenizer, chat)
    text = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert text == "".join(f"{turn.reply}<|im_end|>" for turn in chat.turns)


def test_fact_tokens_have_more_weight(tokenizer: Qwen2Tokenizer) -> None:
    chat = next(chat for chat in map(dialogue, range(HELD_OUT, HELD_OUT + 100)) if chat.turns[0].style == "helpful")
    ids, weights = make_example(tokenizer, chat)
    fact_text = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight == FACT_WEIGHT])
    assert all(fact in fact_text.lower() for fact in chat.turns[0].question.facts)
    assert len(fact_text) < len(chat.turns[0].reply) * len(chat.turns)


def test_batches_contain_every_chat_once(tokenizer: Qwen2Tokenizer) -> None:
    examples = [make_example(tokenizer, dialogue(seed)) for seed in range(40)]
    batches = list(make_batches(examples, Random(0)))
    assert sum(len(ids_BT) for ids_BT, _ in batches) == 40
    total_weight = sum(float(weights_BT.sum()) for _, weights_BT in batches)
    assert total_weight == sum(weight for _, weights in examples for weight in weights)


def test_chat_template_renders_tools_calls_and_results(tokenizer: Qwen2Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "order_status", "arguments": {"order_id": "1047"}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Where is order 1047?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": '{"state": "shipped"}'},
        ],
        tools=[ORDER_STATUS],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "order_status"' in text
    assert text.endswith(
        "<|im_start|>user\nWhere is order 1047?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "order_status", "arguments": {"order_id": "1047"}}\n</tool_call>'
        '<|im_end|>\n<|im_start|>user\n<tool_response>\n{"state": "shipped"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_chat_template_without_a_system_prompt(tokenizer: Qwen2Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_perplexity_on_held_out_chats(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    assert perplexity(model, tokenizer, 40) < 1.6


def test_greedy_replies_end_and_are_mostly_correct(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    samples = sample_replies(model, tokenizer, 40, greedy=True)
    assert all(sample.num_tokens < 160 for sample in samples)
    correct = [sample.verdict.correct for sample in samples if sample.style != "evasive"]
    assert sum(correct) >= 0.9 * len(correct)
