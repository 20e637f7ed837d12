"""Request and response of OpenAI's chat completions API: parameters, tools and response formats.

Parameters that would change the reply and are not supported are refused; hints that cannot change it are ignored.
"""

from functools import cached_property
from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, field_validator, model_validator

from app.chat.message_schemas import Message
from app.chat.vendor_hints import IN_REQUESTS, IN_TOOLS, HintedModel
from app.core.errors import UnsupportedParameter
from app.core.http import StrictModel, parse_body

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
# Unsupported parameters, with the values that have no effect and are therefore accepted.
UNSUPPORTED_UNLESS: dict[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}
# Parameters that are accepted and ignored.
IGNORED_HINTS = (
    "verbosity",
    "reasoning_effort",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "store",
)
TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
MAX_USER = 512  # characters
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # pairs, and characters
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY)]
SEED_LIMIT = 2**63
MAX_STOP_CHARS = 256  # the engine compares each new token with each stop string
MAX_SCHEMA_BYTES = 32 * 1024  # the engine compiles a schema to a grammar


def check_schema_size(schema: dict[str, object]) -> dict[str, object]:
    if (size := len(orjson.dumps(schema))) > MAX_SCHEMA_BYTES:
        limit = f"a JSON schema may have at most {MAX_SCHEMA_BYTES} bytes, and this one has {size}"
        raise ValueError(f"{limit}: shorten its descriptions or divide it")
    return schema


Schema = Annotated[dict[str, object], AfterValidator(check_schema_size)]


def to_schema(value: object) -> object:
    """Return the schema of a function without parameters for null, which clients send for it."""
    return {} if value is None else value


OptionalSchema = Annotated[Schema, BeforeValidator(to_schema, json_schema_input_type=Schema | None)]


class FunctionName(HintedModel):
    name: str = Field(pattern=FUNCTION_NAME)


class Function(FunctionName):
    ignored_hints = IN_TOOLS

    description: str | None = None
    parameters: OptionalSchema = Field(default_factory=dict)
    strict: StrictBool | None = None


class Tool(HintedModel):
    ignored_hints = IN_TOOLS

    type: Literal["function"]
    function: Function


class NamedToolChoice(HintedModel):
    type: Literal["function"]
    function: FunctionName


class TextFormat(HintedModel):
    type: Literal["text", "json_object"]


class JsonSchema(FunctionName):
    description: str | None = None
    schema_: OptionalSchema = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class JsonSchemaFormat(HintedModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(StrictModel):
    model: str = Field(min_length=1, max_length=128)
    messages: list[Message] = Field(min_length=1, max_length=2048)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    logprobs: StrictBool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=MAX_USER)
    safety_identifier: str | None = Field(None, max_length=MAX_USER)
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=MAX_METADATA)
    service_tier: str | None = Field(
        None, max_length=64, description="`flex`: engines serve it behind others; any other tier is `default`"
    )

    @field_validator("stop")
    @classmethod
    def check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stop_strings = [value] if isinstance(value, str) else value or []
        if "" in stop_strings:
            raise ValueError("a stop string must not be empty")
        if len(stop_strings) > 4:
            raise ValueError("there may be at most 4 stop strings")
        if max(map(len, stop_strings), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"a stop string may have at most {MAX_STOP_CHARS} characters: send its beginning")
        return value

    @model_validator(mode="after")
    def check_consistency(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = {tool.function.name for tool in self.tools or ()}
        if len(names) < len(self.tools or ()):
            raise ValueError("two tools have the same name")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice requires a tool call, but tools is empty")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names '{self.tool_choice.function.name}', which is not in tools")
        _ = self.prompt_chars  # computed here: a large request is validated outside of the event loop
        return self

    @cached_property
    def prompt_chars(self) -> dict[str, int]:
        """The characters of each parameter that is part of the prompt or of its grammar."""
        tools = self.engine_tools()
        return {
            "messages": sum(message.num_chars for message in self.messages),
            "tools": len(orjson.dumps(tools).decode()) if tools else 0,
            "response_format": len(orjson.dumps(self.engine_response_format()).decode()) if self.response_format else 0,
        }

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_output_tokens(self) -> int | None:
        """The length limit of each choice, if the request names one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier or self.user

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def engine_tools(self) -> list[dict[str, object]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def engine_tool_choice(self) -> str | dict[str, object] | None:
        return self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedToolChoice) else self.tool_choice

    def engine_response_format(self) -> dict[str, object] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return self.response_format.model_dump(by_alias=True, exclude_none=True)

    def recorded_params(self) -> dict[str, object]:
        """Return the parameters beside messages and sampling that affect the reply, as the turn records them."""
        fields = {
            "tools": self.engine_tools(),
            "tool_choice": self.engine_tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.engine_response_format(),
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs or None,
            "n": self.n if self.n > 1 else None,
        }
        return {name: value for name, value in fields.items() if value not in (None, [])}


# Null stands for the default of these.
OPTIONAL_PARAMETERS = [name for name, field in ChatRequest.model_fields.items() if not field.is_required()]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    index: int
    message: dict[str, object]
    logprobs: dict[str, object] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class CompletionView(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: Literal["default", "flex"] | None = Field(None, description="absent if none was asked for")
    choices: list[Choice]
    usage: Usage


def parse_chat_request(body: dict[str, object]) -> ChatRequest:
    """Return the request. Raises BadRequest, or UnsupportedParameter for what is not supported."""
    for name, neutral in UNSUPPORTED_UNLESS.items():
        if name in body and body[name] not in neutral:
            raise UnsupportedParameter(f"'{name}' with this value is not supported.", param=name)
    _reject_unsupported_types(body)
    ignored = {*UNSUPPORTED_UNLESS, *IGNORED_HINTS, *IN_REQUESTS}
    ignored |= {name for name in OPTIONAL_PARAMETERS if body.get(name) is None}
    return parse_body(ChatRequest, {name: value for name, value in body.items() if name not in ignored})


def _reject_unsupported_types(body: dict[str, object]) -> None:
    """Raise UnsupportedParameter for types that OpenAI knows and this service does not, instead of a type error."""
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            raise UnsupportedParameter("Only tools of type 'function' are supported.", param="tools")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in (None, "function"):
        raise UnsupportedParameter("'tool_choice' may name a function only.", param="tool_choice")
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in ("image_url", "input_audio", "file"):
                raise UnsupportedParameter("A message's content may hold text only.", param="messages")
