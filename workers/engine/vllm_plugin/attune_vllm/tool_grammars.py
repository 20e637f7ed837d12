"""Grammars of tool calls: the schema of a tool constrains its arguments, and leaves no room for white space.

vLLM leaves the arguments of a tool free unless it is strict, and allows any white space in them, where a small model
may never end. The tools in the prompt stay as they are.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

ANY_OBJECT = '{"type": "object"}'


def enforce_schemas() -> None:
    """Let the schemas of tools that must be called constrain their arguments, where a grammar expresses them."""
    from vllm.parser import abstract_parser
    from vllm.tool_parsers import structural_tag_registry as registry

    resolve, build = registry.resolve_tool_strictness, registry.get_model_structural_tag

    def resolve_tool_strictness(tools: Sequence[Any], tool_choice: Any, strict_level: Any) -> Any:
        if tool_choice not in (None, "auto"):
            tools = [registry._with_tool_strict(tool, True) if _is_guided(tool) else tool for tool in tools]
        return resolve(tools, tool_choice, strict_level)

    def get_model_structural_tag(*args: Any, **options: Any) -> Any:
        tag = build(*args, **options)
        return tag if tag is None else type(tag).model_validate(expand_schemas(tag.model_dump(by_alias=True)))

    registry.resolve_tool_strictness = resolve_tool_strictness
    registry.get_model_structural_tag = get_model_structural_tag
    abstract_parser.resolve_tool_strictness = resolve_tool_strictness


def expand_schemas(part: Any) -> Any:
    """Return the part of a structural tag with each JSON schema replaced by its grammar.

    Raises ValueError, which vLLM answers with 400, for a schema that no grammar expresses.
    """
    if isinstance(part, list):
        return [expand_schemas(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        schema = part.get("json_schema")
        grammar = to_grammar(json.dumps(schema) if isinstance(schema, dict) and schema else ANY_OBJECT)
        if grammar is None:
            raise ValueError("no grammar expresses the schema of a strict tool")
        return {"type": "grammar", "grammar": grammar}
    return {name: expand_schemas(item) for name, item in part.items()}


def _is_guided(tool: Any) -> bool:
    """Whether the tool says nothing about strictness, and a grammar expresses its schema."""
    function = getattr(tool, "function", None)
    if function is None or function.strict is not None:
        return False
    return to_grammar(json.dumps(function.parameters or {"type": "object", "properties": {}})) is not None


@lru_cache(maxsize=1024)
def to_grammar(schema: str) -> str | None:
    """Return the grammar of a JSON schema, or None if there is none."""
    from xgrammar import Grammar

    try:
        return str(Grammar.from_json_schema(schema, any_whitespace=False))
    except RuntimeError:
        return None
