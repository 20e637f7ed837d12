"""Request of OpenAI's Responses API, its input items, and the equivalent chat request.

Parameters that would change the reply and are not supported are refused; hints that cannot change it are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator

from alignment.json_values import as_list
from app.chat.message_schemas import Arguments, RefusalPart
from app.chat.schemas import FUNCTION_NAME, FunctionName, JsonSchema, MetadataKey, MetadataValue, Schema
from app.chat.vendor_hints import IN_REQUESTS, HintedModel
from app.core.errors import UnsupportedParameter
from app.core.http import parse_body

ALTERNATIVES = {
    "item_reference": "items are not stored: send the item itself",
    "reasoning": "this model's replies hold no reasoning items: leave them out",
    "input_image": "the model reads text only: send a description as 'input_text'",
    "input_file": "the model reads text only: send the file's text as 'input_text'",
    "input_audio": "the model reads text only: send a transcript as 'input_text'",
}


# Unlike a StrictModel, items ignore unknown fields: clients send a reply's items back with their ids and states.
class Text(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(RefusalPart):
    model_config = ConfigDict(extra="ignore")


Part = Annotated[Text | Refusal, Field(discriminator="type")]


def to_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[Part], BeforeValidator(to_parts, json_schema_input_type=str | list[Part])]


class Message(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self


class FunctionCall(BaseModel):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=255)
    name: str = Field(min_length=1, max_length=64)
    arguments: Arguments = ""


class FunctionCallOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=255)
    output: Content


ITEM_TYPES = ("message", "function_call", "function_call_output")
PART_TYPES = ("input_text", "output_text", "text", "refusal")


def item_type(item: object) -> object:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        item_type,
        custom_error_type="input_item",
        custom_error_message=f"expected an object whose type is one of {', '.join(ITEM_TYPES)}",
    ),
]


def to_items(value: object) -> object:
    """Return the input as items: a string is one user message. Raises UnsupportedParameter for unknown types."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            _check_type(item, ITEM_TYPES, f"input.{index}", "message")
            for name in ("content", "output"):
                parts = item.get(name)
                for at, part in enumerate(parts if isinstance(parts, list) else ()):
                    _check_type(part, PART_TYPES, f"input.{index}.{name}.{at}", "text")
    return value


def _check_type(item: object, known: tuple[str, ...], param: str, default: str) -> None:
    type = item.get("type", default) if isinstance(item, dict) else default
    if isinstance(type, str) and type not in known:
        alternative = ALTERNATIVES.get(type, f"the supported types here are {', '.join(known)}")
        raise UnsupportedParameter(f"'{type}' is not supported: {alternative}.", param=param)


LOGPROBS = "message.output_text.logprobs"
COPIED_FIELDS = {
    *("model", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "safety_identifier"),
    "service_tier",
}
# Unsupported parameters: the values that have no effect and are therefore accepted, and what to do instead.
UNSUPPORTED_UNLESS: dict[str, tuple[tuple[object, ...], str]] = {
    "conversation": ((), "name the response to continue as 'previous_response_id', or send all of it as 'input'"),
    "background": ((False,), "leave it out and wait for the reply, or stream it"),
    "prompt": ((), "send the prompt's text as 'instructions'"),
    "truncation": (("disabled",), "send a shorter 'input'"),
    "context_management": (([],), "send a shorter 'input'"),
    "moderation": ((), "leave it out"),
}
FUNCTIONS_ONLY = "only tools of type 'function' are supported; define a function of your own instead"


class FunctionTool(BaseModel):
    """A function tool. `strict` is off by default: a grammar would constrain the call to its schema, and constrained
    replies are excluded from training."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: Schema | None = None
    strict: StrictBool | None = None


class NamedToolChoice(FunctionName):
    type: Literal["function"]


class PlainFormat(HintedModel):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class TextConfig(HintedModel):
    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = Field(None, description="accepted and ignored")


Items = Annotated[list[InputItem], Field(min_length=1, max_length=2000)]
Input = Annotated[Items, BeforeValidator(to_items, json_schema_input_type=str | Items)]


class ResponsesRequest(HintedModel):
    ignored_hints = IN_REQUESTS - {"reasoning"}

    model: str = Field(min_length=1, max_length=128)
    input: Input
    instructions: str | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: StrictBool | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    include: list[str] | None = Field(None, description=f"only '{LOGPROBS}' has an effect")

    service_tier: str | None = Field(None, max_length=64, description="as in a chat request")
    previous_response_id: str | None = Field(None, min_length=1, max_length=255)
    conversation: None = None
    background: Literal[False] | None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    moderation: None = None
    # Accepted and ignored.
    store: StrictBool | None = None
    reasoning: dict[str, object] | None = None
    max_tool_calls: int | None = None
    stream_options: dict[str, object] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, object] | None = None

    @property
    def include_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def parse_responses_request(body: dict[str, object]) -> ResponsesRequest:
    """Return the request. Raises BadRequest, or UnsupportedParameter that says what to do instead."""
    for name, (neutral, instead) in UNSUPPORTED_UNLESS.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise UnsupportedParameter(f"'{name}' with this value is not supported: {instead}.", param=name)
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function":
            raise UnsupportedParameter(f"'{tool['type']}': {FUNCTIONS_ONLY}.", param=f"tools.{index}")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("type"), str) and choice["type"] != "function":
        message = f"'{choice['type']}': {FUNCTIONS_ONLY}, and refer to it by its name."
        raise UnsupportedParameter(message, param="tool_choice")
    return parse_body(ResponsesRequest, body)


def to_chat_body(request: ResponsesRequest, history: Sequence[Mapping[str, object]] = ()) -> dict[str, object]:
    """Return the body of the equivalent chat request. `history`: the chat messages that the input continues."""
    body = {
        **request.model_dump(include=COPIED_FIELDS),
        "messages": to_chat_messages(request.instructions, request.input, history),
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_nest(tool, "function") for tool in request.tools or ()] or None,
        "tool_choice": request.tool_choice,
    }
    if isinstance(request.tool_choice, NamedToolChoice):
        body["tool_choice"] = _nest(request.tool_choice, "function")
    text_format = request.text.format if request.text else None
    if isinstance(text_format, JsonSchemaFormat):
        body["response_format"] = _nest(text_format, "json_schema")
    elif text_format is not None and text_format.type != "text":
        body["response_format"] = {"type": text_format.type}
    if request.include_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in body.items() if value is not None}


def _nest(model: BaseModel, type: str) -> dict[str, object]:
    """Return the object with its fields one level deeper, as chat completions have them."""
    return {"type": type, type: model.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def to_chat_messages(
    instructions: str | None, items: Sequence[InputItem], history: Sequence[Mapping[str, object]] = ()
) -> list[dict[str, object]]:
    """Return the chat messages. An assistant's text and the tool calls that follow it become one message."""
    chat_messages: list[dict[str, object]] = [{"role": "system", "content": instructions}] if instructions else []
    chat_messages += [dict(message) for message in history]
    for item in items:
        if isinstance(item, Message):
            chat_messages.append({"role": item.role, "content": "".join(part.text for part in item.content or ())})
        elif isinstance(item, FunctionCall):
            if not (chat_messages and chat_messages[-1]["role"] == "assistant"):
                chat_messages.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            as_list(chat_messages[-1].setdefault("tool_calls", [])).append(call)
        else:
            output = "".join(part.text for part in item.output)
            chat_messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return chat_messages
