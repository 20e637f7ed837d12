"""The user's next message as evidence about a reply, by rules for English. Silence is better than a wrong word.

Only what opens a message counts: thanks behind a request are for what is still to come. What is quoted does not count.
"""

import re
from dataclasses import dataclass

OVERLAP = 0.85  # of two messages' words, at which the second repeats the first
FEWEST_WORDS = 3  # that carry a question; "go on" may be said twice
LONGEST = 2000  # characters that are read; what opens a message is at its beginning

QUOTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|^[ \t]*>[^\n]*|\"[^\"]*\"|“[^”]*”|«[^»]*»|(?<!\w)'[^'\n]*'(?!\w)", re.DOTALL | re.M
)
SENTENCE = re.compile(r"[^.!?\n]+[.!?]*|[.!?]+")
CLAUSE = re.compile(r"[,;:()–—]+|\s-+\s|\b(?:but|however|although|though|except)\b")
TURN = re.compile(r"\b(?:but|however|although|though|except|still|unless|only)\b")
LEAD_IN = re.compile(
    r"(?:(?:no problem|no worries|no|nope|nah|ok|okay|oh|ah|um|uh|hm+|well|so|and|actually|sorry|yes|yeah|yep|wow|hi|"
    r"hello|hey|alright|all right|right|sure|got it|i see|great|perfect|awesome|cool|nice|excellent|brilliant|lovely|"
    r"amazing|wonderful|fantastic|good|fine|exactly|haha|again|wait|ugh|unfortunately|i think|i'm afraid)\b\s*)+"
)

END = r"(?:\s+(?:again|too|as well|unfortunately|at all|sorry|now|thanks|thank you|a lot|so much|really|actually))*\W*$"
IT_IS = r"(?:that(?:'s|s| is| was)|your (?:answer|reply|response) (?:is|was))"
VERY = r"(?:(?:just|simply|completely|totally|plain|also|obviously|clearly|really|so|very|absolutely|quite|at all) )*"
WORSE = r"(?:wrong|incorrect|false|nonsense|rubbish|garbage|useless|unhelpful|no help|terrible)"
ASKED = (
    r"what i (?:asked|meant|wanted|said|need|needed|was asking|was looking for|am asking|am looking for|'m asking)\b"
)
RIGHT = r"(?:right|correct|true|helpful|useful|it)"
WISHED = r"(?:exactly|just|precisely) what i (?:needed|wanted|meant|was looking for|was after)"
BETTER = rf"(?:perfect|great|excellent|brilliant|awesome|amazing|wonderful|fantastic|lovely|spot on|helpful|{WISHED})"
NOT = r"(?:didn't|did not|didnt|don't|do not|doesn't|does not|doesnt|aren't|are not|never)"
QUESTION = r"(?:for|about|how|what|why|when|where|which|who)"

AGAINST = [
    re.compile(pattern)
    for pattern in (
        rf"(?:{IT_IS}|you(?:'re| are)) {VERY}{WORSE}{END}",
        rf"(?:{IT_IS} {VERY}not|(?:that|your (?:answer|reply|response)) (?:isn't|wasn't)) {VERY}{RIGHT}{END}",
        rf"(?:(?:that|this|it)(?:'s|s| is| was) )?(?:still |really )?not (?:at all )?{ASKED}",
        rf"(?:that|this|it) (?:isn't|wasn't) (?:at all )?{ASKED}",
        r"you (?:have |completely |totally |clearly )*(?:misunderstood|misread|misunderstand)\b",
        r"you (?:got|have|had) (?:it|that|this|me) (?:all |completely |totally )?wrong\b",
        rf"you {NOT} (?:even |really )?(?:answer|read|understand|understood|listen)(?:ed|ing)?\b",
        r"you (?:completely |totally )?(?:missed|ignored|are ignoring|keep ignoring) (?:the|my) (?:point|question)\b",
        r"i(?:'ve| have)? already (?:told you|said (?:that|so|this))\b",
        r"you(?:'ve| have)? already (?:said|told me|suggested) (?:that|this|so)\b",
        rf"that {NOT} (?:help|work|make (?:any )?sense|(?:answer|address) (?:my|the) (?:question|point)){END}",
        rf"(?:it|that|this) still (?:{NOT}|won't) (?:work|help|run|load|start|fit|answer|make sense)\b",
        rf"(?:(?:it|that|this)(?:'s| is) )?still (?:wrong|broken|not (?:working|right|correct|fixed)){END}",
        r"(?:thanks|thank you|thx) for nothing\b",
        rf"(?:how |so |totally |completely )?(?:useless|unhelpful){END}|not {VERY}helpful{END}",
    )
]
MEANT = re.compile(
    r"(?:no|nope|nah)\b[\s,.!:;–—-]*(?:sorry\b[\s,.!]*)?(?:i meant\b|i mean (?:the|a|how|what|why|when|where|which)\b|"
    rf"i asked {QUESTION}\b|i was asking {QUESTION}\b|i said the\b|not that\b)"
)
WHOLLY_AGAINST = re.compile(r"(?:please )?try again(?: please)?|wrong|incorrect|wrong answer|bad (?:bot|answer)")
THANKS = re.compile(
    r"(?:(?:ok|okay|many|big|super|and|oh|yes|a million) )*(?:thanks|thank you|thank u|thankyou|thx|tysm|cheers|"
    r"much appreciated|i appreciate (?:it|that|your help))"
    r"(?=\W*$| ?[^\w\s]| (?:so|very|a lot|a ton|loads|again|for|that|this|i|it|now|man|mate|sir|and|you)\b)"
)
NO_THANKS = re.compile(r"(?:no|nope|nah)\b[\s,.]*(?:thanks|thank you|thx)\b")
THANKS_ELSEWHERE = re.compile(
    r"in advance\b|\bfor (?:nothing|trying|waiting|the (?:offer|reminder|invitation|invite))\b"
)
FOR = [
    re.compile(pattern)
    for pattern in (
        rf"that(?:'s|s| is| was) {VERY}{BETTER}{END}",
        rf"(?:that|it|this) (?:worked|fixed it|solved it|did it|did the trick|helped|helps){END}",
        rf"(?:(?:it|that) works|works)(?: now| perfectly| great| fine){END}",
        rf"you(?:'re| are) (?:a lifesaver|a life saver|the best|awesome|amazing|very helpful|so helpful){END}",
        rf"(?:good|great|excellent|nice|perfect|brilliant) (?:answer|bot|job|work|explanation|reply|response){END}",
        rf"(?:well done|i love (?:it|this|that)|love (?:it|this)|{WISHED}){END}",
    )
]
WHOLLY_FOR = re.compile(
    rf"{VERY}(?:perfect|excellent|brilliant|awesome|amazing|fantastic|wonderful|helpful|spot on|it works|works)"
)
THUMBS = {"👍": 1.0, "❤": 1.0, "👌": 1.0, "🎉": 1.0, "👎": -1.0}
SKIN = "🏻🏼🏽🏾🏿\ufe0f!."
FILLER = set(
    re.findall(
        r"\w+",
        "a an the please again so and but just hello hi hey ok okay well i me my we you can could would will do does "
        "did is are am was to of it that this um uh tell know want asked said meant repeat question",
    )
)


@dataclass(frozen=True)
class Evidence:
    value: float
    rule: str  # thanks, praise, thumb, complaint, correction, repetition


def read(message: str, before: str | None = None) -> Evidence | None:
    """What the user's next message says of the reply that it follows; `before` is what that reply answered.

    Example: read("No, I meant the blue one") -> Evidence(-1.0, "correction")
    """
    plain = QUOTED.sub(" § ", message[:LONGEST].lower().replace("’", "'").replace("‘", "'")).strip()
    said = _thumb(message[:LONGEST]) or _against(plain)
    if said is None and before is not None and repeats(message, before):
        said = Evidence(-1.0, "repetition")
    return said or _for(plain)


def repeats(message: str, before: str) -> bool:
    """The same words again, but for politeness. Another word in one's place makes it another question."""
    said, again = _words(before), _words(message)
    if min(len(said), len(again)) < FEWEST_WORDS or (said - again and again - said):
        return False
    return len(said & again) / len(said | again) >= OVERLAP


def _words(text: str) -> set[str]:
    words = re.findall(r"\w+", text[:LONGEST].lower().replace("’", "").replace("'", ""))
    return {word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words} - FILLER


def _thumb(message: str) -> Evidence | None:
    values = {THUMBS.get(sign) for sign in message if not sign.isspace() and sign not in SKIN}
    value = values.pop() if len(values) == 1 else None
    return None if value is None else Evidence(value, "thumb")


def _against(plain: str) -> Evidence | None:
    """In the first two sentences, where nothing but a lead-in or thanks stands before it."""
    if WHOLLY_AGAINST.fullmatch(plain.strip(" .!")):
        return Evidence(-1.0, "complaint")
    if MEANT.match(plain):
        return Evidence(-1.0, "correction")
    for sentence in SENTENCE.findall(plain)[:2]:
        if sentence.endswith("?"):
            return None
        for clause, rest in _clauses(sentence):
            if _opens(AGAINST, clause, rest):
                return Evidence(-1.0, "complaint")
            if rest and not THANKS.match(rest):
                break
    return None


def _for(plain: str) -> Evidence | None:
    """In the first sentence, and only if it does not turn: "thanks, but …"."""
    sentences = SENTENCE.findall(plain)
    if not sentences or "§" in sentences[0] or NO_THANKS.match(plain):
        return None
    if any(TURN.search(sentence) for sentence in sentences[:2]):
        return None
    if WHOLLY_FOR.fullmatch(plain.strip(" .!")):
        return Evidence(1.0, "praise")
    clauses = _clauses(sentences[0])
    if sentences[0].endswith("?"):
        clauses = clauses[:-1]  # what is asked is not said
    for clause, rest in clauses:
        if THANKS.match(rest):
            return None if THANKS_ELSEWHERE.search(rest) else Evidence(1.0, "thanks")
        if _opens(FOR, clause, rest):
            return Evidence(1.0, "praise")
        if rest:
            return None
    return None


def _clauses(sentence: str) -> list[tuple[str, str]]:
    """Each whole, and without what only leads in to it.

    Example: "no, sorry, that's wrong" -> [("no", ""), ("sorry", ""), ("that's wrong", "that's wrong")]
    """
    clauses = [clause.strip(" .!?\t\r") for clause in CLAUSE.split(sentence)]
    return [(clause, clause[lead.end() :] if (lead := LEAD_IN.match(clause)) else clause) for clause in clauses]


def _opens(patterns: list[re.Pattern[str]], clause: str, rest: str) -> bool:
    return any(pattern.match(clause) or pattern.match(rest) for pattern in patterns)
