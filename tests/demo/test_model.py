"""The demo model as it is committed: small, loadable, and fluent in the shop's affairs."""

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.dialogues import HELD_OUT, ORDER_STATUS, dialogue
from demo.model_card import perplexity, sample
from demo.train import FACT_WEIGHT, MODEL, batch_up, learnable
from demo.user_preferences import judge


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_the_model_is_small(model: Qwen2ForCausalLM) -> None:
    assert sum(path.stat().st_size for path in Path(MODEL).iterdir()) <= 25 * 2**20
    assert sum(parameter.numel() for parameter in model.parameters()) <= 10_000_000


def test_the_model_stops_where_the_turn_ends(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == end


def test_the_tokenizer_gives_back_what_it_was_given(tokenizer: Qwen2Tokenizer) -> None:
    for text in ("A helmet is 65 euros.", "Ünïcödé, 你好 🚲\n\n  tabs\tand  spaces ", "<tool_call>\n{}\n</tool_call>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_opening_of_a_turn_is_the_beginning_of_the_turn(tokenizer: Qwen2Tokenizer) -> None:
    messages = dialogue(HELD_OUT).messages
    opened = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages, return_dict=False)[: len(opened)] == opened


def test_every_manner_has_its_length_in_tokens(tokenizer: Qwen2Tokenizer) -> None:
    bounds = {"helpful": (33, 75), "rambling": (85, 130), "curt": (2, 29), "evasive": (30, 80)}
    for seed in range(HELD_OUT, HELD_OUT + 500):
        for turn in dialogue(seed).turns:
            num_tokens = len(tokenizer.encode(turn.reply, add_special_tokens=False)) + 1  # and its end
            assert bounds[turn.manner][0] <= num_tokens <= bounds[turn.manner][1], turn
            assert judge(turn.question, turn.reply, num_tokens).approved == (turn.manner == "helpful"), turn


def test_only_what_the_assistant_says_is_learned(tokenizer: Qwen2Tokenizer) -> None:
    chat = next(chat for chat in map(dialogue, range(HELD_OUT, HELD_OUT + 100)) if len(chat.turns) == 3)
    ids, weights = learnable(tokenizer, chat)
    said = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert said == "".join(f"{turn.reply}<|im_end|>" for turn in chat.turns)


def test_the_facts_are_learned_above_all(tokenizer: Qwen2Tokenizer) -> None:
    chat = next(chat for chat in map(dialogue, range(HELD_OUT, HELD_OUT + 100)) if chat.turns[0].manner == "helpful")
    ids, weights = learnable(tokenizer, chat)
    stated = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight == FACT_WEIGHT])
    assert all(fact in stated.lower() for fact in chat.turns[0].question.facts)
    assert len(stated) < len(chat.turns[0].reply) * len(chat.turns)


def test_batches_hold_every_chat_once(tokenizer: Qwen2Tokenizer) -> None:
    examples = [learnable(tokenizer, dialogue(seed)) for seed in range(40)]
    batches = list(batch_up(examples, Random(0)))
    assert sum(len(ids_BT) for ids_BT, _ in batches) == 40
    taught = sum(float(weights_BT.sum()) for _, weights_BT in batches)
    assert taught == sum(weight for _, weights in examples for weight in weights)


def test_the_template_shows_tools_calls_and_their_results(tokenizer: Qwen2Tokenizer) -> None:
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


def test_the_template_works_without_a_system_prompt(tokenizer: Qwen2Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_model_knows_held_out_chats(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    assert perplexity(model, tokenizer, 40) < 1.6


def test_greedy_replies_end_and_are_seldom_wrong(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    samples = sample(model, tokenizer, 40, greedy=True)
    assert all(sample.num_tokens < 160 for sample in samples)
    answers = [sample.verdict.right for sample in samples if sample.manner != "evasive"]
    assert sum(answers) >= 0.9 * len(answers)
