"""Verifiers rate replies to the prompts of a dataset by the prompt's reference. 1 is right, -1 wrong, None cannot tell.

Replies of chats have no reference and are never verified; rules rate them (`alignment.signals.rules`). Replies and
references are untrusted text: they are cut to MAX_CHARS, and patterns stop after PATTERN_SECONDS.
"""

import json
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Literal

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from pydantic import Field, field_validator
from referencing import Registry

from alignment.config.frozen_model import Frozen
from alignment.errors import AlignmentError
from alignment.signals.number_answers import is_number

ENTRY_POINTS = "attune.verifiers"
MAX_CHARS = 100_000
PATTERN_SECONDS = 1.0
MAX_COMPOSED_CHARS = 10_000  # composition is quadratic for hostile texts
MAX_JSON_DEPTH = 100
MAX_SCHEMA_CHARS = 16_384  # schemas are parsed in API requests
SCHEMA_SECONDS = 1.0
RIGHT, WRONG = 1.0, -1.0
# Not the words "a" and "I": a lower-case letter must be last, and no sentence may continue after A or I.
STATED_CHOICE = regex.compile(
    r"(?i:\b(?:answer|choice|option)\b\W{0,20}(?:(?:is|would be)\b\W{0,20})?)"
    r"([B-HJ-Z]\b|[AI]\b(?!\s+(?!is\b|because\b|as\b|since\b|for\b|and\b)[a-z])|[a-z](?=[).:,;!]|\s*$))"
)
LEADING_CHOICE = regex.compile(r"\W*([A-Za-z])(?:\W*$|[).:\]])")
PARENTHESISED_CHOICE = regex.compile(r"\(([A-Z])\)|\b([A-Z])\)")
MARKUP = regex.compile(r"\*\*|__|\$|[【】「」]|\\[()\[\]]|\\(?:text|textbf|mathrm|mathbf)(?=\s*\{)")
MAX_CHOICE_CHARS = 10_000  # of the text, from its end
BOXED_CHOICE = regex.compile(r"\\f?boxed\s*\{[\s({]*([A-Za-z])(?![A-Za-z])")
CODE_BLOCK = regex.compile(r"```(?:json)?\s*\n(.*?)```", regex.S)


class Unverifiable(AlignmentError):
    """The reference or the settings are invalid, so the reply cannot be verified."""


@dataclass(frozen=True)
class VerifierInput:
    """A reply to a prompt of a dataset. `details` are the row's other columns."""

    messages: tuple[Mapping[str, object], ...]  # the prompt
    reply: Mapping[str, object]  # the assistant's message
    reference: str | None
    finish_reason: str | None
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return str(self.reply.get("content") or "")[:MAX_CHARS]


Verifier = Callable[[VerifierInput], float | None]
Keyword = Callable[[Validator, object, object, object], Iterator[ValidationError]]  # of JSON Schema


class ReferenceVerifier(Frozen):
    """Base class of verifiers that compare the reply with the reference. Without a reference they have no opinion."""

    def __call__(self, inputs: VerifierInput) -> float | None:
        reference = (inputs.reference or "").strip()[:MAX_CHARS]
        if not reference:
            return None
        text = inputs.text
        if not text.strip():
            return WRONG
        is_right = self.is_right(_compose(text), _compose(reference))
        return None if is_right is None else RIGHT if is_right else WRONG

    def is_right(self, text: str, reference: str) -> bool | None:
        """Return whether the text gives the answer of the reference, None if that cannot be told."""
        raise NotImplementedError


class Exact(ReferenceVerifier):
    """The reply equals the reference, apart from surrounding white space."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = True

    def is_right(self, text: str, reference: str) -> bool:
        text = text.strip()
        return text.casefold() == reference.casefold() if self.ignore_case else text == reference


class Contains(ReferenceVerifier):
    """The reply contains the reference."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = True

    def is_right(self, text: str, reference: str) -> bool:
        return reference.casefold() in text.casefold() if self.ignore_case else reference in text


class Number(ReferenceVerifier):
    """The number that the reply answers is the last number of the reference: 1,234.50 is 1234.5, 3/4 is 0.75.

    A reply whose number cannot be read surely gets no reward (`alignment.signals.number_answers`).
    """

    type: Literal["number"] = "number"
    tolerance: float = Field(1e-6, ge=0, le=1, description="relative to the reference")

    def is_right(self, text: str, reference: str) -> bool | None:
        try:
            return is_number(text, reference, self.tolerance)
        except ValueError as error:
            raise Unverifiable(f"{error}: {reference[:100]!r}") from error


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
    schema_: dict[str, object] | None = Field(None, alias="schema")

    @field_validator("schema_")
    @classmethod
    def _check_schema_field(cls, schema: dict[str, object] | None) -> dict[str, object] | None:
        if schema is not None:
            _check_schema(schema)
        return schema

    def __call__(self, inputs: VerifierInput) -> float | None:
        schema = self.schema_
        if schema is None:
            if inputs.reference is None:
                return None
            parsed = _parse_json(inputs.reference)
            if not isinstance(parsed, dict):
                raise Unverifiable("the reference is not a JSON schema")
            _check_schema(parsed)
            schema = parsed
        blocks = CODE_BLOCK.findall(inputs.text)
        value = _parse_json(blocks[0] if len(blocks) == 1 else inputs.text)
        if value is NO_JSON:
            return WRONG
        try:
            with schema_time_limit():
                return RIGHT if TimedValidator(schema, registry=Registry()).is_valid(value) else WRONG
        except RecursionError as error:
            raise Unverifiable("the schema has an infinite recursion") from error
        except Exception as error:
            raise Unverifiable(f"the schema cannot be applied: {error}") from error


class Choice(ReferenceVerifier):
    """The letter that the reply chooses: boxed, alone, first as `B)`, after "the answer is", or last as `(B)`.

    A reply in which no letter is found gets no reward: it may name the right choice in other words.
    """

    type: Literal["choice"] = "choice"

    def is_right(self, text: str, reference: str) -> bool | None:
        expected, actual = read_choice(reference), read_choice(text)
        if expected is None:
            raise Unverifiable(f"the reference is not a letter: {reference[:100]!r}")
        return None if actual is None else actual == expected


class Custom(Frozen):
    """A function of your own: a name in the deployment's settings, or an entry point of `attune.verifiers`.

    It takes a VerifierInput and returns a number in [-1, 1] or None.
    """

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")


VerifierConfig = Annotated[
    Exact | Contains | Number | Regex | JsonSchema | Choice | Custom, Field(discriminator="type")
]


def read_choice(text: str) -> str | None:
    """Return the chosen letter. Example: read_choice("The answer is (B), because …") -> "B" """
    stripped = MARKUP.sub("", unicodedata.normalize("NFKC", text[-MAX_CHOICE_CHARS:])).strip()
    if boxed := BOXED_CHOICE.findall(stripped):
        return str(boxed[-1]).upper()
    if stated := STATED_CHOICE.findall(stripped):
        return str(stated[-1]).upper()
    leading = LEADING_CHOICE.match(stripped[:20])
    if leading is not None and (len(stripped) <= 20 or leading.group()[-1] in ").:]"):
        return str(leading.group(1)).upper()
    letters = [one or other for one, other in PARENTHESISED_CHOICE.findall(stripped)]
    return letters[-1] if letters else None


def _compose(text: str) -> str:
    """Return the text with composed accents, so that "é" equals "e" and an accent."""
    return unicodedata.normalize("NFC", text[:MAX_COMPOSED_CHARS]) + text[MAX_COMPOSED_CHARS:]


def _compile(pattern: str, *, ignore_case: bool) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern[:2000], regex.I if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError) as error:
        raise Unverifiable(f"the pattern is invalid: {error}") from error


def _matches(match: Callable[..., object], text: str) -> bool:
    try:
        return match(text, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        raise Unverifiable(f"the pattern took more than {PATTERN_SECONDS:g} s") from error


NO_JSON = object()


def _parse_json(text: str) -> object:
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


def _check_schema(schema: dict[str, object]) -> None:
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise Unverifiable(f"the schema has more than {MAX_SCHEMA_CHARS} characters")
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise Unverifiable(f"not a JSON schema: {getattr(error, 'message', error)}"[:300]) from error


def _pattern(validator: object, pattern: str, instance: object, schema: object) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(_compile(pattern, ignore_case=False).search, instance):
        yield ValidationError(f"{instance[:100]!r} does not match")


def _pattern_properties(
    validator: Validator, patterns: dict[str, object], instance: object, schema: object
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, below in patterns.items():
        compiled = _compile(pattern, ignore_case=False)
        for name, value in instance.items():
            if _matches(compiled.search, name):
                yield from validator.descend(value, below, path=name, schema_path=pattern)


def _with_time_limit(keyword: Keyword) -> Keyword:
    """Check the deadline before each keyword: a few mutual references can make validation endless."""

    def check(
        validator: Validator, keyword_value: object, instance: object, schema: object
    ) -> Iterator[ValidationError]:
        if time.thread_time() > _DEADLINE.get():
            raise Unverifiable(f"the schema took more than {SCHEMA_SECONDS:g} s")
        yield from keyword(validator, keyword_value, instance, schema) or ()

    return check


# In processor time of the thread: a loaded machine exceeds no limit.
_DEADLINE: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def schema_time_limit() -> Iterator[None]:
    """Give the validations of the block SCHEMA_SECONDS together. Raises Unverifiable when they are used up."""
    token = _DEADLINE.set(time.thread_time() + SCHEMA_SECONDS)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


# `re` has no time limit, and a match blocks all other threads.
_PATTERN_KEYWORDS = {"pattern": _pattern, "patternProperties": _pattern_properties}
TimedValidator = validators.extend(
    Draft202012Validator,
    {
        name: _with_time_limit(keyword)
        for name, keyword in (dict(Draft202012Validator.VALIDATORS) | _PATTERN_KEYWORDS).items()
    },
)
