"""The request on the Responses wire: what is taken, what is a hint, what is refused because it changes meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from app.chat.schemas import Pair, PairKey
from app.core.errors import UnsupportedParameter
from app.core.http import parse_body
from app.responses.items import InputItem, as_items

LOGPROBS = "message.output_text.logprobs"
# Asking for these would change the reply: the values that change nothing, and what to do instead.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "responses are stateless here: send the whole conversation as 'input'"),
    "conversation": ((), "responses are stateless here: send the whole conversation as 'input'"),
    "background": ((False,), "leave it out and wait for the reply, or stream it"),
    "prompt": ((), "send the prompt's text as 'instructions'"),
    "truncation": (("disabled",), "send a shorter 'input'"),
    "context_management": (([],), "send a shorter 'input'"),
    "moderation": ((), "leave it out"),
}
FUNCTIONS_ONLY = "only tools of type 'function' are supported: offer your own function that does it"


class Function(BaseModel):
    """`strict` is off unless asked for: a strict call is held to its schema by a grammar, and nothing is learned from
    a reply that was held."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Named(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")


class Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object"]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: StrictBool | None = None


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Annotated[Plain | JsonSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = Field(None, description="a hint that changes nothing")


Items = Annotated[list[InputItem], Field(min_length=1, max_length=2000)]
Input = Annotated[Items, BeforeValidator(as_items, json_schema_input_type=str | Items)]


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=128)
    input: Input
    instructions: str | None = None
    tools: list[Function] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | Named | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: StrictBool | None = None
    metadata: dict[PairKey, Pair] | None = Field(None, max_length=16)
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    include: list[str] | None = Field(None, description=f"'{LOGPROBS}' is heard; there is nothing else to include")

    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    moderation: None = None
    # Hints to a service of another making; a reply without them is as right.
    store: StrictBool | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def read(body: dict[str, Any]) -> ResponsesRequest:
    for name, (neutral, instead) in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise UnsupportedParameter(f"'{name}' with this value is not supported: {instead}.", param=name)
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function":
            raise UnsupportedParameter(f"'{tool['type']}': {FUNCTIONS_ONLY}.", param=f"tools.{index}")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("type"), str) and choice["type"] != "function":
        raise UnsupportedParameter(f"'{choice['type']}': {FUNCTIONS_ONLY}, by its name.", param="tool_choice")
    return parse_body(ResponsesRequest, body)
