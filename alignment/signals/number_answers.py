"""The number that a text gives as its answer, and whether it is that of the reference: yes, no, or "cannot tell".

People and models write one number in many ways: 7250, 7,250, 7.250, 7{,}250, ٧٢٥٠, 29/4 · 1000, 7.25 thousand. A reply
is wrong only if its answer was surely read. Where a reading is ambiguous, or the expected number stands near by, the
answer is unknown. Expressions with operators are evaluated by `alignment.signals.math_expressions`.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

import regex

from alignment.signals import math_expressions

MAX_CHARS = 10_000  # of the text, from its end
MAX_DIGITS = 100
MAX_NEAR = 20  # numbers beside the answer that are compared too
EXACT = Decimal("1e-12")  # relative rounding of an evaluated expression

MARKS = ".,'’_\u00a0\u202f "
NUMBER = regex.compile(rf"\d+(?:[{MARKS}]\d+)*(?:[eE][-+]?\d{{1,3}}(?![\d.]))?|\.\d+")
THOUSANDS = regex.compile(r"[1-9]\d{0,2}(?P<mark>\D)\d{3}(?:(?P=mark)\d{3})*")
OTHER_GROUPS = regex.compile(  # of India: 12,34,567; of East Asia: 1,2345,6789
    r"[1-9]\d?(?P<mark>\D)\d{2}(?:(?P=mark)\d{2})*(?P=mark)\d{3}|[1-9]\d{0,3}(?P<mark4>\D)\d{4}(?:(?P=mark4)\d{4})+"
)
# Operators, brackets and the few commands of LaTeX that an expression consists of.
RUN = regex.compile(
    rf"(?:\\(?:frac|sqrt|times|cdot|div|pi|approx|approxeq)(?![A-Za-z])|[\d{MARKS}^+\-*/×÷·⋅⁄=≈√π!(){{}}:]"
    r"|(?<=\d)[eE][-+]?\d)+"
)
HAS_NUMBER = regex.compile(r"\d|π|\\pi")
EQUALS = regex.compile(r"=|≈|\\approx(?:eq)?")
LIST_COMMA = regex.compile(r"[,;:.]\s+|;")
# m^2, H2O and x_1, but neither \\sqrt2 nor 1e3.
NOT_A_NUMBER = regex.compile(
    r"(?<=[\p{L}\ufffc])(?<!\\\p{L}+)(?:\s*\^\s*\{?\s*-?\d+\s*\}?|(?<!\d[eE])[-_]?\{?\d[\d.]*\}?)"
)
AFTER_VARIABLE = regex.compile(r"(?<=[\p{L}\ufffc])(?:\s*[*/×÷·^]|\s*[-+]\s|[-+])")  # x + 1, but not "is -7"
UNREADABLE = "?"
BOXED = regex.compile(r"\\f?boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
ANCHOR = regex.compile(
    r"####|\b(?:answer|result|antwort|ergebnis|respuesta|resultado|réponse|résultat|risposta|risultato|resposta)\b"
    r"[^.!?\n\d]{0,40}?(?:\bis\b|\bist\b|\bes\b|\best\b|\bè\b|\bé\b|:|=)|答案|答え",
    regex.I,
)
SENTENCE_END = regex.compile(r"(?<=[.!?。])\s|\n")
FACTOR = regex.compile(r"[\s{}~]*(%|‰|percent\b|per cent\b|[^\W\d_]+)", regex.I)
UNIT = regex.compile(r"[\s{}~]*([^\W\d_]+|[€$£¥₹°%])")
FACTORS = {
    **dict.fromkeys(("%", "percent", "per cent", "prozent", "pct"), (Decimal("0.01"),)),
    "‰": (Decimal("0.001"),),
    **dict.fromkeys(("k", "thousand", "thousands", "tausend", "mille", "mil", "mila", "千"), (Decimal(10**3),)),
    **dict.fromkeys(("dozen", "dozens", "dutzend"), (Decimal(12),)),
    **dict.fromkeys(("hundred", "hundreds", "hundert", "百"), (Decimal(100),)),
    **dict.fromkeys(("万", "萬"), (Decimal(10**4),)),
    **dict.fromkeys(("lakh", "lakhs"), (Decimal(10**5),)),
    **dict.fromkeys(("crore", "crores"), (Decimal(10**7),)),
    **dict.fromkeys(("億", "亿"), (Decimal(10**8),)),
    **dict.fromkeys(
        ("million", "millions", "mio", "mn", "millionen", "millón", "millones", "milhão", "milhões", "milioni"),
        (Decimal(10**6),),
    ),
    **dict.fromkeys(("milliard", "milliards", "milliarde", "milliarden", "mrd", "bn"), (Decimal(10**9),)),
    **dict.fromkeys(("billion", "billions"), (Decimal(10**9), Decimal(10**12))),  # the short scale, then the long one
}
NUMBER_WORD = regex.compile(
    r"\b(?:zero|none|nothing|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|"
    r"eigh|nine)teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion|dozen|half|"
    r"halves|thirds?|quarters?)\b|[零〇一二三四五六七八九十百千万億亿兆两]",
    regex.I,
)
UNIT_RATIOS = {Decimal(ratio) for ratio in (24, 60, 1440, 3600, 86400)}
SMALL_GAP = regex.compile(
    r"\\[,;:!> ]|\\(?:thinspace|quad|nobreakspace)(?![A-Za-z])|~|\{\s\}|[\u2007-\u200a\u2009\u205f]"
)
TEXT_COMMAND = regex.compile(r"\\(?:text|mathrm|mathbf|textbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


@dataclass(frozen=True)
class Reading:
    """A number or an expression as it stands in a text.

    `factors` are those of a word or sign after it, as in 12 %, `unit` is the word after it, and `sentence` the place
    where its sentence begins.
    """

    text: str
    factors: tuple[Decimal, ...]
    unit: str
    sentence: int

    @cached_property
    def values(self) -> tuple[Decimal, ...]:
        """Return the possible values, the most likely first: 7.250 is 7.25, or 7250 in Germany. None if unreadable."""
        return _values(self.text)


def is_number(text: str, reference: str, tolerance: float) -> bool | None:
    """Return whether the number that the text answers is that of the reference; None if that is unsure.

    `tolerance` is relative to the reference. Raises ValueError if the reference has no readable number.

    Example: is_number("It costs 7{,}250 francs", "7250", 0) -> True; is_number("It costs 7.250", "7250", 0) -> None
    """
    expected = next(reversed(read_numbers(reference)), None)
    if expected is None or not expected.values:
        raise ValueError("the reference has no number that can be read")
    boxes = BOXED.findall(normalise(text))
    scope = boxes[-1] if boxes else normalise(text)
    readings = read_numbers(scope)
    if not readings:
        return None
    stated = readings[-1] if boxes else _stated(scope, readings)
    verdict = _compare(stated, expected, tolerance)
    if verdict is not False:
        return verdict
    last = readings[-1]
    near = [one for one in readings if one.sentence in (stated.sentence, last.sentence) and one is not stated]
    if len(near) > MAX_NEAR or any(_compare(one, expected, tolerance) is not False for one in near):
        return None
    return None if NUMBER_WORD.search(scope, last.sentence) else False


def normalise(text: str) -> str:
    """Return the end of the text with ASCII digits and signs, and without the LaTeX that only sets type."""
    text = "".join(_ascii_digit(character) for character in text[-MAX_CHARS:])
    for old, new in (("{,}", ","), ("{.}", "."), ("\\%", "%"), ("\\$", "$"), ("٫", "."), ("٬", ","), ("−", "-")):
        text = text.replace(old, new)
    text = regex.sub(r"(?<![\w)])[–﹣－](?=\d)", "-", text)
    text = SMALL_GAP.sub(" ", text)
    text = TEXT_COMMAND.sub(r" \1 ", text)
    text = regex.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = regex.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]|\$(?!\d)|(?<=\d)\$|\*\*", " ", text)
    text = regex.sub(r"\^\s*\{?\s*\\circ\s*\}?|°", " degrees ", text)
    text = regex.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    return str(regex.sub(r"(?<=\d)\{(?=[,.])|(?<=[,.])\}(?=\d)", "", text))


def read_numbers(text: str) -> list[Reading]:
    """Return the numbers and expressions of the text, in their order. Of an equation the last side counts."""
    text = normalise(text)
    text = NOT_A_NUMBER.sub(lambda match: "\ufffc" * len(match[0]), text)
    starts = _sentence_starts(text)
    readings: list[Reading] = []
    for run in RUN.finditer(text):
        if not HAS_NUMBER.search(run[0]):
            continue
        sentence = starts[bisect_right(starts, run.start()) - 1]
        factor, unit = FACTOR.match(text, run.end()), UNIT.match(text, run.end())
        factors = FACTORS.get(factor[1].lower(), ()) if factor else ()
        name = unit[1].casefold().rstrip("s") if unit else ""
        sides = [side for side in EQUALS.split(run[0]) if HAS_NUMBER.search(side)]
        *before, last = [part for part in LIST_COMMA.split(sides[-1]) if HAS_NUMBER.search(part)]
        if AFTER_VARIABLE.match(text, run.start()) and not EQUALS.search(run[0]):
            last = UNREADABLE
        readings += [Reading(part, (), "", sentence) for part in before]
        readings.append(Reading(last, factors, name, sentence))
    return readings


def _stated(text: str, readings: Sequence[Reading]) -> Reading:
    """Return the last number of the last sentence that states an answer, else the last number of the text."""
    anchors = [match.start() for match in ANCHOR.finditer(text)]
    sentence = max((start for start in _sentence_starts(text) if anchors and start <= anchors[-1]), default=None)
    return next((one for one in reversed(readings) if one.sentence == sentence), readings[-1])


def _sentence_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in SENTENCE_END.finditer(text))]


def _values(part: str) -> tuple[Decimal, ...]:
    """Return the possible values of a number or an expression, the most likely first; none if it is unreadable."""
    outer = f"{MARKS}:" if regex.search(r"[\\^]", part) else f"{MARKS}:{{}}"
    part = regex.sub(r"^\.(?!\d)", "", part.rstrip(outer).lstrip(outer.replace(".", "")))
    part = part.strip("()") if part.count("(") != part.count(")") or regex.fullmatch(r"\([^()]*\)", part) else part
    signed = regex.fullmatch(r"([-+]?)\s*(.+)", part.strip())
    if signed is None or len(part) > MAX_DIGITS:
        return ()
    if NUMBER.fullmatch(signed[2]):
        factor = -1 if signed[1] == "-" else 1
        return tuple(factor * value for value in read_plain(signed[2]))
    if ":" in part or regex.search(r"\d-\d", part):
        return ()  # a time or a ratio; a range, a date or a telephone number
    plain = regex.sub(NUMBER, _canonical, part)
    value = None if UNREADABLE in plain else math_expressions.evaluate(plain)
    return () if value is None else (value,)


def _canonical(match: regex.Match[str]) -> str:
    if regex.fullmatch(r"\d+ \d+", match[0]):
        return str(match[0])  # the beginning of a mixed number
    values = read_plain(match[0])
    return f"{values[0]:f}" if len(values) == 1 else UNREADABLE


def read_plain(body: str) -> tuple[Decimal, ...]:
    """Return the possible values of digits with group marks and a decimal point, the most likely first.

    Example: read_plain("1,234") -> (1234, 1.234); read_plain("1.2.3") -> ()
    """
    body, _, exponent = body.lower().partition("e")
    if len(body) > MAX_DIGITS:
        return ()
    marks = regex.findall(r"\D", body)
    texts = _spellings(body, marks)
    return tuple(Decimal(text + (f"e{exponent}" if exponent else "")) for text in texts)


def _spellings(body: str, marks: list[str]) -> tuple[str, ...]:
    joined = "".join(character for character in body if character.isdigit())
    if not marks:
        return (joined,)
    point = marks[-1] if marks[-1] in ".," and marks.count(marks[-1]) == 1 else ""
    if point and len(marks) == 1:
        decimal = body.replace(point, ".")
        if THOUSANDS.fullmatch(body):
            return (joined, decimal) if point == "," else (decimal, joined)
        return (decimal, joined) if regex.fullmatch(r"[1-9]\d{0,3}\D\d{4}", body) else (decimal,)
    whole, _, decimals = body.rpartition(point) if point else (body, "", "")
    if not (THOUSANDS.fullmatch(whole) or OTHER_GROUPS.fullmatch(whole)):
        return ()
    digits = "".join(character for character in whole if character.isdigit())
    return (f"{digits}.{decimals}",) if point else (digits,)


def _compare(actual: Reading, expected: Reading, tolerance: float) -> bool | None:
    """Return True if the first readings are equal, None if others are or may be, else False."""
    if not actual.values or not expected.values:
        return None

    def is_close(one: Decimal, other: Decimal) -> bool:
        return abs(one - other) <= max(Decimal(tolerance), EXACT) * max(abs(other), Decimal(1))

    def scaled(reading: Reading, other: Reading) -> tuple[Decimal, ...]:
        value = reading.values[0]
        if not reading.factors or reading.factors == other.factors:
            return (value,)
        return (*(value * factor for factor in reading.factors), *([] if other.factors else [value]))

    pairs = [(one, other) for one in scaled(actual, expected) for other in scaled(expected, actual)]
    if any(is_close(one, other) for one, other in pairs):
        return True
    if any(is_close(one, other) for one in actual.values for other in expected.values):
        return None
    if actual.unit == expected.unit or actual.factors or expected.factors:
        return False
    # Different units would have to be converted; a single one may be that of the other number too.
    needs_conversion = bool(actual.unit and expected.unit) or _is_unit_ratio(actual.values[0], expected.values[0])
    return None if needs_conversion else False


def _is_unit_ratio(one: Decimal, other: Decimal) -> bool:
    if not one or not other:
        return False
    ratio = (max(abs(one), abs(other)) / min(abs(one), abs(other))).normalize()
    return ratio in UNIT_RATIOS or (ratio != 1 and ratio.as_tuple().digits == (1,))


def _ascii_digit(character: str) -> str:
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.name(character, "").startswith("VULGAR FRACTION"):
        return f" {unicodedata.normalize('NFKC', character)}".replace("⁄", "/")
    return character
