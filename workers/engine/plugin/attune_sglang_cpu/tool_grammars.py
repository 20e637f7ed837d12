"""Grammars of tool calls, as hooks of SGLang: JSON without free white space, one named call, a call or else JSON.

SGLang's own grammar allows any white space within a call, where a small model may never end. It lets a named call be
followed by others. And a response format replaces it, so that no tool can be called.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

Tag = dict[str, Any]
SAMPLING = "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest.to_sampling_params"
DISPATCH = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.dispatch_structural_tag"


def activate() -> None:
    """Register the hooks. SGLang calls this at the start of each of its processes."""
    HookRegistry.register(SAMPLING, to_sampling_params, HookType.AROUND)
    HookRegistry.register(DISPATCH, dispatch_structural_tag, HookType.AROUND)


def to_sampling_params(
    original: Callable[..., dict[str, Any]], request: Any, *args: Any, tool_call_constraint: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the sampling parameters with the grammar of the request's tools and its response format."""
    params = original(request, *args, tool_call_constraint=tool_call_constraint, **options)
    if tool_call_constraint is None or tool_call_constraint[0] != "structural_tag":
        return params
    calls = to_calls(tool_call_constraint[1].model_dump(by_alias=True))
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


def to_calls(tag: Tag) -> Tag | None:
    """Return the part of a structural tag that holds the calls, or None if the model's format is of another form."""
    if tag.get("structures") is None:
        calls: Any = tag.get("format")
        return calls if isinstance(calls, dict) and calls.get("type") == "triggered_tags" else None
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"] or {}},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    at_least_one = bool(tag.get("at_least_one"))
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags, "at_least_one": at_least_one}


def to_text(format: Tag) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def dispatch_structural_tag(original: Callable[..., Any], backend: Any, text: str) -> Any:
    """Compile a structural tag whose JSON has no free white space, if the engine's other JSON has none either."""
    if not backend.any_whitespace:
        tag = json.loads(text)
        if tag.get("structures") is not None and (calls := to_calls(tag)) is not None:
            tag = {"type": "structural_tag", "format": calls}
        with suppress(RuntimeError):  # an invalid schema, for which the original reports the error
            text = json.dumps(close_white_space(tag))
    return original(backend, text)


def close_white_space(part: Any) -> Any:
    """Return the part of a structural tag with each JSON schema replaced by its grammar. Raises RuntimeError."""
    from xgrammar import Grammar  # not at the top: only the scheduler compiles grammars

    if isinstance(part, list):
        return [close_white_space(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        grammar = Grammar.from_json_schema(json.dumps(part.get("json_schema") or {}), any_whitespace=False)
        return {"type": "grammar", "grammar": str(grammar)}
    return {name: close_white_space(item) for name, item in part.items()}
