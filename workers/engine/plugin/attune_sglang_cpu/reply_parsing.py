"""Parsing of replies, as hooks of SGLang: a streamed reply and a whole one give the same text, calls and finish reason.

SGLang uses one parser for a stream and another for a whole reply: of a call that was cut, one completes the arguments
and the other keeps nothing. It also streams the beginning of a stop text that several tokens make up.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from attune_sglang_cpu.call_parser import CallParser, Parsed, held_length

SERVING = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
PARSER = "sglang.srt.function_call.function_call_parser.FunctionCallParser.__init__"
TAGGED_FORMATS = ("qwen", "qwen25", "hermes")  # the parsers of SGLang whose format `CallParser` reads


def register() -> None:
    HookRegistry.register(PARSER, init_parser, HookType.AROUND)
    HookRegistry.register(f"{SERVING}._process_tool_calls", process_tool_calls, HookType.AROUND)
    HookRegistry.register(f"{SERVING}._generate_stream_content", generate_stream_content, HookType.AROUND)
    HookRegistry.register(f"{SERVING}._build_chat_response", build_chat_response, HookType.AROUND)


def is_forced(tool_choice: Any) -> bool:
    return tool_choice == "required" or not (tool_choice is None or isinstance(tool_choice, str))


def new_call_parser(tools: Sequence[Any], tool_choice: Any) -> CallParser:
    return CallParser({tool.function.name for tool in tools}, is_forced=is_forced(tool_choice))


class StreamedCalls:
    """What SGLang calls of a detector during a stream, with `CallParser`."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self.incomplete: set[int] = set()

    def parse_streaming_increment(self, text: str, tools: Any) -> Any:
        return to_streaming_result(self._parser.feed(text))

    def finish(self, tools: Any) -> Any:
        result = to_streaming_result(self._parser.finish())
        if self._parser.cut_index is not None:
            self.incomplete.add(self._parser.cut_index)
        return result


def to_streaming_result(parsed: Parsed) -> Any:
    from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem

    calls = [ToolCallItem(tool_index=part.index, name=part.name, parameters=part.arguments) for part in parsed.calls]
    return StreamingParseResult(normal_text=parsed.content, calls=calls)


def init_parser(
    original: Callable[..., None], parser: Any, tools: Any, tool_call_parser: str, *args: Any, **options: Any
) -> None:
    """Create SGLang's parser, whose detector then parses streams with `CallParser`."""
    original(parser, tools, tool_call_parser, *args, **options)
    if tool_call_parser in TAGGED_FORMATS:
        streamed = StreamedCalls(new_call_parser(tools, options.get("tool_choice")))
        parser.detector.parse_streaming_increment = streamed.parse_streaming_increment
        parser.detector.finish = streamed.finish
        parser.detector.incomplete_tool_call_indices = streamed.incomplete


def process_tool_calls(
    original: Callable[..., Any],
    serving: Any,
    text: str,
    tools: Any,
    finish_reason: dict[str, Any],
    tool_choice: Any = None,
    history_tool_calls_cnt: int = 0,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the tool calls, the text and the finish reason of a whole reply."""
    if serving.tool_call_parser not in TAGGED_FORMATS:
        return original(serving, text, tools, finish_reason, tool_choice, history_tool_calls_cnt, *args, **options)
    from sglang.srt.entrypoints.openai.protocol import FunctionResponse, ToolCall, ToolCallProcessingResult
    from sglang.srt.function_call.core_types import ToolCallItem

    parser = new_call_parser(tools, tool_choice)
    content, calls = "", list[Any]()
    for parsed in (parser.feed(text), parser.finish()):
        content += parsed.content
        for part in parsed.calls:
            if part.index == len(calls):
                item = ToolCallItem(tool_index=part.index, name=part.name, parameters="")
                id = serving._process_tool_call_id(item, history_tool_calls_cnt)
                function = FunctionResponse(name=part.name, arguments="")
                calls.append(ToolCall(id=id, index=part.index, function=function))
            calls[part.index].function.arguments += part.arguments
    if calls and finish_reason["type"] == "stop" and parser.cut_index is None:
        finish_reason["type"], finish_reason["matched"] = "tool_calls", None
    return ToolCallProcessingResult(calls or None, content, finish_reason)


def generate_stream_content(
    original: Callable[..., Any], serving: Any, *args: Any, content: dict[str, Any], request: Any, **options: Any
) -> Any:
    """Stream the chunks of what a client may see so far of the text."""
    if keeps_stop_texts(request):
        content = content | {"text": visible_text(serving, request, content)}
    return original(serving, *args, content=content, request=request, **options)


def build_chat_response(
    original: Callable[..., Any], serving: Any, request: Any, replies: list[dict[str, Any]], created: int
) -> Any:
    if keeps_stop_texts(request):
        replies = [reply | {"text": visible_text(serving, request, reply)} for reply in replies]
    return original(serving, request, replies, created)


def keeps_stop_texts(request: Any) -> bool:
    """Return whether the texts that SGLang hands over hold the stop texts: what it trims depends on its batches."""
    from sglang.srt.runtime_context import get_serving

    return bool(request.stop) and not get_serving().incremental_streaming_output


def visible_text(serving: Any, request: Any, reply: dict[str, Any]) -> str:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    text, reason = reply["text"], reply["meta_info"].get("finish_reason")
    if reason is not None and isinstance(reason.get("matched"), int):  # the end-of-turn token
        decode = serving.tokenizer_manager.tokenizer.decode
        text = text.removesuffix(decode([reason["matched"]], skip_special_tokens=request.skip_special_tokens))
    return trim_stop_texts(text, stops, is_finished=reason is not None)


def trim_stop_texts(text: str, stops: Sequence[str], *, is_finished: bool) -> str:
    """Return the text before the first stop text; before its end, without what may be the beginning of one."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    held = 0 if is_finished else max(held_length(text, stop) for stop in stops)
    return text[: len(text) - held]
