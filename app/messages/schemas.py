"""Request of Anthropic's Messages API. What would change the reply and is not supported is refused; hints are ignored.

Content blocks ignore unknown fields: clients send a reply's blocks back with citations, cache marks and notes.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, field_validator

from app.chat.schemas import FUNCTION_NAME, MAX_STOP_CHARS, MetadataKey, Schema
from app.chat.vendor_hints import HintedModel
from app.core.errors import BadRequest, UnsupportedParameter
from app.core.http import parse_body

# Blocks that are refused, and what to send instead.
TEXT_ONLY = "the model reads text only: send {} as a text block"
SERVER_BLOCK = "it belongs to a server tool, which only its own service runs: send its result as a text block"
UNSUPPORTED_BLOCKS = {
    "image": TEXT_ONLY.format("a description"),
    "document": TEXT_ONLY.format("the document's text"),
    "search_result": TEXT_ONLY.format("its text"),
    "container_upload": TEXT_ONLY.format("the file's text"),
    "server_tool_use": SERVER_BLOCK,
    "mcp_tool_use": SERVER_BLOCK,
    "mcp_tool_result": SERVER_BLOCK,
    "web_search_tool_result": SERVER_BLOCK,
    "web_fetch_tool_result": SERVER_BLOCK,
    "code_execution_tool_result": SERVER_BLOCK,
    "bash_code_execution_tool_result": SERVER_BLOCK,
    "text_editor_code_execution_tool_result": SERVER_BLOCK,
    "tool_search_tool_result": SERVER_BLOCK,
}
# Parameters that are refused unless they are empty, and what to do instead.
UNSUPPORTED_PARAMETERS = {
    "container": "run code with a tool of your own",
    "mcp_servers": "connect them in your client, and send their tools as 'tools'",
}
TOOL_HINTS = frozenset(
    {"cache_control", "defer_loading", "allowed_callers", "input_examples", "eager_input_streaming", "citations"}
)
MAX_USER_ID_CHARS = 4096
M = TypeVar("M", bound="CountRequest")


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """Thinking of an earlier reply. This service signs none: thinking with a signature comes from another model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(BaseModel):
    """Encrypted thinking of another service's model. It is dropped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=255)
    name: str = Field(min_length=1, max_length=64)
    input: dict[str, object] = Field(default_factory=dict)


def to_blocks(value: object) -> object:
    """Return the content as blocks: a string is one text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(to_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=255)
    content: Texts | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
UserBlocks = Annotated[list[UserBlock], Field(min_length=1)]


class UserMessage(BaseModel):
    role: Literal["user"]
    content: Annotated[UserBlocks, BeforeValidator(to_blocks, json_schema_input_type=str | UserBlocks)]


class AssistantMessage(BaseModel):
    """A reply of the conversation. It may be empty, since a reply may be."""

    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock], BeforeValidator(to_blocks, json_schema_input_type=str | list[AssistantBlock])
    ]


class SystemMessage(BaseModel):
    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(HintedModel):
    """A tool of the client. `strict` is off by default: a grammar constrains the reply, which excludes it."""

    ignored_hints = TOOL_HINTS

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: Schema
    strict: StrictBool | None = None


class ServerTool(BaseModel):
    """A tool that Anthropic's service runs, or whose schema its models know: it has a type and no schema. Skipped."""

    # What `tool_kind` says, for the OpenAPI document.
    model_config = ConfigDict(
        json_schema_extra={
            "not": {"anyOf": [{"required": ["input_schema"]}, {"properties": {"type": {"const": "custom"}}}]}
        }
    )

    type: str
    name: str = Field(min_length=1, max_length=128)


def tool_kind(tool: Any) -> str:
    type = tool.get("type") if isinstance(tool, dict) else None
    return "server" if isinstance(type, str) and type != "custom" and "input_schema" not in tool else "client"


AnyTool = Annotated[Annotated[Tool, Tag("client")] | Annotated[ServerTool, Tag("server")], Discriminator(tool_kind)]


class ToolChoice(HintedModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: StrictBool | None = None


class NamedToolChoice(HintedModel):
    type: Literal["tool"]
    name: str = Field(min_length=1, max_length=128)
    disable_parallel_tool_use: StrictBool | None = None


class OutputFormat(HintedModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(HintedModel):
    ignored_hints = frozenset({"task_budget"})

    effort: str | None = Field(None, description="accepted and ignored")
    format: OutputFormat | None = None


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class CountRequest(HintedModel):
    """What the prompt consists of: the body of a request for its tokens."""

    model: str = Field(min_length=1, max_length=128)
    messages: list[Message] = Field(min_length=1, max_length=2048)
    system: Texts | None = None
    tools: list[AnyTool] | None = Field(None, max_length=128)
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="an older name of output_config.format")

    container: None = None
    mcp_servers: Annotated[list[object], Field(max_length=0)] | None = None
    # Accepted and ignored.
    thinking: dict[str, object] | None = None
    context_management: dict[str, object] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    diagnostics: dict[str, object] | None = None
    betas: list[str] | None = None

    @property
    def response_schema(self) -> dict[str, object] | None:
        format = (self.output_config and self.output_config.format) or self.output_format
        return format.schema_ if format else None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="a ceiling: more than the service's limit is that limit")
    stop_sequences: list[StopSequence] | None = Field(None, max_length=4)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    metadata: dict[MetadataKey, str | None] | None = Field(
        None, max_length=17, description="user_id is the end user; other pairs are recorded, as for chats"
    )
    stream: StrictBool | None = None

    @field_validator("metadata")
    @classmethod
    def check_metadata(cls, value: dict[str, str | None] | None) -> dict[str, str | None] | None:
        for name, text in (value or {}).items():
            limit = MAX_USER_ID_CHARS if name == "user_id" else 512
            if len(text or "") > limit:
                raise ValueError(f"'{name}' may have at most {limit} characters")
        return value


def parse_count_request(body: dict[str, object]) -> CountRequest:
    """Return a request for the tokens of a prompt; parameters of a whole request are ignored. Raises BadRequest."""
    only_generating = MessagesRequest.model_fields.keys() - CountRequest.model_fields.keys()
    return _parse(CountRequest, {name: value for name, value in body.items() if name not in only_generating})


def parse_messages_request(body: dict[str, object]) -> MessagesRequest:
    """Return the request. Raises BadRequest, or UnsupportedParameter that says what to do instead."""
    request = _parse(MessagesRequest, body)
    if isinstance(request.messages[-1], AssistantMessage):
        error = "the last message must not be the assistant's: the beginning of a reply cannot be given"
        raise BadRequest(f"messages.{len(request.messages) - 1}: {error}.", param="messages", code="invalid_value")
    return request


def _parse(model: type[M], body: dict[str, object]) -> M:
    for name, instead in UNSUPPORTED_PARAMETERS.items():
        if body.get(name) not in (None, []):
            raise UnsupportedParameter(f"{name}: it is not supported: {instead}.", param=name)
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        _refuse_unsupported_blocks(message, f"messages.{index}.content")
    request = parse_body(model, body)
    if all(isinstance(message, SystemMessage) for message in request.messages):
        error = "messages: one that is not the system's is needed."
        raise BadRequest(error, param="messages", code="invalid_value")
    return request


def _refuse_unsupported_blocks(holder: object, place: str) -> None:
    """Raise UnsupportedParameter for a block that Anthropic knows and this service does not."""
    blocks = holder.get("content") if isinstance(holder, dict) else None
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        type = block.get("type") if isinstance(block, dict) else None
        if isinstance(type, str) and type in UNSUPPORTED_BLOCKS:
            at = f"{place}.{index}"
            raise UnsupportedParameter(f"{at}: '{type}' is not supported: {UNSUPPORTED_BLOCKS[type]}.", param=at)
        if type == "tool_result":
            _refuse_unsupported_blocks(block, f"{place}.{index}.content")
