"""How a reply becomes an action of an OpenEnv environment, as the JSON schema of its actions says.

| the action has | the reply |
|---|---|
| one field that it needs, or one at all: a text | the whole of it is the field |
| the same, a whole number | its last whole number |
| other fields | its last JSON object |
| none, or those of OpenEnv's own actions for tools | a call of a tool |
"""

import json
import re
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, JsonValue

from alignment.environments.tools.base import JsonObject
from alignment.errors import UnavailableEnvironment

OF_EVERY_ACTION = "metadata"
TOOL_ACTIONS = frozenset({"list_tools", "call_tool"})  # `type` of OpenEnv's own actions
WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.]*\d)")
REFERENCE = "#/$defs/"
MAX_FAILURES = 2000  # to read an object, in a reply: each may read it to its end


class NoAction(Exception):
    """The reply has no action."""


class ActionForm(Protocol):
    """What replies look like. `hint` is a sentence for the agent."""

    @property
    def hint(self) -> str: ...

    def read(self, text: str) -> JsonObject:
        """Return the action in a reply. Raises NoAction."""
        ...


class ActionSchema(BaseModel):
    """The schema of the actions, as the server describes them."""

    model_config = ConfigDict(extra="ignore")

    properties: dict[str, JsonValue] = {}
    required: list[str] = []

    def fields(self) -> dict[str, JsonObject]:
        """Return the schemas of the environment's own fields, by their names."""
        named = ((name, field) for name, field in self.properties.items() if name != OF_EVERY_ACTION)
        return {name: field if isinstance(field, dict) else {} for name, field in named}


@dataclass(frozen=True)
class TextForm:
    """The whole reply is one field."""

    field: str
    description: str = ""
    choices: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        return f"Reply with {_describe_field(self.field, self.description, self.choices)}."

    def read(self, text: str) -> JsonObject:
        if not text.strip():
            raise NoAction
        return {self.field: text.strip()}


@dataclass(frozen=True)
class NumberForm:
    """The last whole number of a reply is one field."""

    field: str
    description: str = ""
    choices: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        return f"Reply with a whole number: {_describe_field(self.field, self.description, self.choices)}."

    def read(self, text: str) -> JsonObject:
        numbers = WHOLE_NUMBER.findall(text)
        if not numbers:
            raise NoAction
        return {self.field: int(numbers[-1])}


@dataclass(frozen=True)
class JsonForm:
    """The last JSON object of a reply is the action."""

    schema: JsonObject

    @property
    def hint(self) -> str:
        return f"Reply with a JSON object that fits this schema: {json.dumps(self.schema, ensure_ascii=False)}"

    def read(self, text: str) -> JsonObject:
        action = last_object(text)
        if action is None:
            raise NoAction
        return action


def choose_form(schema: JsonObject, *, field: str | None = None, is_json: bool = False) -> ActionForm | None:
    """Return the form for a schema of actions, or None where the only actions are calls of tools.

    `field` is the name of the field that a reply becomes, instead of the only one; `is_json`: no field is.
    Raises UnavailableEnvironment for a field that actions do not have, or that is neither a text nor a whole number.
    """
    parsed = ActionSchema.model_validate(schema)
    fields = parsed.fields()
    if field is not None and field not in fields:
        raise UnavailableEnvironment(f"actions have no field {field!r}, but {', '.join(sorted(fields)) or 'none'}")
    if not fields or fields.get("type", {}).get("const") in TOOL_ACTIONS:
        return None
    needed = [name for name in parsed.required if name in fields] or list(fields)
    chosen = field or (needed[0] if len(needed) == 1 else None)
    form = None if is_json or chosen is None else _form_of_field(chosen, _resolve(fields[chosen], schema))
    if form is None and field is not None and not is_json:
        raise UnavailableEnvironment(f"the field {field!r} of actions is neither a text nor a whole number")
    return form or JsonForm(_without_titles(schema))


def last_object(text: str) -> JsonObject | None:
    """Return the last JSON object in a text, the longest that ends there, or None. Of many braces the first count."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    found: JsonObject | None = None
    position = num_failures = 0
    while (position := text.find("{", position)) >= 0 and num_failures < MAX_FAILURES:
        try:
            found, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
            num_failures += 1
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _form_of_field(name: str, field: JsonObject) -> ActionForm | None:
    choices = field.get("enum")
    named = tuple(str(choice) for choice in choices) if isinstance(choices, list) else ()
    description = str(field.get("description") or "")
    match field.get("type"):
        case "string":
            return TextForm(name, description, named)
        case "integer":
            return NumberForm(name, description, named)
    return None


def _resolve(field: JsonObject, schema: JsonObject) -> JsonObject:
    """Return the field's schema with what it refers to, such as an enumeration."""
    reference, definitions = field.get("$ref"), schema.get("$defs")
    if isinstance(reference, str) and reference.startswith(REFERENCE) and isinstance(definitions, dict):
        target = definitions.get(reference.removeprefix(REFERENCE))
        return {**target, **field} if isinstance(target, dict) else field
    return field


def _describe_field(name: str, description: str, choices: tuple[str, ...]) -> str:
    """Example: "the message (Text to echo; one of: a, b)" """
    details = [detail for detail in (description.strip().rstrip("."), _one_of(choices)) if detail]
    return f"the {name}" + (f" ({'; '.join(details)})" if details else "")


def _one_of(choices: tuple[str, ...]) -> str:
    return f"one of: {', '.join(choices)}" if choices else ""


def _without_titles(schema: JsonObject) -> JsonObject:
    """Return what an agent needs of a schema: no titles, and not what every action has."""
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    shown: JsonObject = {
        "properties": {name: _strip(field) for name, field in fields.items() if name != OF_EVERY_ACTION}
    }
    return shown | {name: _strip(schema[name]) for name in ("required", "$defs") if schema.get(name)}


def _strip(value: JsonValue) -> JsonValue:
    if isinstance(value, list):
        return [_strip(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _strip(item) for name, item in value.items() if name != "title" or not isinstance(item, str)}
