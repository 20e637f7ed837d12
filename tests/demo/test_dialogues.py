"""The shoppers and the chats that the demo model is trained on."""

from random import Random

import pytest

from demo.dialogues import HELD_OUT, Shopper, dialogue
from demo.reply_styles import reply
from demo.shop import INTENTS, ask


def test_the_same_seed_gives_the_same_chat() -> None:
    assert [dialogue(seed) for seed in range(50)] == [dialogue(seed) for seed in range(50)]


def test_another_seed_gives_another_chat() -> None:
    assert len({str(dialogue(seed).messages) for seed in range(200)}) == 200


def test_a_shopper_asks_two_to_four_questions_and_always_the_same_ones() -> None:
    for seed in range(HELD_OUT, HELD_OUT + 100):
        questions = list(Shopper(seed).questions())
        assert 2 <= len(questions) <= 4
        assert questions == list(Shopper(seed).questions())
        assert len(questions) == Shopper(seed).num_questions


def test_the_chat_of_a_shopper_asks_the_questions_of_that_shopper() -> None:
    chats = [dialogue(seed) for seed in range(100)]
    for seed, chat in enumerate(chats):
        if chat.messages[-2]["role"] == "user":  # no order was looked up
            assert [turn.question for turn in chat.turns] == list(Shopper(seed).questions())


def test_about_all_chats_have_a_system_prompt_but_not_all() -> None:
    roles = [dialogue(seed).messages[0]["role"] for seed in range(1_000)]
    assert 0.85 < roles.count("system") / len(roles) < 0.99


def test_some_chats_look_an_order_up() -> None:
    chats = [dialogue(seed) for seed in range(1_000)]
    assert 10 < sum(any("tool_calls" in message for message in chat.messages) for chat in chats) < 100


@pytest.mark.parametrize("manner", ["helpful", "rambling", "curt", "evasive"])
def test_a_question_has_many_replies_in_a_manner(manner: str) -> None:
    rng = Random(0)
    replies = {reply(rng, ask(rng, "hours", "Friday"), manner) for _ in range(300)}
    assert len(replies) > (30 if manner == "curt" else 200)


@pytest.mark.parametrize("intent", INTENTS)
def test_a_question_knows_its_facts(intent: str) -> None:
    for value in INTENTS[intent].values:
        question = ask(Random(0), intent, value)
        assert question.facts and question.subject == value and value in question.text
