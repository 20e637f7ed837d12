"""Simulated users, and the chats that the demo model is trained on."""

from random import Random

import pytest

from demo.dialogues import HELD_OUT, SimulatedUser, dialogue
from demo.reply_styles import reply
from demo.shop import INTENTS, make_question


def test_same_seed_gives_the_same_chat() -> None:
    assert [dialogue(seed) for seed in range(50)] == [dialogue(seed) for seed in range(50)]


def test_different_seeds_give_different_chats() -> None:
    assert len({str(dialogue(seed).messages) for seed in range(200)}) == 200


def test_user_asks_the_same_two_to_four_questions_each_time() -> None:
    for seed in range(HELD_OUT, HELD_OUT + 100):
        questions = list(SimulatedUser(seed).questions())
        assert 2 <= len(questions) <= 4
        assert questions == list(SimulatedUser(seed).questions())
        assert len(questions) == SimulatedUser(seed).num_questions


def test_dialogue_contains_the_questions_of_its_user() -> None:
    chats = [dialogue(seed) for seed in range(100)]
    for seed, chat in enumerate(chats):
        if chat.messages[-2]["role"] == "user":  # not an order lookup
            assert [turn.question for turn in chat.turns] == list(SimulatedUser(seed).questions())


def test_most_chats_have_a_system_prompt() -> None:
    roles = [dialogue(seed).messages[0]["role"] for seed in range(1_000)]
    assert 0.85 < roles.count("system") / len(roles) < 0.99


def test_some_chats_look_up_an_order() -> None:
    chats = [dialogue(seed) for seed in range(1_000)]
    assert 10 < sum(any("tool_calls" in message for message in chat.messages) for chat in chats) < 100


@pytest.mark.parametrize("style", ["helpful", "rambling", "curt", "evasive"])
def test_question_has_many_replies_in_each_style(style: str) -> None:
    rng = Random(0)
    replies = {reply(rng, make_question(rng, "hours", "Friday"), style) for _ in range(300)}
    assert len(replies) > (30 if style == "curt" else 200)


@pytest.mark.parametrize("intent", INTENTS)
def test_question_has_its_facts(intent: str) -> None:
    for value in INTENTS[intent].values:
        question = make_question(Random(0), intent, value)
        assert question.facts and question.subject == value and value in question.text
