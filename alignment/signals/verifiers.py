"""Verifiers: rewards from the reference of a prompt. 1 is right, -1 is wrong, None is no opinion.

Replies and references are untrusted text: they are cut to MAX_CHARS, and patterns stop after PATTERN_SECONDS.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, ValidationError
from pydantic import Field, field_validator
from referencing import Registry

from alignment.config.algorithm import Frozen
from alignment.errors import AlignmentError

ENTRY_POINTS = "attune.verifiers"
MAX_CHARS = 100_000
PATTERN_SECONDS = 1.0
MAX_JSON_DEPTH = 100
MAX_SCHEMA_CHARS = 16_384  # schemas are parsed in API requests
SCHEMA_SECONDS = 1.0
RIGHT, WRONG = 1.0, -1.0
# Groups of three digits are joined by a comma, a point, an apostrophe, an underscore or a (narrow) space.
NUMBER = regex.compile(r"[-+−]?\d+(?:[.,'’_\u00a0\u202f ]\d+)*(?:[eE][-+]?\d{1,3})?")
GROUPED = regex.compile(r"[1-9]\d{0,2}(?P<mark>[.,'’_\u00a0\u202f ])\d{3}(?:(?P=mark)\d{3})*")
# Not the words "a" and "I": a lower-case letter must be last, and no sentence may continue after A or I.
STATED_CHOICE = regex.compile(
    r"(?i:\b(?:answer|choice|option)\b\W{0,20}(?:(?:is|would be)\b\W{0,20})?)"
    r"([B-HJ-Z]\b|[AI]\b(?!\s+(?!is\b|because\b|as\b|since\b|for\b|and\b)[a-z])|[a-z](?=[).:,;!]|\s*$))"
)
LEADING_CHOICE = regex.compile(r"\W*([A-Za-z])(?:\W*$|[).:\]])")
PARENTHESISED_CHOICE = regex.compile(r"\(([A-Z])\)|\b([A-Z])\)")
CODE_BLOCK = regex.compile(r"```(?:json)?\s*\n(.*?)```", regex.S)


class Unverifiable(AlignmentError):
    """The reference or the settings are invalid, so the reply cannot be verified."""


@dataclass(frozen=True)
class VerifierInput:
    """A reply to a prompt of a dataset. `details` are the row's other columns."""

    messages: tuple[Mapping[str, Any], ...]  # the prompt
    reply: Mapping[str, Any]  # the assistant's message
    reference: str | None
    finish_reason: str | None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return str(self.reply.get("content") or "")[:MAX_CHARS]


Verifier = Callable[[VerifierInput], float | None]


class Exact(Frozen):
    """The reply equals the reference, apart from surrounding white space."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = True

    def __call__(self, inputs: VerifierInput) -> float | None:
        return _compare(inputs.text.strip(), _reference(inputs), self.ignore_case, str.__eq__)


class Contains(Frozen):
    """The reply contains the reference."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = True

    def __call__(self, inputs: VerifierInput) -> float | None:
        return _compare(inputs.text, _reference(inputs), self.ignore_case, str.__contains__)


class Number(Frozen):
    """The last number of the reply equals the last number of the reference: 1,234.50 is 1234.5, 3,5 is 3.5."""

    type: Literal["number"] = "number"
    tolerance: float = Field(1e-6, ge=0, le=1, description="relative to the reference")

    def __call__(self, inputs: VerifierInput) -> float | None:
        reference = _reference(inputs)
        if reference is None:
            return None
        expected = last_number(reference)
        if expected is None:
            raise Unverifiable(f"the reference has no number: {reference[:100]!r}")
        actual = last_number(inputs.text)
        if actual is None:
            return WRONG
        return RIGHT if abs(actual - expected) <= Decimal(self.tolerance) * max(abs(expected), Decimal(1)) else WRONG


class Regex(Frozen):
    """The reply has a match of `pattern` (by default the reference). With `whole` the match must be the whole reply."""

    type: Literal["regex"] = "regex"
    pattern: str | None = Field(None, min_length=1, max_length=2000)
    whole: bool = False
    ignore_case: bool = False

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            _compile(pattern, ignore_case=False)
        return pattern

    def __call__(self, inputs: VerifierInput) -> float | None:
        pattern = self.pattern or inputs.reference
        if pattern is None:
            return None
        compiled = _compile(pattern, ignore_case=self.ignore_case)
        text = inputs.text.strip()
        return RIGHT if _matches(compiled.fullmatch if self.whole else compiled.search, text) else WRONG


class JsonSchema(Frozen):
    """The reply, or its only fenced code block, is JSON that is valid for `schema` (by default the reference)."""

    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @field_validator("schema_")
    @classmethod
    def _check_schema_field(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            _check_schema(schema)
        return schema

    def __call__(self, inputs: VerifierInput) -> float | None:
        schema = self.schema_
        if schema is None:
            if inputs.reference is None:
                return None
            schema = _parse_json(inputs.reference)
            if not isinstance(schema, dict):
                raise Unverifiable("the reference is not a JSON schema")
            _check_schema(schema)
        blocks = CODE_BLOCK.findall(inputs.text)
        value = _parse_json(blocks[0] if len(blocks) == 1 else inputs.text)
        if value is NO_JSON:
            return WRONG
        _DEADLINE.set(time.monotonic() + SCHEMA_SECONDS)
        try:
            return RIGHT if _TimedValidator(schema, registry=Registry()).is_valid(value) else WRONG
        except RecursionError as error:
            raise Unverifiable("the schema has an infinite recursion") from error
        except Exception as error:
            raise Unverifiable(f"the schema cannot be applied: {error}") from error


class Choice(Frozen):
    """The letter that the reply chooses: alone, first as `B)`, after "the answer is", or last as `(B)`."""

    type: Literal["choice"] = "choice"

    def __call__(self, inputs: VerifierInput) -> float | None:
        reference = _reference(inputs)
        if reference is None:
            return None
        expected = read_choice(reference)
        if expected is None:
            raise Unverifiable(f"the reference is not a letter: {reference[:100]!r}")
        return RIGHT if read_choice(inputs.text) == expected else WRONG


class Custom(Frozen):
    """A function of your own: a name in the deployment's settings, or an entry point of `attune.verifiers`.

    It takes a VerifierInput and returns a number in [-1, 1] or None.
    """

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")


VerifierConfig = Annotated[
    Exact | Contains | Number | Regex | JsonSchema | Choice | Custom, Field(discriminator="type")
]


def last_number(text: str) -> Decimal | None:
    """Return the last number in the text.

    Example: last_number("That is 3 × 400 = 1,200.50 francs.") -> Decimal("1200.50")
    """
    last = None
    for match in NUMBER.finditer(text[-10_000:]):
        last = match.group()
    return None if last is None else _parse_number(last)


def _parse_number(text: str) -> Decimal | None:
    digits = text.replace("−", "-")
    mantissa, exponent = digits, ""
    for letter in "eE":
        if letter in mantissa:
            mantissa, _, exponent = mantissa.partition(letter)
    sign, body = (mantissa[0], mantissa[1:]) if mantissa[0] in "-+" else ("", mantissa)
    for mark in "'’_\u00a0\u202f ":
        if mark in body:
            head, rest = body, ""
            for point in ".,":
                if point in body.rpartition(mark)[2]:
                    head, _, rest = body.rpartition(point)
                    rest = "." + rest
                    break
            if not GROUPED.fullmatch(head):  # items of a list, as in "3 4": the last one counts
                return _parse_number(body.rpartition(mark)[2] + (f"e{exponent}" if exponent else ""))
            body = head.replace(mark, "") + rest
    body = _normalise_decimal_point(body)
    try:
        return Decimal(f"{sign}{body}{f'e{exponent}' if exponent else ''}")
    except InvalidOperation:
        return None


def _normalise_decimal_point(body: str) -> str:
    """Return the digits with "." as decimal point. If there are both "," and ".", the last one is the decimal point."""
    if "," in body and "." in body:
        last = max(body.rfind(","), body.rfind("."))
        return body[:last].replace(",", "").replace(".", "") + "." + body[last + 1 :]
    if "," in body:
        return _join_groups(body, ",") if body.count(",") > 1 or GROUPED.fullmatch(body) else body.replace(",", ".")
    return _join_groups(body, ".") if body.count(".") > 1 else body


def _join_groups(body: str, mark: str) -> str:
    """Remove group separators. Digits that are not in groups of three are a list, whose last item is returned."""
    return body.replace(mark, "") if GROUPED.fullmatch(body) else body.rpartition(mark)[2]


def read_choice(text: str) -> str | None:
    """Return the chosen letter. Example: read_choice("The answer is (B), because …") -> "B" """
    stripped = text.strip()
    if stated := STATED_CHOICE.findall(stripped):
        return str(stated[-1]).upper()
    leading = LEADING_CHOICE.match(stripped[:20])
    if leading is not None and (len(stripped) <= 20 or leading.group()[-1] in ").:]"):
        return leading.group(1).upper()
    letters = [one or other for one, other in PARENTHESISED_CHOICE.findall(stripped)]
    return letters[-1] if letters else None


def _reference(inputs: VerifierInput) -> str | None:
    reference = (inputs.reference or "").strip()[:MAX_CHARS]
    return reference or None


def _compare(text: str, reference: str | None, ignore_case: bool, compare: Callable[[str, str], bool]) -> float | None:
    if reference is None:
        return None
    if ignore_case:
        text, reference = text.casefold(), reference.casefold()
    return RIGHT if compare(text, reference) else WRONG


def _compile(pattern: str, *, ignore_case: bool) -> Any:
    try:
        return regex.compile(pattern[:2000], regex.I if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError) as error:
        raise Unverifiable(f"the pattern is invalid: {error}") from error


def _matches(match: Callable[..., Any], text: str) -> bool:
    try:
        return match(text, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        raise Unverifiable(f"the pattern took more than {PATTERN_SECONDS:g} s") from error


NO_JSON = object()


def _parse_json(text: str) -> Any:
    """Parse JSON. Return NO_JSON for invalid or too deeply nested text."""
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_JSON_DEPTH:
            return NO_JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NO_JSON


def _check_schema(schema: dict[str, Any]) -> None:
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise Unverifiable(f"the schema has more than {MAX_SCHEMA_CHARS} characters")
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise Unverifiable(f"not a JSON schema: {getattr(error, 'message', error)}"[:300]) from error


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(_compile(pattern, ignore_case=False).search, instance):
        yield ValidationError(f"{instance[:100]!r} does not match")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, below in patterns.items():
        compiled = _compile(pattern, ignore_case=False)
        for name, value in instance.items():
            if _matches(compiled.search, name):
                yield from validator.descend(value, below, path=name, schema_path=pattern)


def _with_time_limit(keyword: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    """Check the deadline before each keyword: a few mutual references can make validation endless."""

    def check(validator: Any, keyword_value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _DEADLINE.get():
            raise Unverifiable(f"the schema took more than {SCHEMA_SECONDS:g} s")
        yield from keyword(validator, keyword_value, instance, schema) or ()

    return check


_DEADLINE: ContextVar[float] = ContextVar("deadline", default=float("inf"))
# `re` has no time limit, and a match blocks all other threads.
_PATTERN_KEYWORDS = {"pattern": _pattern, "patternProperties": _pattern_properties}
_TimedValidator = validators.extend(
    Draft202012Validator,
    {
        name: _with_time_limit(keyword)
        for name, keyword in (dict(Draft202012Validator.VALIDATORS) | _PATTERN_KEYWORDS).items()
    },
)
