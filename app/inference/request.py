"""ChatCall → the body that SGLang gets. An allow-list: what is not named here never reaches the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

MESSAGE_FIELDS = ("role", "name", "tool_call_id", "tool_calls")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every value is sent, always: an engine's own defaults may come from the model's generation_config."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[str, float] | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "n": 1,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.seed is not None:
            body["seed"] = self.seed
        if self.logit_bias:
            body["logit_bias"] = dict(self.logit_bias)
        return body

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Sampling":
        """What `body` made, read back."""
        told = {field.name: body[field.name] for field in fields(cls) if field.name in body}
        return cls(**told | {"stop": tuple(body.get("stop", ()))})


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One reply to ask for.

    `rid` names it in the engine and is the reply's id; ids must have one fixed length, because the engine
    aborts by prefix. `model` is only echoed in the reply; `adapter` (None: the bare base model) decides who
    speaks. `prompt_ids` go in place of the rendered messages, when the exact tokens are known. `extra_key` keeps
    prefix caches of different base weights apart. `response_format`, a demanded tool or a strict tool constrain
    the reply by a grammar: its log-probs are then no longer the model's own, and the capture says so. `weights`:
    whose full weights are to speak, where an engine's own weights are exchanged; the capture tells if others did.

    Example: ChatCall(turn_id, [{"role": "user", "content": "Hi"}], Sampling(64), adapter="assistant-v3")
    """

    rid: str
    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    adapter: str | None = None
    model: str = "attune"
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False
    extra_key: str | None = None
    prompt_ids: Sequence[int] | None = None
    weights: str | None = None
    priority: int | None = None  # below 0: after everybody else's; chats have 0

    def __post_init__(self) -> None:
        if ":" in self.model:  # SGLang would read an adapter's name behind the colon
            raise ValueError(f"a model may not be called {self.model!r}: a colon is not allowed in its name")

    @property
    def most_tool_calls(self) -> int:
        """SGLang heeds `parallel_tool_calls` under a grammar only."""
        return 128 if self.parallel_tool_calls else 1

    @property
    def demands_a_tool(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def constrained(self) -> bool:
        return (
            (self.response_format or {}).get("type", "text") != "text"
            or self.demands_a_tool
            or any(tool.get("function", {}).get("strict") for tool in self.tools)
        )

    def body(self, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": self.rid,
            "model": self.model,
            "messages": plain_messages(self.messages),
            **self.sampling.body(),
            "stream": stream,
            "logprobs": True,
        }
        if stream:
            body["return_input_ids_in_sglext"] = True
            body["return_output_ids_in_sglext"] = True
            if self.include_usage:
                body["stream_options"] = {"include_usage": True}
        else:
            body["return_token_ids"] = True
            body["return_meta_info"] = True
        if self.top_logprobs:
            body["top_logprobs"] = self.top_logprobs
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if self.extra_key is not None:
            body["extra_key"] = self.extra_key
        if self.prompt_ids is not None:
            body["input_ids"] = list(self.prompt_ids)
        if self.priority is not None:
            body["priority"] = self.priority
        body |= self.tool_fields()
        if self.response_format is not None:
            body["response_format"] = dict(self.response_format)
        return body

    def tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        return {
            "tools": [_tool(tool, strict=self.demands_a_tool) for tool in self.tools],
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": self.tool_choice or "auto",
        }


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**kept, "content": content}
    parts = []
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"a message's content may hold text parts only, not {part.get('type')!r}")
        parts.append({"type": "text", "text": part["text"]})
    return {**kept, "content": parts}


def _tool(tool: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A demanded call is written under a grammar anyway: unless that knows the parameters it lets any JSON pass."""
    kept = {name: tool["function"][name] for name in FUNCTION_FIELDS if name in tool["function"]}
    if strict:
        kept |= {"strict": True, "parameters": kept.get("parameters") or {"type": "object", "properties": {}}}
    return {"type": "function", "function": kept}
