"""Translation of Messages requests into chat requests, and refusals that say what to do instead."""

import hashlib
from typing import Any

import pytest

from app.chat.schemas import parse_chat_request
from app.core.errors import BadRequest, UnsupportedParameter
from app.messages.schemas import parse_count_request, parse_messages_request
from app.messages.translation import has_late_system, to_chat_body

WEATHER = {"name": "weather", "description": "Look out.", "input_schema": {"type": "object"}}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
HI = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"at": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "wet"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"at":1}'}}


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "shop", "max_tokens": 50, "messages": HI, **fields}


def to_chat(*, takes_late_system: bool = True, **fields: Any) -> dict[str, Any]:
    request = parse_messages_request(body_of(**fields))
    body = to_chat_body(request, takes_late_system=takes_late_system)
    parse_chat_request(body)
    return body


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = to_chat(messages=list(messages), **fields)["messages"]
    return translated


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def test_string_is_user_message() -> None:
    assert to_chat() == {"model": "shop", "messages": HI, "max_completion_tokens": 50}


@pytest.mark.parametrize("blocks", ["Be kind.\n\nBe brief.", [text("Be kind."), text(""), text("Be brief.")]])
def test_system_is_first_message(blocks: Any) -> None:
    [first, second] = to_chat(system=blocks)["messages"]
    assert first == {"role": "system", "content": "Be kind.\n\nBe brief."} and second == HI[0]
    assert to_chat(system="")["messages"] == to_chat(system=[])["messages"] == HI


def test_billing_header_of_claude_code_is_dropped() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.197.c1; cc_entrypoint=cli;")
    assert to_chat(system=[billing, text("Be kind.")])["messages"][0] == system("Be kind.")
    assert messages_of(user(text("hi")), system(billing["text"])) == HI


def test_system_in_mid_conversation_stays_where_the_template_takes_it() -> None:
    conversation = [user(text("hi")), system("It is Friday."), assistant(text("Hello")), user(text("Open?"))]
    assert messages_of(*conversation, system="Be kind.") == [
        system("Be kind."), HI[0], system("It is Friday."),
        {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Open?"},
    ]  # fmt: skip
    assert messages_of(*conversation, system="Be kind.", takes_late_system=False) == [
        system("Be kind.\n\nIt is Friday."), HI[0],
        {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Open?"},
    ]  # fmt: skip
    assert messages_of(system("It is Friday."), *HI, system="Be kind.")[0] == system("Be kind.\n\nIt is Friday.")
    late = parse_messages_request(body_of(messages=conversation)).messages
    assert has_late_system(late) and not has_late_system(late[1:2]) and not has_late_system(late[2:])


def test_tool_results_precede_text_that_follows_and_follow_text_that_precedes() -> None:
    blocks = [text("Look:"), RESULT, RESULT | {"tool_use_id": "call_2"}, text("Thanks."), text("And now?")]
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "wet"}
    assert messages_of(user(text("Rain?")), assistant(USE, USE | {"id": "call_2"}), user(*blocks)) == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call_2"}]},
        {"role": "user", "content": "Look:"},
        answer,
        answer | {"tool_call_id": "call_2"},
        {"role": "user", "content": "Thanks.\n\nAnd now?"},
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [text("a"), text("b")]}, "a\n\nb"),
        ({"content": "no such order", "is_error": True}, "Error: no such order"),
        ({"content": None, "is_error": True}, "Error: "),
        ({"is_error": False}, "wet"),
        ({"content": []}, ""),
    ],
)
def test_tool_result_is_text(fields: dict[str, Any], content: str) -> None:
    assert messages_of(user(RESULT | fields)) == [{"role": "tool", "tool_call_id": "call_1", "content": content}]


def test_reply_is_joined_as_it_was_sampled() -> None:
    blocks = [text("Let me", citations=None), text(" see."), USE | {"caller": {"type": "direct"}}]
    [_, reply, _] = messages_of(*HI, assistant(*blocks), user(RESULT))
    assert reply == {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    assert messages_of(*HI, assistant(), *HI)[1] == {"role": "assistant", "content": ""}


def test_own_thinking_is_given_back_and_that_of_others_is_dropped() -> None:
    own = {"type": "thinking", "thinking": "\nRain?\n\n\n", "signature": ""}
    [_, reply, _] = messages_of(*HI, assistant(own, text("Wet.")), *HI)
    assert reply["content"] == "<think>\nRain?\n</think>\n\nWet."
    foreign = [own | {"signature": "EqQBCkYIBBgC"}, {"type": "redacted_thinking", "data": "EmwKAhgB"}]
    [_, reply, _] = messages_of(*HI, assistant(*foreign, text("Wet.")), *HI)
    assert reply["content"] == "Wet."


def test_tools_are_converted_and_server_tools_skipped() -> None:
    body = to_chat(tools=[WEATHER, SERVER_TOOL, WEATHER | {"name": "two", "type": "custom", "strict": True}])
    function = {"name": "weather", "description": "Look out.", "parameters": {"type": "object"}}
    assert [tool["function"] for tool in body["tools"]] == [function, function | {"name": "two", "strict": True}]
    assert "tools" not in to_chat(tools=[SERVER_TOOL]) and "tool_choice" not in to_chat(tools=[SERVER_TOOL])


def test_tool_choice_is_converted() -> None:
    chosen: dict[str, Any] = {}
    for choice in ("auto", "any", "none"):
        chosen[choice] = to_chat(tools=[WEATHER], tool_choice={"type": choice})["tool_choice"]
    assert chosen == {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = to_chat(tools=[WEATHER], tool_choice=named)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert body["parallel_tool_calls"] is False
    assert "tool_choice" not in to_chat(tools=[SERVER_TOOL], tool_choice={"type": "auto"})


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_output_format_becomes_response_format(field: str) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    fields: dict[str, Any]
    fields = {"output_config": {"effort": "low", "format": format}} if field == "output_config" else {field: format}
    json_schema = {"name": "output", "schema": {"type": "object"}, "strict": True}
    assert to_chat(**fields)["response_format"] == {"type": "json_schema", "json_schema": json_schema}


def test_parameters_are_copied() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "stop_sequences": ["END"]}
    copied = {"temperature": 0.5, "top_p": 0.9, "stop": ["END"], "max_completion_tokens": 50}
    assert to_chat(**fields).items() >= copied.items()
    assert to_chat(stream=True)["stream_options"] == {"include_usage": True}


def test_end_user_is_user_id_and_hashed_if_it_is_long() -> None:
    assert to_chat(metadata={"user_id": "ada"})["user"] == "ada"
    assert "user" not in to_chat(metadata={"user_id": None})
    long = '{"device_id":"' + "d" * 64 + '"}'
    assert to_chat(metadata={"user_id": long})["user"] == hashlib.sha256(long.encode()).hexdigest()
    body = to_chat(metadata={"user_id": "ada", "order": "7"})
    assert (body["user"], body["metadata"]) == ("ada", {"order": "7"})


def test_hints_change_nothing() -> None:
    hints: dict[str, Any] = {
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "betas": ["x-2026-01-01"],
        "cache_control": {"type": "ephemeral"}, "output_config": {"effort": "high"},
        "service_tier": "auto",
        "speed": "fast", "workspace_id": "w_1", "inference_geo": "eu", "user_profile_id": "up_1",
        "diagnostics": {}, "container": None,
        "mcp_servers": [], "system": None, "tools": None, "tool_choice": None, "stop_sequences": None,
        "temperature": None, "top_p": None, "top_k": None, "metadata": None, "stream": None, "output_format": None,
    }  # fmt: skip
    assert to_chat(**hints) == to_chat()
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert messages_of(user(text("hi", **cached))) == HI
    tool = WEATHER | cached | {"defer_loading": True, "allowed_callers": ["direct"], "input_examples": []}
    assert to_chat(tools=[tool]) == to_chat(tools=[WEATHER])


@pytest.mark.parametrize(
    ("fields", "place", "advice"),
    [
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0", "description"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages.0.content.0", "the document's text"),
        (
            {"messages": [user(RESULT | {"content": [text("a"), {"type": "image"}]})]},
            "messages.0.content.0.content.1",
            "description",
        ),
        ({"messages": [*HI, assistant({"type": "server_tool_use"})]}, "messages.1.content.0", "its result"),
        ({"container": "c_1"}, "container", "tool of your own"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers", "in your client"),
        ({"tools": [SERVER_TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name", "own"),
    ],
)
def test_unsupported_part_is_refused_with_place_and_advice(fields: dict[str, Any], place: str, advice: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        to_chat(**fields)
    assert caught.value.param == place and caught.value.message.startswith(f"{place}: ")
    assert advice in caught.value.message


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages: one that is not the system's"),
        ({"messages": [*HI, assistant(text("He"))]}, "messages.1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user(USE)]}, "messages.0.content.0.type"),
        ({"messages": [user()]}, "messages.0.content"),
        ({"messages": [user(7)]}, "messages.0.content.0"),
        ({"messages": [user({"type": "tool_result"})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [assistant(USE | {"input": "x"}), *HI]}, "messages.0.content.0.input"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [WEATHER | {"colour": "red"}]}, "tools.0.colour"),
        ({"tools": [WEATHER], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"metadata": {"user_id": "x" * 4097}}, "user_id"),
        ({"metadata": {"order": "x" * 513}}, "order"),
        ({"n": 2}, "'n'"),
    ],
)
def test_malformed_request_is_refused_with_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        to_chat(**fields)
    assert place in caught.value.message


def test_count_request_ignores_what_is_no_part_of_the_prompt() -> None:
    whole = body_of(stream=True, temperature=0.5, metadata={"user_id": "a"}, system="Be kind.", tools=[WEATHER])
    counted = to_chat_body(parse_count_request(whole))
    assert counted.keys() == {"model", "messages", "tools"}
    assert to_chat_body(parse_count_request({"model": "shop", "messages": HI})) == {"model": "shop", "messages": HI}
    with pytest.raises(BadRequest, match="'colour'"):
        parse_count_request(whole | {"colour": "red"})
