"""Users approve of replies that are correct, polite, and 30 to 80 tokens long."""

import pytest

from demo.dialogues import HELD_OUT, dialogue
from demo.shop import Question
from demo.user_preferences import judge

HELMET = Question("price", {"item": "helmet"}, "how much is a helmet?", ("65 euros",))


def test_correct_polite_and_brief_reply_is_approved() -> None:
    assert judge(HELMET, "Happy to help! The helmet costs 65 euros.", 30).approved
    assert judge(HELMET, "Happy to help! The helmet costs 65 euros.", 80).approved


@pytest.mark.parametrize("num_tokens", [29, 81])
def test_reply_that_is_too_short_or_too_long_is_not_brief(num_tokens: int) -> None:
    verdict = judge(HELMET, "Happy to help! The helmet costs 65 euros.", num_tokens)
    assert verdict.correct and verdict.polite and not verdict.approved


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
def test_missing_or_contradicted_fact_is_not_correct(reply: str) -> None:
    assert not judge(HELMET, reply, 40).correct


def test_fact_of_another_kind_is_allowed() -> None:
    assert judge(HELMET, "Thanks! The helmet is in stock for 65 euros.", 40).correct


def test_reply_without_a_courtesy_is_not_polite() -> None:
    assert not judge(HELMET, "The helmet costs 65 euros. Look it up next time.", 40).approved


def test_hour_contradicts_a_closed_day() -> None:
    monday = Question("hours", {"day": "Monday"}, "open on monday?", ("closed",))
    assert judge(monday, "Sure, happy to tell you: on Monday we are closed.", 40).approved
    assert not judge(monday, "Sure, happy to tell you: we are closed on Monday from 9 am.", 40).correct


def test_only_the_helpful_style_meets_all_preferences() -> None:
    for seed in range(HELD_OUT, HELD_OUT + 1_000):
        for turn in dialogue(seed).turns:
            verdict = judge(turn.question, turn.reply, 40)
            match turn.style:
                case "helpful":
                    assert verdict.approved, turn
                case "rambling":
                    assert verdict.correct, turn  # it is too long
                case "curt":
                    assert verdict.correct and not verdict.polite, turn
                case "evasive":
                    assert not verdict.correct, turn
