"""Grammars of tool calls and the tools in the prompt, as hooks of SGLang.

SGLang's own grammar allows any white space within a call, where a small model may never end. It lets a named call be
followed by others, and allows calls of all tools. A response format replaces it, so that no tool can be called. And
`tool_choice` changes which tools the prompt holds, so that the next turn's prompt does not begin with this one.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from attune_sglang_cpu import reply_parsing
from attune_sglang_cpu.reply_parsing import is_forced, keeps_stop_texts

Tag = dict[str, Any]
SAMPLING = "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest.to_sampling_params"
DISPATCH = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.dispatch_structural_tag"
TEMPLATE = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._apply_jinja_template"
GUIDE = "is_guide"  # of a JSON schema: any object will do if no grammar expresses it
ANY_OBJECT = '{"type": "object"}'
NO_PARAMETERS: Tag = {"type": "object", "properties": {}}


def activate() -> None:
    """Register the hooks. SGLang calls this at the start of each of its processes."""
    HookRegistry.register(SAMPLING, to_sampling_params, HookType.AROUND)
    HookRegistry.register(DISPATCH, dispatch_structural_tag, HookType.AROUND)
    HookRegistry.register(TEMPLATE, apply_template, HookType.AROUND)
    reply_parsing.register()


def apply_template(original: Callable[..., Any], serving: Any, request: Any, tools: Any, *args: Any) -> Any:
    """Render the prompt with all tools, whatever `tool_choice` says: the next turn may have another one."""
    every_tool = [tool.model_dump() for tool in request.tools] if request.tools else tools
    return original(serving, request, every_tool, *args)


def to_sampling_params(
    original: Callable[..., dict[str, Any]], request: Any, *args: Any, tool_call_constraint: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the sampling parameters with the grammar of the request's tools and its response format."""
    params = original(request, *args, tool_call_constraint=tool_call_constraint, **options)
    if keeps_stop_texts(request):
        params["no_stop_trim"] = True
    if not request.tools:
        return params
    if request.tool_choice == "none":
        return params | without_calls(params)
    calls = None
    if tool_call_constraint is None and "json_schema" in params and request.tool_choice == "auto":
        calls = calls_of(request.tools)
    elif tool_call_constraint is not None and tool_call_constraint[0] == "structural_tag":
        calls = to_calls(tool_call_constraint[1].model_dump(by_alias=True), request.tools, request.tool_choice)
    if calls is None:
        return params
    if not isinstance(request.tool_choice, str) or not request.parallel_tool_calls:
        calls["stop_after_first"] = True
    if "json_schema" in params:  # an automatic choice: SGLang refuses other ones beside a response format
        answer = {"type": "json_schema", "json_schema": json.loads(params.pop("json_schema"))}
        params["structural_tag"] = to_text({"type": "or", "elements": [calls | {"at_least_one": True}, answer]})
    elif "structural_tag" in params:
        params["structural_tag"] = to_text(calls)
    return params


def new_parser(tools: Sequence[Any]) -> Any:
    """Return SGLang's parser of this model's calls, or None without one."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.runtime_context import get_context

    name = get_context().config_leaf("tool_call_parser")
    return None if name is None else FunctionCallParser(list(tools), name)


def without_calls(params: dict[str, Any]) -> Tag:
    """Return the grammar of a reply without calls, whose prompt names the tools; none beside another grammar."""
    parser = new_parser(())
    marker = "" if parser is None else parser.detector.bot_token.strip()
    if not marker or any(params.get(name) for name in ("json_schema", "structural_tag", "regex", "ebnf")):
        return {}
    return {"structural_tag": to_text({"type": "any_text", "excludes": [marker]})}


def calls_of(tools: Sequence[Any]) -> Tag | None:
    """Return the part of a structural tag that holds optional calls, for which SGLang has no constraint."""
    parser = new_parser(tools)
    if parser is None or not parser.detector.supports_structural_tag():
        return None
    return to_calls(parser.get_legacy_structural_tag().model_dump(by_alias=True), tools, "auto")


def to_calls(tag: Tag, tools: Sequence[Any], tool_choice: Any) -> Tag | None:
    """Return the part of a structural tag that holds the calls, or None if the model's format is of another form.

    The schema of a tool that is not strict guides its arguments, unless no grammar expresses it.
    """
    if tag.get("structures") is None:
        calls: Any = tag.get("format")
        return calls if isinstance(calls, dict) and calls.get("type") == "triggered_tags" else None
    named = None if isinstance(tool_choice, str) else tool_choice.function.name
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {
                "type": "json_schema",
                "json_schema": tool.function.parameters or NO_PARAMETERS,
                GUIDE: not tool.function.strict,
            },
            "end": structure["end"],
        }
        for structure, tool in zip(tag["structures"], tools, strict=True)
        if named in (None, tool.function.name)
    ]
    at_least_one = is_forced(tool_choice)
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags, "at_least_one": at_least_one}


def to_text(format: Tag) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def dispatch_structural_tag(original: Callable[..., Any], backend: Any, text: str) -> Any:
    """Compile a structural tag whose JSON has no free white space, if the engine's other JSON has none either."""
    with suppress(RuntimeError):  # an invalid schema, for which the original reports the error
        text = json.dumps(expand_schemas(json.loads(text), any_whitespace=backend.any_whitespace))
    return original(backend, text)


def expand_schemas(part: Any, *, any_whitespace: bool) -> Any:
    """Return the part of a structural tag with each JSON schema replaced by its grammar. Raises RuntimeError."""
    if isinstance(part, list):
        return [expand_schemas(item, any_whitespace=any_whitespace) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        schema = json.dumps(part.get("json_schema") or {})
        return {"type": "grammar", "grammar": to_grammar(schema, bool(part.get(GUIDE)), any_whitespace)}
    return {name: expand_schemas(item, any_whitespace=any_whitespace) for name, item in part.items()}


def to_grammar(schema: str, is_guide: bool, any_whitespace: bool) -> str:
    from xgrammar import Grammar  # not at the top: only the scheduler compiles grammars

    try:
        return str(Grammar.from_json_schema(schema, any_whitespace=any_whitespace))
    except RuntimeError:
        if not is_guide:
            raise
        return str(Grammar.from_json_schema(ANY_OBJECT, any_whitespace=any_whitespace))
