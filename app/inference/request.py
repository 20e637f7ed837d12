"""ChatCall, the request for one reply, and EngineTarget, the version that it names.

An allow-list: other fields never reach an engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson
from pydantic import TypeAdapter

from alignment.json_values import as_object, as_objects, as_text

MESSAGE_FIELDS = ("role", "name", "tool_call_id", "tool_calls")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
NO_ARGUMENTS = "{}"
BELOW_CHATS = -1  # a priority; chats have 0. It is so close that SGLang evicts no work under way for a chat
MAX_ARGUMENT_LEVELS = 64  # engines copy the arguments recursively


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. All of them are always sent: the engine's defaults may come from generation_config.json."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[str, float] | None = None

    def body(self) -> dict[str, object]:
        """Return the request's fields. Stop texts, a seed and a bias are left out when there are none."""
        body = {**asdict(self), "stop": list(self.stop), "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
        return {name: value for name, value in body.items() if value not in (None, [], {})}

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> "Sampling":
        """Return the parameters that `body` was made of."""
        return SAMPLING.validate_python(body)


SAMPLING = TypeAdapter(Sampling)


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The version that must generate a reply, as an engine knows it. The default is the weights an engine started with.

    Attributes:
        adapter: The adapter that generates the reply; None for the engine's own weights.
        weights: The version of full weights that must generate the reply, where the engine's weights are swapped. If
            others did, the capture is excluded from training.
        prefix_key: Separates the prefix caches of different base weights.
        label: Only echoed in the reply.

    Example: EngineTarget(adapter="assistant-v3", prefix_key="/models/base", label="assistant@v3")
    """

    adapter: str | None = None
    weights: str | None = None
    prefix_key: str | None = None
    label: str = "attune"

    def __post_init__(self) -> None:
        if ":" in self.label:  # SGLang reads the part after a colon as an adapter's name
            raise ValueError(f"a version's label must not contain a colon: {self.label!r}")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The request for one reply.

    A `response_format`, a required tool call, a forbidden one or a strict tool constrains the reply by a grammar: its
    log-probs are then not the model's own, and the capture is excluded from training. A required call leaves no place
    for a response format. With an optional one the reply is a call or it has the format.

    Attributes:
        rid: The request's id in the engine and the turn's id. All ids have the same length: SGLang aborts by prefix.
        target: The version that generates the reply.
        names_stop_text: The client's chunks keep `matched_stop`, the stop text that ended the reply, and have the usage
            so far.
        prompt_ids: Sent instead of the messages when the exact tokens are known.
        priority: BELOW_CHATS: engines serve it behind chats, which have 0.

    Example: ChatCall(turn_id, [{"role": "user", "content": "Hi"}], Sampling(64), EngineTarget(adapter="assistant-v3"))
    """

    rid: str
    messages: Sequence[Mapping[str, object]]
    sampling: Sampling
    target: EngineTarget = EngineTarget()
    tools: Sequence[Mapping[str, object]] = ()
    tool_choice: str | Mapping[str, object] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, object] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False
    names_stop_text: bool = False
    prompt_ids: Sequence[int] | None = None
    priority: int | None = None

    @property
    def max_tool_calls(self) -> int:
        """The number of tool calls to pass on. Engines obey `parallel_tool_calls` only under a grammar."""
        return 128 if self.parallel_tool_calls else 1

    @property
    def requires_tool_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def forbids_tool_calls(self) -> bool:
        """Whether the prompt names tools that must not be called: a prompt is the same with any `tool_choice`."""
        return self.tool_choice == "none" and bool(self.tools)

    @property
    def has_response_format(self) -> bool:
        return self.response_format is not None and self.response_format.get("type", "text") != "text"

    @property
    def is_grammar_constrained(self) -> bool:
        return (
            self.has_response_format
            or self.requires_tool_call
            or self.forbids_tool_calls
            or any(as_object(tool.get("function", {})).get("strict") for tool in self.tools)
        )

    def tool_fields(self) -> dict[str, object]:
        if not self.tools:
            return {}
        return {
            "tools": [_engine_tool(tool) for tool in self.tools],
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": self.tool_choice or "auto",
        }


def engine_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    return [_engine_message(message) for message in messages]


def _engine_message(message: Mapping[str, object]) -> dict[str, object]:
    engine_message = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    if "tool_calls" in engine_message:
        engine_message["tool_calls"] = [_engine_tool_call(call) for call in as_objects(message["tool_calls"])]
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**engine_message, "content": content}
    parts = []
    for part in as_objects(content):
        if part.get("type") != "text":
            raise ValueError(f"a message's content may hold text parts only, not {part.get('type')!r}")
        parts.append({"type": "text", "text": part["text"]})
    return {**engine_message, "content": parts}


def _engine_tool_call(call: Mapping[str, object]) -> dict[str, object]:
    function = as_object(call["function"])
    return {**call, "function": {**function, "arguments": engine_arguments(as_text(function["arguments"]))}}


def engine_arguments(arguments: str) -> str:
    """Return the arguments of a past call as engines render them, which take JSON objects only.

    A call that was cut, or whose model wrote something else, has no arguments in the prompt: refusing it would refuse
    every later turn of the conversation.
    """
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return NO_ARGUMENTS
    return arguments if isinstance(value, dict) and not _is_deeper(value, MAX_ARGUMENT_LEVELS) else NO_ARGUMENTS


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested in more than `levels` levels."""
    layer: list[object] = [value]
    for _ in range(levels):
        children: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                children += item.values()
            elif isinstance(item, list):
                children += item
        if not children:
            return False
        layer = children
    return any(isinstance(item, dict | list) for item in layer)


def _engine_tool(tool: Mapping[str, object]) -> dict[str, object]:
    function = as_object(tool["function"])
    return {"type": "function", "function": {name: function[name] for name in FUNCTION_FIELDS if name in function}}
