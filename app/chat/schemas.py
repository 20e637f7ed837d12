"""The request on OpenAI's wire: what is taken, what is a harmless hint, what is refused because it changes meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from app.chat.messages import Message, NamedTool, ResponseFormat, Tool
from app.core.errors import UnsupportedParameter
from app.core.http import parse_body

# Asking for these would change the reply, so ignoring them would be a lie; the value shown changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}
# Hints to a service of another making; a reply without them is as right.
HINTS = (
    "service_tier",
    "verbosity",
    "reasoning_effort",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "store",
)
NULLABLE = (
    "stream",
    "temperature",
    "top_p",
    "n",
    "frequency_penalty",
    "presence_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "metadata",
)
TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Pair = Annotated[str, Field(max_length=512)]
PairKey = Annotated[str, Field(min_length=1, max_length=64)]
SEED_LIMIT = 2**63


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    metadata: dict[PairKey, Pair] = Field(default_factory=dict, max_length=16)

    @field_validator(*NULLABLE, mode="before")
    @classmethod
    def null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].get_default(call_default_factory=True) if value is None else value

    @field_validator("stop")
    @classmethod
    def stop_says_something(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and (value == "" or ("" in value and isinstance(value, list))):
            raise ValueError("a stop string is not empty")
        if isinstance(value, list) and len(value) > 4:
            raise ValueError("there may be at most 4 stop strings")
        return value

    @model_validator(mode="after")
    def fits_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = {tool.function.name for tool in self.tools or ()}
        if len(names) < len(self.tools or ()):
            raise ValueError("two tools have the same name")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice demands a tool, and there is none in tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names '{self.tool_choice.function.name}', which is not in tools")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier or self.user

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def plain_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def plain_choice(self) -> str | dict[str, Any] | None:
        return self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    def plain_format(self) -> dict[str, Any] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return self.response_format.model_dump(by_alias=True, exclude_none=True)

    def asked(self) -> dict[str, Any]:
        """What shapes the reply beside messages and sampling, for the record."""
        fields = {
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            "tool_choice": self.plain_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.plain_format(),
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs or None,
            "n": self.n if self.n > 1 else None,
        }
        return {name: value for name, value in fields.items() if value not in (None, [])}


def read(body: dict[str, Any]) -> ChatRequest:
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise UnsupportedParameter(f"'{name}' with this value is not supported.", param=name)
    _refuse_other_kinds(body)
    return parse_body(ChatRequest, {k: v for k, v in body.items() if k not in NEUTRAL and k not in HINTS})


def _refuse_other_kinds(body: dict[str, Any]) -> None:
    """Kinds that OpenAI knows and we do not: said as such, not as a malformed value."""
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
