"""Verifiers: what a reply is worth by the prompt's own reference. 1 is right, -1 is wrong, None says nothing.

Replies and references are anybody's text: they are cut to MOST characters, and patterns stop after PATTERN_SECONDS.
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
MOST = 100_000
PATTERN_SECONDS = 1.0
DEEPEST = 100
LARGEST_SCHEMA = 16_384  # characters: it is read where requests are answered
SCHEMA_SECONDS = 1.0
RIGHT, WRONG = 1.0, -1.0
# Groups of three are joined by a comma, a point, an apostrophe, an underscore or a (narrow) space.
NUMBER = regex.compile(r"[-+−]?\d+(?:[.,'’_\u00a0\u202f ]\d+)*(?:[eE][-+]?\d{1,3})?")
GROUPED = regex.compile(r"[1-9]\d{0,2}(?P<mark>[.,'’_\u00a0\u202f ])\d{3}(?:(?P=mark)\d{3})*")
# Not the words "a" and "I": a small letter must end what is said, and of A and I no sentence goes on.
SAID_CHOICE = regex.compile(
    r"(?i:\b(?:answer|choice|option)\b\W{0,20}(?:(?:is|would be)\b\W{0,20})?)"
    r"([B-HJ-Z]\b|[AI]\b(?!\s+(?!is\b|because\b|as\b|since\b|for\b|and\b)[a-z])|[a-z](?=[).:,;!]|\s*$))"
)
LED_CHOICE = regex.compile(r"\W*([A-Za-z])(?:\W*$|[).:\]])")
MARKED_CHOICE = regex.compile(r"\(([A-Z])\)|\b([A-Z])\)")
FENCED = regex.compile(r"```(?:json)?\s*\n(.*?)```", regex.S)


class Unverifiable(AlignmentError):
    """The reference or the settings, and not the reply, are at fault."""


@dataclass(frozen=True)
class Attempt:
    """A reply to a prompt of a dataset. `details` are the row's other columns."""

    messages: tuple[Mapping[str, Any], ...]  # the prompt
    reply: Mapping[str, Any]  # the assistant's message
    reference: str | None
    finish_reason: str | None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return str(self.reply.get("content") or "")[:MOST]


Verifier = Callable[[Attempt], float | None]


class Exact(Frozen):
    """The whole reply is the reference, but for the spaces around it."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = True

    def __call__(self, attempt: Attempt) -> float | None:
        return _same(attempt.text.strip(), _reference(attempt), self.ignore_case, str.__eq__)


class Contains(Frozen):
    """The reference stands somewhere in the reply."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = True

    def __call__(self, attempt: Attempt) -> float | None:
        return _same(attempt.text, _reference(attempt), self.ignore_case, str.__contains__)


class Number(Frozen):
    """The last number of the reply is the last number of the reference: 1,234.50 is 1234.5, 3,5 is 3.5."""

    type: Literal["number"] = "number"
    tolerance: float = Field(1e-6, ge=0, le=1, description="relative to the reference")

    def __call__(self, attempt: Attempt) -> float | None:
        reference = _reference(attempt)
        if reference is None:
            return None
        meant = last_number(reference)
        if meant is None:
            raise Unverifiable(f"the reference holds no number: {reference[:100]!r}")
        said = last_number(attempt.text)
        if said is None:
            return WRONG
        return RIGHT if abs(said - meant) <= Decimal(self.tolerance) * max(abs(meant), Decimal(1)) else WRONG


class Regex(Frozen):
    """`pattern` (the reference where there is none) is found in the reply; `whole`: it is all of the reply."""

    type: Literal["regex"] = "regex"
    pattern: str | None = Field(None, min_length=1, max_length=2000)
    whole: bool = False
    ignore_case: bool = False

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, told: str | None) -> str | None:
        if told is not None:
            _compiled(told, ignore_case=False)
        return told

    def __call__(self, attempt: Attempt) -> float | None:
        pattern = self.pattern or attempt.reference
        if pattern is None:
            return None
        compiled = _compiled(pattern, ignore_case=self.ignore_case)
        text = attempt.text.strip()
        return RIGHT if _found(compiled.fullmatch if self.whole else compiled.search, text) else WRONG


class JsonSchema(Frozen):
    """The reply, or its only fenced block, is JSON that `schema` (the reference where there is none) allows."""

    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @field_validator("schema_")
    @classmethod
    def _is_schema(cls, told: dict[str, Any] | None) -> dict[str, Any] | None:
        if told is not None:
            _check_schema(told)
        return told

    def __call__(self, attempt: Attempt) -> float | None:
        schema = self.schema_
        if schema is None:
            if attempt.reference is None:
                return None
            schema = _parsed(attempt.reference)
            if not isinstance(schema, dict):
                raise Unverifiable("the reference is no JSON schema")
            _check_schema(schema)
        fenced = FENCED.findall(attempt.text)
        value = _parsed(fenced[0] if len(fenced) == 1 else attempt.text)
        if value is NO_JSON:
            return WRONG
        _UNTIL.set(time.monotonic() + SCHEMA_SECONDS)
        try:
            return RIGHT if _Draft(schema, registry=Registry()).is_valid(value) else WRONG
        except RecursionError as error:
            raise Unverifiable("the schema refers to itself without end") from error
        except Exception as error:
            raise Unverifiable(f"the schema cannot be applied: {error}") from error


class Choice(Frozen):
    """The letter that the reply settles on: alone, first as `B)`, after "the answer is", or last as `(B)`."""

    type: Literal["choice"] = "choice"

    def __call__(self, attempt: Attempt) -> float | None:
        reference = _reference(attempt)
        if reference is None:
            return None
        meant = chosen(reference)
        if meant is None:
            raise Unverifiable(f"the reference is no letter: {reference[:100]!r}")
        return RIGHT if chosen(attempt.text) == meant else WRONG


class Custom(Frozen):
    """A function of your own, by its name in the deployment's settings or as an entry point of `attune.verifiers`.
    It takes an Attempt and returns a number in [-1, 1] or None."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")


VerifierConfig = Annotated[
    Exact | Contains | Number | Regex | JsonSchema | Choice | Custom, Field(discriminator="type")
]


def last_number(text: str) -> Decimal | None:
    """Example: last_number("That is 3 × 400 = 1,200.50 francs.") -> Decimal("1200.50")"""
    last = None
    for match in NUMBER.finditer(text[-10_000:]):
        last = match.group()
    return None if last is None else _number(last)


def _number(told: str) -> Decimal | None:
    digits = told.replace("−", "-")
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
            if not GROUPED.fullmatch(head):  # words of a list, as in "3 4": the last one counts
                return _number(body.rpartition(mark)[2] + (f"e{exponent}" if exponent else ""))
            body = head.replace(mark, "") + rest
    body = _points(body)
    try:
        return Decimal(f"{sign}{body}{f'e{exponent}' if exponent else ''}")
    except InvalidOperation:
        return None


def _points(body: str) -> str:
    """Which of "," and "." is the decimal point: the last one if there are both; one that marks groups is none."""
    if "," in body and "." in body:
        last = max(body.rfind(","), body.rfind("."))
        return body[:last].replace(",", "").replace(".", "") + "." + body[last + 1 :]
    if "," in body:
        return _grouped(body, ",") if body.count(",") > 1 or GROUPED.fullmatch(body) else body.replace(",", ".")
    return _grouped(body, ".") if body.count(".") > 1 else body


def _grouped(body: str, mark: str) -> str:
    """What is no number in groups of three is a list: its last entry counts."""
    return body.replace(mark, "") if GROUPED.fullmatch(body) else body.rpartition(mark)[2]


def chosen(text: str) -> str | None:
    """Example: chosen("The answer is (B), because …") -> "B" """
    said = text.strip()
    if told := SAID_CHOICE.findall(said):
        return str(told[-1]).upper()
    if (led := LED_CHOICE.match(said[:20])) is not None and (len(said) <= 20 or led.group()[-1] in ").:]"):
        return led.group(1).upper()
    marked = [one or other for one, other in MARKED_CHOICE.findall(said)]
    return marked[-1] if marked else None


def _reference(attempt: Attempt) -> str | None:
    reference = (attempt.reference or "").strip()[:MOST]
    return reference or None


def _same(text: str, reference: str | None, ignore_case: bool, compare: Callable[[str, str], bool]) -> float | None:
    if reference is None:
        return None
    if ignore_case:
        text, reference = text.casefold(), reference.casefold()
    return RIGHT if compare(text, reference) else WRONG


def _compiled(pattern: str, *, ignore_case: bool) -> Any:
    try:
        return regex.compile(pattern[:2000], regex.I if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError) as error:
        raise Unverifiable(f"the pattern cannot be read: {error}") from error


def _found(match: Callable[..., Any], text: str) -> bool:
    try:
        return match(text, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        raise Unverifiable(f"the pattern took more than {PATTERN_SECONDS:g} s") from error


NO_JSON = object()


def _parsed(text: str) -> Any:
    """NO_JSON for what is none, or is nested too deep."""
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if depth > DEEPEST:
            return NO_JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NO_JSON


def _check_schema(schema: dict[str, Any]) -> None:
    if len(json.dumps(schema)) > LARGEST_SCHEMA:
        raise Unverifiable(f"the schema holds more than {LARGEST_SCHEMA} characters")
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise Unverifiable(f"no JSON schema: {getattr(error, 'message', error)}"[:300]) from error


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _found(_compiled(pattern, ignore_case=False).search, instance):
        yield ValidationError(f"{instance[:100]!r} does not match")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, below in patterns.items():
        compiled = _compiled(pattern, ignore_case=False)
        for name, value in instance.items():
            if _found(compiled.search, name):
                yield from validator.descend(value, below, path=name, schema_path=pattern)


def _timed(keyword: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    """A few references to one another are enough for a schema that is never through."""

    def check(validator: Any, told: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _UNTIL.get():
            raise Unverifiable(f"the schema took more than {SCHEMA_SECONDS:g} s")
        yield from keyword(validator, told, instance, schema) or ()

    return check


_UNTIL: ContextVar[float] = ContextVar("until", default=float("inf"))
# `re` knows no time limit, and its matches let no other thread run.
_OWN = {"pattern": _pattern, "patternProperties": _pattern_properties}
_Draft = validators.extend(
    Draft202012Validator,
    {name: _timed(keyword) for name, keyword in (dict(Draft202012Validator.VALIDATORS) | _OWN).items()},
)
