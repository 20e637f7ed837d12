"""The value of an arithmetic expression in plain or LaTeX notation, by math-verify. The only module that imports it.

math-verify limits its time with signals, which only the main thread can receive, and verifiers run in threads. So its
limits are off, and an expression that could take long is not evaluated: a variable, a tower of powers, a large
factorial. The value is computed numerically, never simplified.
"""

import logging
from decimal import Decimal

import regex

MAX_CHARS = 200
MAX_DIGITS = 50
MAX_EXPONENT = 1000  # the product of all exponents, so that a nested power is bounded too
PRECISION = 20  # digits

NAMES = regex.compile(r"\\(?:frac|sqrt|times|cdot|div|pi)(?![A-Za-z])")
OTHER_CHARS = regex.compile(r"[0-9.+\-*/^(){}\[\]! ]*")
EXPONENT = regex.compile(r"\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d{1,3}))(?![\d.])")
FACTORIAL = regex.compile(r"(?<![\d.])\d{1,2}!(?!!)")
MIXED_NUMBER = regex.compile(r"(?<![\d.^])(\d+)\s*(?:\s(\d+)\s*/\s*(\d+)|\\frac\{(\d+)\}\{(\d+)\})(?![\d.])")
SHORT_FRACTION = regex.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
# A product or a mixed number: "3(4)", "(2)(3)", "2 10".
AMBIGUOUS = regex.compile(r"\d\s*\(|\)\s*[\d(]|\}\s*\d|\d\s+\d")
SIGNS = {"×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "−": "-", "π": r"\pi ", "⁄": "/"}
ROOT = regex.compile(r"√\s*(\d+(?:\.\d+)?|\([^()]*\))")


def evaluate(expression: str) -> Decimal | None:
    """Return the value of an expression without variables; None if it is unreadable, ambiguous or could take long.

    Decimal points are ".", and digits are not grouped.

    Example: evaluate(r"1\\frac{3}{4}") -> Decimal("1.75")
    """
    latex = _normalise(expression)
    if not _is_bounded(latex):
        return None
    from math_verify import LatexExtractionConfig, parse  # it takes half a second and is rarely needed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    config = LatexExtractionConfig(boxed_match_priority=-1)
    values = parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if len(values) != 1 or not getattr(values[0], "is_number", False):
        return None
    try:
        value = values[0].evalf(PRECISION)
        return Decimal(str(value)) if value.is_real and value.is_finite else None
    except (ArithmeticError, TypeError, ValueError, RecursionError):
        return None


def _normalise(expression: str) -> str:
    for sign, latex in SIGNS.items():
        expression = expression.replace(sign, latex)
    expression = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", expression)
    expression = ROOT.sub(lambda match: rf"\sqrt{{{match[1].strip('()')}}}", expression)
    return str(MIXED_NUMBER.sub(_mixed_number, expression)).strip()


def _mixed_number(match: regex.Match[str]) -> str:
    whole, *parts = match.groups()
    numerator, denominator = [part for part in parts if part is not None]
    return f"({whole}+\\frac{{{numerator}}}{{{denominator}}})"


def _is_bounded(latex: str) -> bool:
    if len(latex) > MAX_CHARS or OTHER_CHARS.fullmatch(NAMES.sub("", latex)) is None:
        return False
    if AMBIGUOUS.search(latex) or any(len(digits) > MAX_DIGITS for digits in regex.findall(r"\d+", latex)):
        return False
    exponents = [int(braced or plain) for braced, plain in EXPONENT.findall(latex)]
    product = 1
    for exponent in exponents:
        product *= max(1, abs(exponent))
    return (
        len(exponents) == latex.count("^")
        and product <= MAX_EXPONENT
        and len(FACTORIAL.findall(latex)) == latex.count("!")
    )
