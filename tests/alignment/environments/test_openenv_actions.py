"""How replies become actions of an OpenEnv environment."""

import pytest

from alignment.environments.openenv_actions import (
    JsonForm,
    NoAction,
    NumberForm,
    TextForm,
    choose_form,
    last_object,
)
from alignment.environments.tools.base import JsonObject
from alignment.errors import UnavailableEnvironment

METADATA: JsonObject = {"metadata": {"type": "object", "title": "Metadata"}}


def schema(required: list[str] | None = None, **fields: JsonObject) -> JsonObject:
    return {"properties": {**METADATA, **fields}, "required": list(required or []), "type": "object"}


TEXT: JsonObject = {"type": "string"}
NUMBER: JsonObject = {"type": "integer"}


def test_one_field_that_is_needed_is_the_reply() -> None:
    optional: dict[str, JsonObject] = {"size": NUMBER, "fast": {"type": "boolean", "default": False}}
    assert choose_form(schema(["code"], code=TEXT, **optional)) == TextForm("code")
    assert choose_form(schema(["column"], column=NUMBER)) == NumberForm("column")
    assert choose_form(schema(message=TEXT)) == TextForm("message"), "the only one, though it has a default"


def test_others_are_json() -> None:
    assert isinstance(choose_form(schema(["a", "b"], a=TEXT, b=TEXT)), JsonForm)
    assert isinstance(choose_form(schema(a=TEXT, b=TEXT)), JsonForm)
    assert isinstance(choose_form(schema(["moves"], moves={"type": "array", "items": NUMBER})), JsonForm)
    assert isinstance(choose_form(schema(["code"], code=TEXT), is_json=True), JsonForm)


def test_field_that_the_user_names() -> None:
    two = schema(["a", "b"], a=TEXT, b={"type": "array"})
    assert choose_form(two, field="a") == TextForm("a")
    with pytest.raises(UnavailableEnvironment, match="no field 'c', but a, b"):
        choose_form(two, field="c")
    with pytest.raises(UnavailableEnvironment, match="'b' of actions is neither a text nor a whole number"):
        choose_form(two, field="b")


def test_only_tools() -> None:
    assert choose_form(schema()) is None, "OpenEnv's Action"
    call: JsonObject = {"type": "string", "const": "call_tool", "default": "call_tool"}
    assert choose_form(schema(["tool_name"], type=call, tool_name=TEXT, arguments={"type": "object"})) is None


def test_hints() -> None:
    enumeration: JsonObject = {"enum": ["left", "right"], "type": "string", "title": "Direction"}
    move = schema(["move"], move={"$ref": "#/$defs/Direction", "description": "Where to go."})
    form = choose_form(move | {"$defs": {"Direction": enumeration}})
    assert form is not None and form.hint == "Reply with the move (Where to go; one of: left, right)."
    number = choose_form(schema(["column"], column=NUMBER))
    assert number is not None and number.hint == "Reply with a whole number: the column."
    grid = choose_form(schema(["x"], x={"type": "number", "title": "X"}, title={"type": "string", "title": "Title"}))
    shown = '{"properties": {"x": {"type": "number"}, "title": {"type": "string"}}, "required": ["x"]}'
    assert grid is not None and grid.hint == f"Reply with a JSON object that fits this schema: {shown}"


def test_actions_are_read() -> None:
    assert TextForm("a").read(" left\n") == {"a": "left"}
    assert NumberForm("a").read("Not 3, but -4.") == {"a": -4}
    assert JsonForm({}).read('No {"a": 1}\n```json\n{"b": {"c": [2]}}\n```') == {"b": {"c": [2]}}


@pytest.mark.parametrize(
    ("form", "reply"),
    [(TextForm("a"), " \n"), (NumberForm("a"), "four"), (JsonForm({}), "[1]"), (JsonForm({}), '{"a": NaN}')],
)
def test_replies_without_an_action(form: TextForm | NumberForm | JsonForm, reply: str) -> None:
    with pytest.raises(NoAction):
        form.read(reply)


def test_last_object_of_a_long_text_of_braces() -> None:
    assert last_object("{" * 3000) is None
    assert last_object('{"a": ' * 3000) is None
    assert last_object("{" * 1999 + '{"a": 1}') == {"a": 1} and last_object("{" * 2000 + '{"a": 1}') is None
    assert last_object('{{"a": 1}}') == {"a": 1}
