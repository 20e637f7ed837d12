"""SGLang's chat requests and replies: the fields that it takes, and where it says which tokens it generated."""

from dataclasses import replace
from typing import NotRequired, TypedDict

from alignment.chat_messages import openai_tool_call
from app.inference.capture import Capture, WeightSpan, build_capture, to_logprob
from app.inference.chat_format import Choice, Usage
from app.inference.request import ChatCall, engine_messages
from app.inference.stream import EngineChunk, StreamState

ScoredToken = tuple[float | None, int, str | None]  # its log-prob, its id, and its text where that was asked for


class MetaInfo(TypedDict):
    output_token_logprobs: list[ScoredToken]
    weight_versions: NotRequired[list[WeightSpan] | None]


class SGLangChoice(Choice):
    prompt_token_ids: list[int] | None
    response_token_ids: list[int] | None
    meta_info: MetaInfo


class InputLogprobs(TypedDict):
    input_token_logprobs: list[ScoredToken]


class GeneratedReply(TypedDict):
    """An answer of the route that takes token ids."""

    meta_info: InputLogprobs


class SGLangCompletion(TypedDict):
    choices: list[SGLangChoice]
    usage: Usage


def chat_body(call: ChatCall, *, stream: bool) -> dict[str, object]:
    """Return the body of the request for a reply."""
    body: dict[str, object] = {
        "rid": call.rid,
        "model": call.target.label,
        "messages": engine_messages(call.messages),
        **call.sampling.body(),
        "stream": stream,
        "logprobs": True,
    }
    if stream:
        body["return_input_ids_in_sglext"] = True
        body["return_output_ids_in_sglext"] = True
        if call.include_usage:
            usage_stats = {"continuous_usage_stats": True} if call.names_stop_text else {}
            body["stream_options"] = {"include_usage": True, **usage_stats}
    else:
        body["return_token_ids"] = True
        body["return_meta_info"] = True
    optional = {
        "top_logprobs": call.top_logprobs or None,
        "lora_path": call.target.adapter,
        "extra_key": call.target.prefix_key,
        "input_ids": call.prompt_ids,
        "priority": call.priority,
        "response_format": None if call.requires_tool_call else call.response_format,
    }
    return body | {name: value for name, value in optional.items() if value is not None} | call.tool_fields()


def capture_choice(call: ChatCall, choice: SGLangChoice) -> Capture:
    """Return the capture of a whole reply, which is a choice of SGLang's response."""
    meta, message = choice["meta_info"], choice["message"]
    received = Capture(
        prompt_ids=choice["prompt_token_ids"] or [],
        output_ids=choice["response_token_ids"] or [],
        logprobs=[to_logprob(logprob) for logprob, _, _ in meta["output_token_logprobs"]],
        text=message["content"] or "",
        tool_calls=[openai_tool_call(tool_call) for tool_call in message.get("tool_calls") or ()],
        finish_reason=choice["finish_reason"],
        weight_versions=[
            {"version": span["version"], "start": span["start"], "end": span["end"]}
            for span in meta.get("weight_versions") or ()
        ],
    )
    scored_ids = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    if len(received.output_ids) == len(scored_ids) and received.output_ids != scored_ids:
        received = replace(received, exclusion_reason="the engine's log-probs belong to other tokens")
    return build_capture(call, received)


class SGLangStreamState(StreamState):
    """SGLang sends the ids in a chunk of its own, at the end, and reports no weight versions in a stream."""

    def take_engine_fields(self, chunk: EngineChunk) -> None:
        if (extra := chunk.pop("sglext", None)) is not None:
            self.prompt_ids = extra["input_ids"]
            self.output_ids = extra["output_ids"][0]
        for choice in chunk["choices"]:
            choice.pop("hidden_states", None)
            if choice["delta"].get("reasoning_content") is None:
                choice["delta"].pop("reasoning_content", None)
