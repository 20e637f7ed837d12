"""What an input may hold: messages, calls of functions, and what the functions gave back."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from app.core.errors import UnsupportedParameter

INSTEAD = {
    "item_reference": "nothing is kept to refer to: send the item itself",
    "reasoning": "this model's replies hold no reasoning items: leave them out",
    "input_image": "the model reads text: send what the picture says as 'input_text'",
    "input_file": "the model reads text: send what the file says as 'input_text'",
    "input_audio": "the model reads text: send what is said as 'input_text'",
}


class Item(BaseModel):
    model_config = ConfigDict(extra="ignore")  # a reply's items are sent back as they came, with ids and states


class Text(Item):
    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Item):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[Text | Refusal, Field(discriminator="type")]


def as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[Part], BeforeValidator(as_parts, json_schema_input_type=str | list[Part])]


class Message(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=255)
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=255)
    output: Content


KNOWN = ("message", "function_call", "function_call_output")
KNOWN_PARTS = ("input_text", "output_text", "text", "refusal")


def kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(kind),
]


def as_items(value: Any) -> Any:
    """A string is one message of the user. What we cannot do is refused here, with what to do instead."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            _known(item, KNOWN, f"input.{index}", "message")
            for name in ("content", "output"):
                parts = item.get(name)
                for at, part in enumerate(parts if isinstance(parts, list) else ()):
                    _known(part, KNOWN_PARTS, f"input.{index}.{name}.{at}", "text")
    return value


def _known(item: Any, known: tuple[str, ...], param: str, default: str) -> None:
    named = item.get("type", default) if isinstance(item, dict) else default
    if isinstance(named, str) and named not in known:
        told = INSTEAD.get(named, f"an item or part here is one of {', '.join(known)}")
        raise UnsupportedParameter(f"'{named}' is not supported: {told}.", param=param)
