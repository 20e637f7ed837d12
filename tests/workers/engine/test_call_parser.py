"""The engine's parser of tool calls: what it finds in a text does not depend on the pieces that the text arrives in."""

import importlib.util
import itertools
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.settings import REPOSITORY


def load_plugin(name: str) -> ModuleType:
    """Return a module of the engine's plugin, whose package is installed in the engine's environment only."""
    path = REPOSITORY / "workers" / "engine" / "plugin" / "attune_sglang_cpu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"plugin_{name}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CallParser: Any = load_plugin("call_parser").CallParser
NAMES = {"order_status", "save_note"}
Result = tuple[str, list[tuple[str, str]], int | None]


def parse(pieces: list[str], *, is_forced: bool = False) -> Result:
    """Return the text, the calls as (name, arguments), and which of them was cut."""
    parser = CallParser(NAMES, is_forced=is_forced)
    content, calls = "", list[tuple[str, str]]()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        for part in parsed.calls:
            if part.index == len(calls):
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return content, calls, parser.cut_index


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


CALL = block('{"name": "order_status", "arguments": {"order": 7}}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello. ", "Hello. ", []),
        (CALL, "", [("order_status", '{"order": 7}')]),
        (f"One moment.\n{CALL}\n{CALL}\nDone.", "One moment.\nDone.", [("order_status", '{"order": 7}')] * 2),
        (
            block('{"name":"save_note","parameters":{"a":"</tool_call>}"}}'),
            "",
            [("save_note", '{"a":"</tool_call>}"}')],
        ),
        (block('{"arguments": {"ä": 1}, "name": "save_note"}'), "", [("save_note", '{"ä": 1}')]),
        (block('{"name": "save_note"}'), "", [("save_note", "{}")]),
        (block('{"name": "save_note", "arguments": "{\\"a\\": 1}"}'), "", [("save_note", '"{\\"a\\": 1}"')]),
        (block('{"name": "save_note", "arguments": {"a": 1,}}'), "", [("save_note", '{"a": 1,}')]),
        (block('{"name": "nobody", "arguments": {}}'), block('{"name": "nobody", "arguments": {}}'), []),
        (block("no json"), block("no json"), []),
        ("The tag <tool_call> begins a call.", "The tag <tool_call> begins a call.", []),
        ("1 <tool", "1 <tool", []),
    ],
)
def test_calls_and_text_are_separated(text: str, content: str, calls: list[Any]) -> None:
    assert parse([text]) == (content, calls, None)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_c", []),
        ('<tool_call>\n{"name": "order_st', []),
        ('<tool_call>\n{"name": "order_status"', [("order_status", "")]),
        ('<tool_call>\n{"name": "order_status", "argum', [("order_status", "")]),
        ('<tool_call>\n{"name": "order_status", "arguments": {"order": "a}', [("order_status", '{"order": "a}')]),
        ('<tool_call>\n{"name": "order_status", "arguments": {"order": 7}', [("order_status", '{"order": 7}')]),
    ],
)
def test_cut_call_is_kept_as_far_as_it_came(text: str, calls: list[Any]) -> None:
    content, found, cut = parse([text], is_forced=True)
    assert (content, found) == ("", calls)
    is_whole = bool(calls) and calls[0][1].endswith("7}")
    assert cut == (0 if calls and not is_whole else None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    lambda name, arguments, indent: block(json.dumps({"name": name, "arguments": arguments}, indent=indent)),
    st.sampled_from(sorted(NAMES | {"nobody"})),
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.sampled_from([None, 2]),
)
FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n</tool_call>", "<", " \n", '{"name": "save_note"', '"', "}"]
)
TEXTS = st.lists(CALLS | FRAGMENTS | st.text(max_size=5), max_size=5).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(min_value=0, max_value=300), max_size=8), is_forced=st.booleans())
def test_pieces_of_any_text_give_the_same_as_the_whole(text: str, cuts: list[int], is_forced: bool) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    whole = parse([text], is_forced=is_forced)
    assert parse(pieces, is_forced=is_forced) == whole
    assert parse(list(text), is_forced=is_forced) == whole


@given(text=TEXTS, end=st.integers(min_value=0, max_value=300))
def test_text_that_is_cut_gives_the_beginning_of_the_whole(text: str, end: int) -> None:
    """What was streamed before the cut stays true. Its last call may be shorter."""
    parser, content, calls = CallParser(NAMES), "", list[str]()
    for part in [parser.feed(text[:end])]:
        content += part.content
        calls += [found.name for found in part.calls if found.name is not None]
    whole_content, whole_calls, _ = parse([text])
    assert whole_content.startswith(content) and [name for name, _ in whole_calls][: len(calls)] == calls


@given(arguments=st.dictionaries(st.text(), VALUES, max_size=4), indent=st.sampled_from([None, 2]))
def test_arguments_are_passed_on_as_the_model_wrote_them(arguments: dict[str, Any], indent: int | None) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=False)
    text = block(f'{{"name": "save_note", "arguments": {written}}}')
    assert parse(list(text)) == ("", [("save_note", written)], None)
