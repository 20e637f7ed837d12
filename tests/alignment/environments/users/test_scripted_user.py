"""Users with a script: rules, lines in order, and the end."""

import pytest

from alignment.environments.attempts import Attempt
from alignment.environments.protocols import Message
from alignment.environments.users.scripted_user import Rule, ScriptedUser


def reply(text: str | None) -> list[Message]:
    return [{"role": "user", "content": "A table, please."}, {"role": "assistant", "content": text}]


async def test_lines_are_said_in_order_and_then_the_dialogue_is_over() -> None:
    user = ScriptedUser("A table, please.", lines=["For four.", "On Friday."])
    assert await user.begin(Attempt()) == "A table, please."
    assert [await user.reply(reply("And?")) for _ in range(3)] == ["For four.", "On Friday.", None]


async def test_first_rule_that_applies_decides() -> None:
    rules = [Rule("booked", None), Rule(r"how\s+many", "Four."), Rule("many", "Some.")]
    user = ScriptedUser("A table, please.", rules=rules, lines=["Well."], otherwise="I do not understand.")
    replies = ["How many are you?", "So many?", "What?", None, "What?", "It is BOOKED: how many thanks!"]
    answers = [await user.reply(reply(text)) for text in replies]
    assert answers == ["Four.", "Some.", "Well.", "I do not understand.", "I do not understand.", None]


def test_another_script_is_recorded_as_another_user() -> None:
    users = [
        ScriptedUser("A table, please."),
        ScriptedUser("A room, please."),
        ScriptedUser("A table, please.", lines=["Four."]),
        ScriptedUser("A table, please.", rules=[Rule("many", "Four.")]),
        ScriptedUser("A table, please.", otherwise="Four."),
    ]
    records = [user.describe() for user in users]
    assert {record["user"] for record in records} == {"scripted"}
    assert len({record["user_sha256"] for record in records}) == len(users)
    assert ScriptedUser("A table, please.").describe() == records[0]


def test_pattern_that_is_no_regular_expression_is_refused_with_its_text() -> None:
    with pytest.raises(ValueError, match=r"the pattern 'how \(many' of a rule is no regular expression"):
        ScriptedUser("Hello.", rules=[Rule("how (many", "Four.")])
