"""What pydantic finds wrong, in terms of the JSON that a client sent: the place and a sentence.

pydantic puts the alternatives of a union into an error's path ("messages.0.content.str") and names Python's types in
its messages. Both are left out here: the path is followed through the model's schema, where unions are known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from alignment.extensions import nearest_name

MAX_PART_CHARS = 100  # of a name that the client chose
KEY = "[key]"  # pydantic's last part for a name within a free table
# Instead of messages that name types or functions of Python.
MESSAGES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "Input should be an object"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), "Input should be a list"),
    "missing": "Field required",
    **dict.fromkeys(("union_tag_not_found", "union_tag_invalid"), "Input has none of the forms that are allowed here"),
}
PREFIXES = {"Value error, ": "", "Dictionary should": "Object should", "Tuple should": "List should"}
Schema = Mapping[str, Any]  # one of pydantic-core's typed dictionaries
Definitions = dict[str, Schema]


@dataclass(frozen=True)
class Problem:
    """The first thing that is wrong. `place` is the path in the body, such as "messages.0.content"; it may be empty."""

    place: str
    sentence: str
    is_unknown_name: bool


@dataclass(frozen=True)
class _Located:
    """An error with its path in the body, and where in pydantic's path the alternatives of unions stand."""

    details: ErrorDetails
    place: tuple[str | int, ...]
    unions: tuple[int, ...]

    @property
    def loc(self) -> tuple[str | int, ...]:
        return self.details["loc"]


def find_problem(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> Problem:
    """Return the first problem. `errors` holds all errors of a body that was validated as `model`."""
    chosen = _choose([_locate(details, model) for details in errors])
    place = ".".join(str(part)[:MAX_PART_CHARS] for part in chosen[0].place)
    if chosen[0].details["type"] == "extra_forbidden":
        return Problem(place, f"Unknown parameter: '{place}'.", True)
    messages = list(dict.fromkeys(describe(error.details) for error in chosen))
    sentence = messages[0] + "".join(f" or {message.removeprefix('Input should be ')}" for message in messages[1:])
    return Problem(place, f"{place}: {sentence}" if place else sentence, False)


def describe(details: ErrorDetails) -> str:
    """Return an error's message without words of pydantic or Python."""
    if details["loc"][-1:] == (KEY,):
        return f"this name is not allowed here: {details['msg']}"
    if _discriminator(details) is not None:
        context = details.get("ctx", {})
        if "tag" not in context:
            return MESSAGES["missing"]
        tag, expected = str(context["tag"])[:MAX_PART_CHARS], str(context["expected_tags"])
        near = nearest_name(tag, [name.strip("'") for name in expected.split(", ")])
        return f"Input should be one of {expected}, not '{tag}'" + (f"; did you mean '{near}'?" if near else "")
    message = MESSAGES.get(details["type"], details["msg"])
    return (
        message.replace("Dictionary should", "Object should")
        .replace("Tuple should", "List should")
        .removeprefix("Value error, ")
    )


def find_place(details: ErrorDetails, model: type[BaseModel]) -> tuple[str | int, ...]:
    """Return the path in the body that was validated as `model`, without the alternatives of unions."""
    return _locate(details, model).place


def parameter_name(details: ErrorDetails) -> str:
    """Return the name of a parameter of an address or of a header, with the index of one of its values."""
    _, name, *rest = details["loc"]
    return ".".join(str(part) for part in (name, *rest) if part is name or isinstance(part, int))


def _discriminator(details: ErrorDetails) -> str | None:
    """Return the field by which a union could not choose its alternative; None where a function chooses."""
    name = str(details.get("ctx", {}).get("discriminator", ""))
    return name.strip("'") if name.startswith("'") else None


def _locate(details: ErrorDetails, model: type[BaseModel]) -> _Located:
    place: list[str | int] = []
    unions = []
    definitions: Definitions = {}
    schemas = [*_resolve(model.__pydantic_core_schema__, definitions)]
    for index, part in enumerate(details["loc"]):
        if part == KEY:
            break
        if any(schema["type"] == "tagged-union" and part in schema["choices"] for schema in schemas):
            schemas = [schema["choices"][part] for schema in schemas if schema["type"] == "tagged-union"]
        elif any(schema["type"] == "union" for schema in schemas):
            unions.append(index)
            schemas = [choice for schema in schemas for choice in _choices(schema)]
        else:
            place.append(part)
            schemas = [child for schema in schemas for child in _children(schema, part)]
        schemas = [plain for schema in schemas for plain in _resolve(schema, definitions)]
    if (name := _discriminator(details)) is not None:
        place.append(name)
    return _Located(details, tuple(place), tuple(unions))


def _choose(errors: list[_Located], start: int = 0) -> list[_Located]:
    """Return the first error, or those of all alternatives at its place if the value fits none of them.

    Of the alternatives of a union, that one counts whose errors lie inside of the value: its type is the value's.
    """
    first = errors[0]
    at = next((index for index in first.unions if index >= start), None)
    if at is None:
        return [first]
    by_alternative: dict[str | int, list[_Located]] = {}
    for error in errors:
        if error.loc[:at] == first.loc[:at] and len(error.loc) > at:
            by_alternative.setdefault(error.loc[at], []).append(error)
    for alternative in by_alternative.values():
        if all(len(error.loc) > at + 1 or error.details["type"] == "value_error" for error in alternative):
            return _choose(alternative, at + 1)
    return [alternative[0] for alternative in by_alternative.values()]


def _resolve(schema: Schema, definitions: Definitions) -> Iterator[Schema]:
    """Yield the schemas of values within schemas that add nothing to an error's path."""
    match schema["type"]:
        case "definitions":
            definitions.update({definition["ref"]: definition for definition in schema["definitions"]})
            inner = [schema["schema"]]
        case "definition-ref":
            inner = [definitions[schema["schema_ref"]]]
        case "union" if len(schema["choices"]) == 1:
            inner = [*_choices(schema)]
        case "chain":
            inner = schema["steps"]
        case "json-or-python":
            inner = [schema["json_schema"]]
        case "lax-or-strict":
            inner = [schema["lax_schema"]]
        case _ if "schema" in schema:
            inner = [schema["schema"]]
        case _:
            yield schema
            return
    for each in inner:
        yield from _resolve(each, definitions)


def _choices(schema: Schema) -> Iterator[Schema]:
    for choice in schema.get("choices", ()):
        yield choice[0] if isinstance(choice, tuple) else choice


def _children(schema: Schema, part: str | int) -> Iterator[Schema]:
    """Yield the schemas of a value's child."""
    match schema["type"]:
        case "model-fields" | "typed-dict":
            for name, field in schema["fields"].items():
                if part in (name, field.get("validation_alias")):
                    yield field["schema"]
        case "list" | "set" | "frozenset" if "items_schema" in schema:
            yield schema["items_schema"]
        case "tuple" if isinstance(part, int):
            items = schema["items_schema"]
            yield items[min(part, len(items) - 1)]
        case "dict" if isinstance(part, str) and "values_schema" in schema:
            yield schema["values_schema"]
