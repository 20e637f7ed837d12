"""The request on OpenAI's wire: what is taken, what is a harmless hint, what is refused because it changes meaning."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from app.body import parse
from app.errors import UnsupportedParameter

# Asking for these would change the reply, so ignoring them would be a lie; the value shown changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
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
    "store",
)


NULLABLE = ("stream", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logprobs", "metadata")


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def says_something(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As the chat template takes it: one string, and no role it does not know."""
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return fields | ({"content": ""} if self.content is None else {})


class Function(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function


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
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logprobs: StrictBool = False
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: StrictBool | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)

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

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def read(body: dict[str, Any]) -> ChatRequest:
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise UnsupportedParameter(f"'{name}' with this value is not supported.", param=name)
    tool_choice = body.get("tool_choice")
    if tool_choice not in (None, "none", "auto"):
        raise UnsupportedParameter("'tool_choice' may be 'none' or 'auto'.", param="tool_choice")
    return parse(ChatRequest, {k: v for k, v in body.items() if k not in NEUTRAL and k not in HINTS})
