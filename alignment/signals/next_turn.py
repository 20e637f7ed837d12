"""Evidence about a reply from the user's next message, by rules for English. No evidence is better than wrong evidence.

Only the beginning of a message counts, because thanks after a request are for a reply still to come. Quoted text does
not count.
"""

import re
from dataclasses import dataclass

REPETITION_OVERLAP = 0.85  # share of common words from which a message repeats another
MIN_WORDS = 3  # in a repeated question; "go on" may occur twice
MAX_CHARS = 2000  # read at the beginning of a message

QUOTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|^[ \t]*>[^\n]*|\"[^\"]*\"|“[^”]*”|«[^»]*»|(?<!\w)'[^'\n]*'(?!\w)", re.DOTALL | re.M
)
SENTENCE = re.compile(r"[^.!?\n]+[.!?]*|[.!?]+")
CLAUSE = re.compile(r"[,;:()–—]+|\s-+\s|\b(?:but|however|although|though|except)\b")
CONTRAST = re.compile(r"\b(?:but|however|although|though|except|still|unless|only)\b")
LEAD_IN = re.compile(
    r"(?:(?:no problem|no worries|no|nope|nah|ok|okay|oh|ah|um|uh|hm+|well|so|and|actually|sorry|yes|yeah|yep|wow|hi|"
    r"hello|hey|alright|all right|right|sure|got it|i see|great|perfect|awesome|cool|nice|excellent|brilliant|lovely|"
    r"amazing|wonderful|fantastic|good|fine|exactly|haha|again|wait|ugh|unfortunately|i think|i'm afraid)\b\s*)+"
)

END = r"(?:\s+(?:again|too|as well|unfortunately|at all|sorry|now|thanks|thank you|a lot|so much|really|actually))*\W*$"
IT_IS = r"(?:that(?:'s|s| is| was)|your (?:answer|reply|response) (?:is|was))"
ADVERBS = (
    r"(?:(?:just|simply|completely|totally|plain|also|obviously|clearly|really|so|very|absolutely|quite|at all) )*"
)
NEGATIVE_WORDS = r"(?:wrong|incorrect|false|nonsense|rubbish|garbage|useless|unhelpful|no help|terrible)"
REQUESTED = (
    r"what i (?:asked|meant|wanted|said|need|needed|was asking|was looking for|am asking|am looking for|'m asking)\b"
)
POSITIVE_WORDS = r"(?:right|correct|true|helpful|useful|it)"
AS_REQUESTED = r"(?:exactly|just|precisely) what i (?:needed|wanted|meant|was looking for|was after)"
PRAISE = (
    rf"(?:perfect|great|excellent|brilliant|awesome|amazing|wonderful|fantastic|lovely|spot on|helpful|{AS_REQUESTED})"
)
DID_NOT = r"(?:didn't|did not|didnt|don't|do not|doesn't|does not|doesnt|aren't|are not|never)"
QUESTION = r"(?:for|about|how|what|why|when|where|which|who)"

NEGATIVE = [
    re.compile(pattern)
    for pattern in (
        rf"(?:{IT_IS}|you(?:'re| are)) {ADVERBS}{NEGATIVE_WORDS}{END}",
        rf"(?:{IT_IS} {ADVERBS}not|(?:that|your (?:answer|reply|response)) (?:isn't|wasn't)) "
        rf"{ADVERBS}{POSITIVE_WORDS}{END}",
        rf"(?:(?:that|this|it)(?:'s|s| is| was) )?(?:still |really )?not (?:at all )?{REQUESTED}",
        rf"(?:that|this|it) (?:isn't|wasn't) (?:at all )?{REQUESTED}",
        r"you (?:have |completely |totally |clearly )*(?:misunderstood|misread|misunderstand)\b",
        r"you (?:got|have|had) (?:it|that|this|me) (?:all |completely |totally )?wrong\b",
        rf"you {DID_NOT} (?:even |really )?(?:answer|read|understand|understood|listen)(?:ed|ing)?\b",
        r"you (?:completely |totally )?(?:missed|ignored|are ignoring|keep ignoring) (?:the|my) (?:point|question)\b",
        r"i(?:'ve| have)? already (?:told you|said (?:that|so|this))\b",
        r"you(?:'ve| have)? already (?:said|told me|suggested) (?:that|this|so)\b",
        rf"that {DID_NOT} (?:help|work|make (?:any )?sense|(?:answer|address) (?:my|the) (?:question|point)){END}",
        rf"(?:it|that|this) still (?:{DID_NOT}|won't) (?:work|help|run|load|start|fit|answer|make sense)\b",
        rf"(?:(?:it|that|this)(?:'s| is) )?still (?:wrong|broken|not (?:working|right|correct|fixed)){END}",
        r"(?:thanks|thank you|thx) for nothing\b",
        rf"(?:how |so |totally |completely )?(?:useless|unhelpful){END}|not {ADVERBS}helpful{END}",
    )
]
CORRECTION = re.compile(
    r"(?:no|nope|nah)\b[\s,.!:;–—-]*(?:sorry\b[\s,.!]*)?(?:i meant\b|i mean (?:the|a|how|what|why|when|where|which)\b|"
    rf"i asked {QUESTION}\b|i was asking {QUESTION}\b|i said the\b|not that\b)"
)
NEGATIVE_ONLY = re.compile(r"(?:please )?try again(?: please)?|wrong|incorrect|wrong answer|bad (?:bot|answer)")
THANKS = re.compile(
    r"(?:(?:ok|okay|many|big|super|and|oh|yes|a million) )*(?:thanks|thank you|thank u|thankyou|thx|tysm|cheers|"
    r"much appreciated|i appreciate (?:it|that|your help))"
    r"(?=\W*$| ?[^\w\s]| (?:so|very|a lot|a ton|loads|again|for|that|this|i|it|now|man|mate|sir|and|you)\b)"
)
NO_THANKS = re.compile(r"(?:no|nope|nah)\b[\s,.]*(?:thanks|thank you|thx)\b")
THANKS_NOT_FOR_REPLY = re.compile(
    r"in advance\b|\bfor (?:nothing|trying|waiting|the (?:offer|reminder|invitation|invite))\b"
)
POSITIVE = [
    re.compile(pattern)
    for pattern in (
        rf"that(?:'s|s| is| was) {ADVERBS}{PRAISE}{END}",
        rf"(?:that|it|this) (?:worked|fixed it|solved it|did it|did the trick|helped|helps){END}",
        rf"(?:(?:it|that) works|works)(?: now| perfectly| great| fine){END}",
        rf"you(?:'re| are) (?:a lifesaver|a life saver|the best|awesome|amazing|very helpful|so helpful){END}",
        rf"(?:good|great|excellent|nice|perfect|brilliant) (?:answer|bot|job|work|explanation|reply|response){END}",
        rf"(?:well done|i love (?:it|this|that)|love (?:it|this)|{AS_REQUESTED}){END}",
    )
]
POSITIVE_ONLY = re.compile(
    rf"{ADVERBS}(?:perfect|excellent|brilliant|awesome|amazing|fantastic|wonderful|helpful|spot on|it works|works)"
)
EMOJI_VALUES = {"👍": 1.0, "❤": 1.0, "👌": 1.0, "🎉": 1.0, "👎": -1.0}
IGNORED_SYMBOLS = "🏻🏼🏽🏾🏿\ufe0f!."
FILLER = set(
    re.findall(
        r"\w+",
        "a an the please again so and but just hello hi hey ok okay well i me my we you can could would will do does "
        "did is are am was to of it that this um uh tell know want asked said meant repeat question",
    )
)


@dataclass(frozen=True)
class Evidence:
    """A reward that a rule derives from the next message."""

    value: float
    rule: str  # thanks, praise, thumb, complaint, correction, repetition


def read_next_message(message: str, before: str | None = None) -> Evidence | None:
    """Return the evidence in the user's next message about a reply. `before` is the message that the reply answers.

    Example: read_next_message("No, I meant the blue one") -> Evidence(-1.0, "correction")
    """
    plain = QUOTED.sub(" § ", message[:MAX_CHARS].lower().replace("’", "'").replace("‘", "'")).strip()
    evidence = _emoji_evidence(message[:MAX_CHARS]) or _negative_evidence(plain)
    if evidence is None and before is not None and is_repetition(message, before):
        evidence = Evidence(-1.0, "repetition")
    return evidence or _positive_evidence(plain)


def is_repetition(message: str, before: str) -> bool:
    """Return whether the message repeats the one before, apart from filler words.

    A replaced word makes it a new question.
    """
    old, new = _words(before), _words(message)
    if min(len(old), len(new)) < MIN_WORDS or (old - new and new - old):
        return False
    return len(old & new) / len(old | new) >= REPETITION_OVERLAP


def _words(text: str) -> set[str]:
    words = re.findall(r"\w+", text[:MAX_CHARS].lower().replace("’", "").replace("'", ""))
    return {word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words} - FILLER


def _emoji_evidence(message: str) -> Evidence | None:
    values = {EMOJI_VALUES.get(sign) for sign in message if not sign.isspace() and sign not in IGNORED_SYMBOLS}
    value = values.pop() if len(values) == 1 else None
    return None if value is None else Evidence(value, "thumb")


def _negative_evidence(plain: str) -> Evidence | None:
    """Look in the first two sentences, with nothing but a lead-in or thanks before it."""
    if NEGATIVE_ONLY.fullmatch(plain.strip(" .!")):
        return Evidence(-1.0, "complaint")
    if CORRECTION.match(plain):
        return Evidence(-1.0, "correction")
    for sentence in SENTENCE.findall(plain)[:2]:
        if sentence.endswith("?"):
            return None
        for clause, rest in _clauses(sentence):
            if _begins_with_any(NEGATIVE, clause, rest):
                return Evidence(-1.0, "complaint")
            if rest and not THANKS.match(rest):
                break
    return None


def _positive_evidence(plain: str) -> Evidence | None:
    """Look in the first sentence. A contrast in the first two sentences ("thanks, but …") rules it out."""
    sentences = SENTENCE.findall(plain)
    if not sentences or "§" in sentences[0] or NO_THANKS.match(plain):
        return None
    if any(CONTRAST.search(sentence) for sentence in sentences[:2]):
        return None
    if POSITIVE_ONLY.fullmatch(plain.strip(" .!")):
        return Evidence(1.0, "praise")
    clauses = _clauses(sentences[0])
    if sentences[0].endswith("?"):
        clauses = clauses[:-1]  # a question is no praise
    for clause, rest in clauses:
        if THANKS.match(rest):
            return None if THANKS_NOT_FOR_REPLY.search(rest) else Evidence(1.0, "thanks")
        if _begins_with_any(POSITIVE, clause, rest):
            return Evidence(1.0, "praise")
        if rest:
            return None
    return None


def _clauses(sentence: str) -> list[tuple[str, str]]:
    """Return each clause, and the clause without its lead-in.

    Example: "no, sorry, that's wrong" -> [("no", ""), ("sorry", ""), ("that's wrong", "that's wrong")]
    """
    clauses = [clause.strip(" .!?\t\r") for clause in CLAUSE.split(sentence)]
    return [(clause, clause[lead.end() :] if (lead := LEAD_IN.match(clause)) else clause) for clause in clauses]


def _begins_with_any(patterns: list[re.Pattern[str]], clause: str, rest: str) -> bool:
    return any(pattern.match(clause) or pattern.match(rest) for pattern in patterns)
