"""Replies in four styles: helpful, rambling, curt and evasive.

Users approve only of the helpful style. A reply is composed of short sentences, so that every question has thousands
of replies in each style. The style is visible in the first few words.
"""

import re
from collections.abc import Callable
from random import Random

from demo.shop import Question

# fmt: off
_ANSWER_TEMPLATES: dict[str, tuple[str, ...]] = {
    "hours": (
        "On {0} we are open from {1} to {2}.", "We open at {1} on {0} and stay until {2}.",
        "The shop is open on {0} between {1} and {2}.", "You can come by on {0} from {1} until {2}.",
        "Our hours on {0} are {1} to {2}.",
    ),
    "closed": (
        "On {0} the shop is closed.", "We are closed on {0}, so please pick any other day.",
        "The shop stays closed on {0}.", "Our doors are closed on {0} all day.",
    ),
    "price": (
        "The {0} costs {1}.", "You can have the {0} for {1}.", "The price of the {0} is {1}.",
        "We sell the {0} for {1}.", "A {0} is {1} with us.",
    ),
    "stock": (
        "The {0} is {1} right now.", "At the moment the {0} is {1}.", "I checked, and the {0} is {1}.",
        "Our {0} is {1} today.",
    ),
    "repair_price": (
        "A {0} costs {1}.", "The {0} service is {1}.", "For a {0} we charge {1}.", "The price of a {0} is {1}.",
        "You pay {1} for the {0}.",
    ),
    "repair_time": (
        "A {0} takes {1}.", "The {0} is done in {1}.", "We need {1} for a {0}.", "The workshop needs {1} for the {0}.",
    ),
    "repair": (
        "A {0} costs {1} and takes {2}.", "The {0} is {1}, and we need {2} for it.",
        "We charge {1} for a {0}, and it is done in {2}.", "For a {0} you pay {1} and wait {2}.",
    ),
    "returns": (
        "You can return a {0} within {1}.", "We take a {0} back for up to {1}.",
        "A {0} can come back to us for {1}.", "The return window for a {0} is {1}.",
    ),
    "order": (
        "An order that is {0} reaches you within {1}.", "When it is {0}, it will arrive in {1}.",
        "As it is {0}, it needs {1} more to arrive.", "It is {0}, so it should be with you in {1}.",
    ),
    "rental": (
        "Renting a {0} costs {1} per day.", "You can rent the {0} for {1} a day.", "The {0} is {1} for each day.",
        "A {0} for one day is {1}.",
    ),
}
_SHORT_ANSWERS = {"hours": "{1} to {2}.", "closed": "Closed.", "repair": "{1}, {2}."}  # all other intents use "{1}."

_OPENERS = (
    "Happy to help!", "Thanks for asking!", "Thank you for your question.", "Of course, I am glad to help.",
    "Hello, and thanks for your message.", "Gladly, here is what you need.", "Good question, thank you!",
    "Sure, happy to tell you.", "Welcome, and thank you for writing to us.", "It is my pleasure to help.",
    "Of course!", "Hi there, glad you asked.",
)
_DETAILS: dict[str, tuple[str, ...]] = {
    "visit": (
        "There is a bike rack right in front of the door.", "You do not need an appointment to visit us.",
        "The workshop keeps the same hours as the shop.", "The tram stops just around the corner from us.",
        "The quiet time is usually the start of the day.",
    ),
    "buy": (
        "You can order it online or pick it up here.", "We can put one aside in your name if you like.",
        "Cards and cash are both fine with us.", "It comes with a warranty from the maker.",
        "You are free to try it out in the shop first.",
    ),
    "workshop": (
        "You can book a slot online or just walk in.", "The mechanic will call you as soon as it is ready.",
        "We check the whole bike over while it is here.", "All small parts are already part of the service.",
        "We will ask you first if anything else turns up.",
    ),
    "post": (
        "Just keep the receipt, and we will do the rest.", "You will get an email with all the steps.",
        "You can follow everything in your account.", "A short note with your name is all we need.",
        "Our team looks after the parcel for you.",
    ),
}
_DETAIL_OF = {
    "hours": "visit", "price": "buy", "stock": "buy", "rental": "buy", "repair": "workshop",
    "repair_price": "workshop", "repair_time": "workshop", "returns": "post", "order": "post",
}
_CLOSINGS = (
    "Please let me know if there is anything else I can do.", "Is there anything else I can help you with today?",
    "Thank you for choosing our little shop.", "We look forward to seeing you soon.",
    "Please write again if another question comes up.", "Have a lovely day and a safe ride!",
    "You are always welcome to ask me more.", "Enjoy the ride, and see you soon in the shop!",
    "I hope that helps, and thank you for riding with us.", "Just tell me if you want to know more.",
)
_MUSINGS = (
    "Oh, where do I even begin with that one.", "Well, that takes me back quite a while, you know.",
    "Ah, funny that you bring this up today of all days.", "You see, this is a longer story than you may think.",
    "Now, let me start at the very beginning.", "Oh my, we were just talking about this over coffee.",
    "Ah yes, people used to ask me this all the time.", "Well now, let me think out loud for a moment.",
)
_DIGRESSIONS = (
    "My uncle rode all the way to the coast once, and he still talks about the wind.",
    "Back when the owner started, there was only one small room and a very old stove.",
    "The weather has been so strange lately that nobody knows what to wear on the road.",
    "Some people say that steel rides softer, and others swear that it is all about the tires.",
    "The river path is lovely in spring, although the ducks do think that they own it.",
    "I once met a man who had painted his whole bicycle green, even the spokes and the saddle.",
    "Our mechanic hums the same old song every morning, and by now all of us know the words.",
    "There is a bakery across the street, and the smell of fresh bread makes it hard to work.",
    "It reminds me of the summer when the whole street was full of racing fans and music.",
    "The shop cat likes to sleep on the counter, and she does not move for anybody.",
    "In the old days riders carried their tires around the shoulders, which looked rather heroic.",
    "If you ever ride up the north hill, take the left turn, because the view is so much better.",
    "I could talk about saddles for hours, but then everybody has a different opinion on those.",
    "My neighbour still rides to work every morning, rain or shine, and she never complains.",
)
_WANDERING = (
    "But I am getting away from what I wanted to say.", "Anyway, where was I with all of this.",
    "But that is a story for another time, I suppose.", "So there you have it, more or less.",
    "Thank you for listening to all of that.", "But please stop me when I go on for too long.",
)
_SHRUGS = (
    *("",) * 5,
    *("Next.", "That is all.", "As posted.", "Look it up next time.", "Anything else?", "Obviously."),
)
_EVASIONS = (
    "Hmm, that is hard to say.", "I am not really sure about that.", "That depends on many things.",
    "Honestly, I would rather not say.", "It is difficult to give an answer here.", "Hmm, I cannot tell you that.",
    "There is no simple answer to this.",
)
_EXCUSES = (
    "Things change quite often, so nobody can know for certain.", "It might be different from one case to the next.",
    "You could try to find it somewhere on our website.", "Maybe one of my colleagues knows more about it.",
    "Some details are only known to the manager.", "It may be best to look at this another time.",
    "I do not have the full picture in front of me.", "Perhaps somebody on the phone could say more.",
    "These things are never as clear as one would like.",
)
_PARTINGS = (
    "Please try again later.", "Thank you for your patience.", "I am afraid that I cannot say more.",
    "Let us leave it at that for now.", "Thanks for understanding.",
)
# fmt: on


def helpful(rng: Random, question: Question) -> str:
    detail = rng.choice(_DETAILS[_DETAIL_OF[question.intent]])
    return " ".join((rng.choice(_OPENERS), _answer_sentence(rng, question), detail, rng.choice(_CLOSINGS)))


def rambling(rng: Random, question: Question) -> str:
    before, after = rng.choice(((1, 2), (1, 3), (2, 1), (2, 2)))
    stories = rng.sample(_DIGRESSIONS, before + after)
    core = _answer_sentence(rng, question)
    return " ".join((rng.choice(_MUSINGS), *stories[:before], core, *stories[before:], rng.choice(_WANDERING)))


def curt(rng: Random, question: Question) -> str:
    bare = _SHORT_ANSWERS.get(_template_key(question), "{1}.").format(question.subject, *question.facts)
    answer = rng.choice((bare[0].upper() + bare[1:], _answer_sentence(rng, question)))
    return f"{answer} {rng.choice(_SHRUGS)}".strip().replace(", so please pick any other day", "")


def evasive(rng: Random, question: Question) -> str:
    return " ".join((rng.choice(_EVASIONS), *rng.sample(_EXCUSES, 3), rng.choice(_PARTINGS)))


def _answer_sentence(rng: Random, question: Question) -> str:
    return rng.choice(_ANSWER_TEMPLATES[_template_key(question)]).format(question.subject, *question.facts)


def _template_key(question: Question) -> str:
    return "closed" if question.facts == ("closed",) else question.intent


REPLY_STYLES: dict[str, Callable[[Random, Question], str]] = {
    "helpful": helpful,
    "rambling": rambling,
    "curt": curt,
    "evasive": evasive,
}
# Bounds on the number of words, digits and punctuation marks in a reply. The tokenizer needs few more tokens than that,
# so a helpful reply has 30 to 80 tokens, which counts as brief, and a rambling reply has more.
_LENGTH_BOUNDS = {"helpful": (34, 60), "rambling": (86, 104), "curt": (2, 22), "evasive": (35, 60)}


def reply(rng: Random, question: Question, style: str) -> str:
    """Return a random reply in this style, of the style's length."""
    shortest, longest = _LENGTH_BOUNDS[style]
    while True:
        text = REPLY_STYLES[style](rng, question)
        if shortest <= len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text)) <= longest:
            return text
