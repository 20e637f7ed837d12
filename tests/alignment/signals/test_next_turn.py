"""Evidence in the user's next message: clear messages have a value, ambiguous ones have none."""

import pytest

from alignment.signals.next_turn import is_repetition, read_next_message

POSITIVE = [
    "Thanks!",
    "thank you so much",
    "ok thanks",
    "Great, thanks a lot!",
    "no problem, thanks",
    "No worries, thank you!",
    "Thanks 😊",
    "Thanks! Can you also check the tyres?",
    "Thanks, what about Sunday?",
    "Oh wow, thank you for explaining that",
    "Perfect!",
    "perfect, thanks",
    "That's perfect.",
    "That was really helpful, thank you",
    "That worked!",
    "it works now",
    "That’s exactly what I needed",
    "Exactly what I was looking for.",
    "Great answer!",
    "well done",
    "I love it",
    "You're the best",
    "👍",
    "👍🏽👍🏽",
]
NEGATIVE = [
    "No, I meant the blue one",
    "no i meant tomorrow",
    "No. I asked about the price",
    "That's wrong.",
    "thats wrong",
    "No, that's not right",
    "That is not correct. The shop closes at six.",
    "Sorry, but that's not what I asked",
    "not what i asked",
    "This isn't what I wanted at all",
    "Thanks, but that's wrong",
    "thanks for nothing",
    "You misunderstood me",
    "You didn't answer my question.",
    "you're completely wrong",
    "You got it wrong again",
    "I already told you that",
    "That didn't work",
    "It still doesn't work",
    "still wrong",
    "not helpful",
    "Your answer is wrong.",
    "try again",
    "Wrong!",
    "👎",
]
AMBIGUOUS = [
    "",
    "...",
    "No",
    "No thanks",
    "no, thank you",
    "No, I asked my boss and he agreed",
    "That's not wrong",
    "You're not wrong",
    "Is that wrong?",
    "That's wrong?",
    "Tell me if that's wrong",
    "My teacher says, that's wrong",
    "What's wrong with my bike?",
    "It's wrong to steal, isn't it?",
    'He wrote "that\'s wrong" below it. What did he mean?',
    "> That's wrong.\nWhy does he say so?",
    'Translate "thank you" into French',
    '"Thanks!" is what she wrote',
    "'not what I asked' is a strange sentence",
    "Can you check Sunday as well? Thanks!",
    "Please send it again, thanks",
    "Thanks in advance",
    "Thank you so much in advance for your time",
    "Thanks to you I was late",
    "Thank you note for my boss, please",
    "thank you page for my shop",
    "Thanks, but I still cannot log in",
    "Thanks for the offer",
    "How do I say thank you?",
    "Great, it crashed",
    "Perfect timing, my tyre is flat",
    "Great. And on Sunday?",
    "That's correct",  # confirms what the reply asked
    "yes",
    "Sorry, I meant Berlin",  # the user corrects their own mistake
    "I meant the blue one",
    "It works on my machine but not on yours",
    "That doesn't work for me on Tuesday",
    "False",
    "👍👎",
    "🤔",
    "¡Gracias!",  # another language
    "Danke, das hilft",
]


@pytest.mark.parametrize("message", POSITIVE)
def test_thanks_and_praise_are_positive(message: str) -> None:
    evidence = read_next_message(message)
    assert evidence is not None and evidence.value == 1.0


@pytest.mark.parametrize("message", NEGATIVE)
def test_corrections_and_complaints_are_negative(message: str) -> None:
    evidence = read_next_message(message)
    assert evidence is not None and evidence.value == -1.0


@pytest.mark.parametrize("message", AMBIGUOUS)
def test_ambiguous_messages_are_no_evidence(message: str) -> None:
    assert read_next_message(message) is None


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("Thanks!", "thanks"),
        ("That worked", "praise"),
        ("👍", "thumb"),
        ("That's wrong", "complaint"),
        ("No, I meant Rome", "correction"),
        ("When do you open on Sunday?", "repetition"),
    ],
)
def test_evidence_names_its_rule(message: str, rule: str) -> None:
    evidence = read_next_message(message, "When do you open on Sunday?")
    assert evidence is not None and evidence.rule == rule


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("When do you open on Sunday?", "when do you open on sunday"),
        ("When do you open on Sunday?", "Hello? I asked: when do you open on Sunday!"),
        ("Where can I park my bike overnight?", "Please tell me where I can park my bikes overnight"),
        ("Red bikes with big baskets for tall old people", "Red bikes with big baskets for tall people"),
    ],
)
def test_the_same_question_again_is_a_repetition(before: str, message: str) -> None:
    assert is_repetition(message, before)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("When do you open on Sunday?", "When do you open on Monday?"),
        (
            "What does the big red road bike with two baskets cost?",
            "What does the big red road bike with 3 baskets cost?",
        ),
        ("How do I reset my password?", "How do I reset my password on the phone without the old one?"),
        ("go on", "go on"),
        ("yes please", "yes please"),
        ("", ""),
        ("When do you open on Sunday?", "And how do I get there?"),
    ],
)
def test_another_question_is_no_repetition(before: str, message: str) -> None:
    assert not is_repetition(message, before)


def test_long_messages_are_read_quickly() -> None:
    for message in ("no " * 100_000, "that's " * 50_000, "very " * 50_000 + "wrong", "'" * 200_000, "> " * 90_000):
        assert read_next_message(message, message) is None
