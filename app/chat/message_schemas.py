"""Messages of OpenAI's chat completions API: their content and their tool calls."""

from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from app.chat.vendor_hints import IN_PARTS, HintedModel


class TextPart(HintedModel):
    ignored_hints = IN_PARTS

    type: Literal["text"]
    text: str


class RefusalPart(HintedModel):
    """A refusal in an assistant's message."""

    ignored_hints = IN_PARTS

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def to_arguments(value: object) -> object:
    """Return the arguments of a past call as text: clients also send back null, or the object that they parsed."""
    if value is None:
        return ""
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


Arguments = Annotated[str, BeforeValidator(to_arguments, json_schema_input_type=str | dict[str, object] | None)]


class FunctionCall(BaseModel):
    """The function of a past call. Whatever the model wrote as arguments is accepted back: see `engine_arguments`.

    Unknown fields are ignored: clients keep what they parsed beside it.
    """

    name: str = Field(min_length=1, max_length=64)
    arguments: Arguments = ""


class ToolCall(BaseModel):
    id: str = Field(min_length=1, max_length=255)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A message. Fields that the chat template does not read (annotations, audio, ids) are ignored.

    An assistant's message may be empty, since a reply may be: one that was cut at once, or a refusal.
    """

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None = None
    refusal: str | None = None
    name: str | None = Field(None, max_length=64)
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=255)

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing: a tool's message names the call that it answers")
        return self

    @property
    def text(self) -> str:
        """The content as one string; an assistant's refusal if there is none."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return content or (self.refusal or "" if self.role == "assistant" else "")

    @property
    def num_chars(self) -> int:
        """The characters of its text and of its tool calls."""
        texts = [self.text]
        for call in self.tool_calls or ():
            texts += [call.id, call.function.name, call.function.arguments]
        return sum(map(len, texts))

    def to_template_message(self) -> dict[str, object]:
        """Return the message for the chat template: its content is one string, its role one that templates know."""
        fields = self.model_dump(exclude_none=True, exclude={"refusal"})
        fields["role"] = "system" if self.role == "developer" else self.role
        if not self.tool_calls:
            fields.pop("tool_calls", None)
        return fields | {"content": self.text}
