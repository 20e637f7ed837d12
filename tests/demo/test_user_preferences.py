"""What the shoppers like: right, polite, and 30 to 80 tokens."""

import pytest

from demo.dialogues import HELD_OUT, dialogue
from demo.shop import Question
from demo.user_preferences import judge

HELMET = Question("price", {"item": "helmet"}, "how much is a helmet?", ("65 euros",))


def test_a_right_polite_and_brief_reply_is_approved() -> None:
    assert judge(HELMET, "Happy to help! The helmet costs 65 euros.", 30).approved
    assert judge(HELMET, "Happy to help! The helmet costs 65 euros.", 80).approved


@pytest.mark.parametrize("num_tokens", [29, 81])
def test_a_reply_of_another_length_is_not_brief(num_tokens: int) -> None:
    verdict = judge(HELMET, "Happy to help! The helmet costs 65 euros.", num_tokens)
    assert verdict.right and verdict.polite and not verdict.approved


@pytest.mark.parametrize(
    "reply",
    [
        "Happy to help! It is here.",
        "Happy to help! The helmet costs 64 euros.",
        "Happy to help! The helmet costs 165 euros.",
        "Happy to help! The helmet costs 65 euros, or 60 euros.",
        "Happy to help! The road bike costs 65 euros.",
    ],
)
def test_a_missing_or_contradicted_fact_is_not_right(reply: str) -> None:
    assert not judge(HELMET, reply, 40).right


def test_a_fact_of_another_kind_does_no_harm() -> None:
    assert judge(HELMET, "Thanks! The helmet is in stock for 65 euros.", 40).right


def test_a_reply_without_a_kind_word_is_not_polite() -> None:
    assert not judge(HELMET, "The helmet costs 65 euros. Look it up next time.", 40).approved


def test_whoever_asks_about_a_closed_day_is_misled_by_an_hour() -> None:
    monday = Question("hours", {"day": "Monday"}, "open on monday?", ("closed",))
    assert judge(monday, "Sure, happy to tell you: on Monday we are closed.", 40).approved
    assert not judge(monday, "Sure, happy to tell you: we are closed on Monday from 9 am.", 40).right


def test_the_helpful_manner_is_right_and_polite_and_the_others_lack_something() -> None:
    for seed in range(HELD_OUT, HELD_OUT + 1_000):
        for turn in dialogue(seed).turns:
            verdict = judge(turn.question, turn.reply, 40)
            match turn.manner:
                case "helpful":
                    assert verdict.approved, turn
                case "rambling":
                    assert verdict.right, turn  # its fault is its length
                case "curt":
                    assert verdict.right and not verdict.polite, turn
                case "evasive":
                    assert not verdict.right, turn
