"""Tool calls of the real engine: a streamed reply equals the whole one, wherever a limit or a stop text cuts it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.inference.capture import Capture
from app.inference.engine import EngineClient
from tests.support.engine_replies import MakeCall, capture_completion, capture_stream

pytestmark = pytest.mark.engine
NAMED = {"type": "function", "function": {"name": "save_note"}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "enum": ['/notes/ä "quoted" {x}\nEND of it']},
        "pages": {"type": "integer", "enum": [17]},
    },
    "required": ["path", "pages"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "save_note", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "read_note", "parameters": PARAMETERS}},
]


@pytest.fixture(scope="module")
def call_token(engine_model: Path) -> str:
    """Return the id of the token that begins a call."""
    tokenizer = Tokenizer.from_file(str(engine_model / "tokenizer.json"))
    return str(tokenizer.encode("<tool_call>", add_special_tokens=False).ids[0])


def summary(capture: Capture) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in capture.tool_calls]
    return capture.output_ids, capture.text, calls, capture.finish_reason


async def both(client: EngineClient, make_call: MakeCall, **fields: Any) -> Capture:
    """Return the reply after checking that both modes give the same one. It is greedy, so that they sample alike."""
    whole = await capture_completion(client, make_call("Save a note.", temperature=0.0, **fields))
    streamed = await capture_stream(client, make_call("Save a note.", temperature=0.0, **fields))
    assert summary(streamed) == summary(whole)
    return whole


@pytest.mark.parametrize(
    ("choice", "step"),
    [
        pytest.param(NAMED, 4, id="named"),
        pytest.param(NAMED, 1, id="named, every length", marks=pytest.mark.slow),
        pytest.param("required", 5, id="required"),
        pytest.param("auto", 5, id="strict"),
    ],
)
async def test_call_is_the_same_streamed_and_whole_at_every_length(
    engine_client: EngineClient, make_call: MakeCall, call_token: str, choice: Any, step: int
) -> None:
    strict = {"type": "function", "function": {"name": "save_note", "parameters": PARAMETERS, "strict": True}}
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    if choice == "auto":
        options |= {"tools": [strict], "logit_bias": {call_token: 100.0}}
    complete = await both(engine_client, make_call, **options, max_tokens=120)
    [call] = complete.tool_calls
    assert complete.finish_reason == "tool_calls"
    arguments = call["function"]["arguments"]
    assert json.loads(arguments)["pages"] == 17
    for limit in range(1, len(complete.output_ids), step):
        cut = await both(engine_client, make_call, **options, max_tokens=limit)
        assert cut.finish_reason == "length" and cut.text == ""
        for part in cut.tool_calls:
            assert part["function"]["name"] == call["function"]["name"]
            # The limit may cut a character, whose bytes are several tokens.
            assert arguments.startswith(part["function"]["arguments"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("stop", "arguments"),
    [
        ("END", '{"path": "/notes/ä \\"quoted\\" {x}\\n'),
        ("otes", '{"path": "/n'),
        ("quoted\\", '{"path": "/notes/ä \\"'),
        ("{x}", '{"path": "/notes/ä \\"quoted\\" '),
        ('{"path', ""),
        ("17", '{"path": "/notes/ä \\"quoted\\" {x}\\nEND of it", "pages": '),
    ],
)
async def test_stop_text_within_arguments_ends_the_reply_there(
    engine_client: EngineClient, make_call: MakeCall, stop: str, arguments: str
) -> None:
    cut = await both(engine_client, make_call, tools=TOOLS, tool_choice=NAMED, stop=(stop,), max_tokens=120)
    assert cut.finish_reason == "stop"
    assert [call["function"]["arguments"] for call in cut.tool_calls] == [arguments]


async def test_stop_text_after_the_arguments_leaves_a_complete_call(
    engine_client: EngineClient, make_call: MakeCall
) -> None:
    complete = await both(engine_client, make_call, tools=TOOLS, tool_choice=NAMED, stop=("</tool",), max_tokens=120)
    assert complete.finish_reason == "tool_calls"
    assert json.loads(complete.tool_calls[0]["function"]["arguments"])["pages"] == 17


async def test_text_is_the_same_streamed_and_whole_with_every_stop_text(
    engine_client: EngineClient, make_call: MakeCall
) -> None:
    """Stop texts of one token, of several, and within one; with tools too, whose replies hold special tokens."""
    text = (await both(engine_client, make_call, max_tokens=40)).text
    stops = {text[start : start + size] for start in range(0, len(text), 17) for size in (1, 9)}
    for stop in sorted(stops):
        cut = await both(engine_client, make_call, max_tokens=40, stop=(stop, "never said"))
        assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
        with_tools = await both(engine_client, make_call, max_tokens=40, stop=(stop, "never said"), tools=TOOLS)
        assert stop not in with_tools.text and "<|im_end|>" not in with_tools.text
