"""The function calls of a message are read whatever has written it."""

from collections.abc import Mapping

import pytest

from alignment.chat_messages import function_calls

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize("message", [{"content": "hi"}, {"tool_calls": None}, {"tool_calls": []}])
def test_message_without_calls(message: Mapping[str, object]) -> None:
    assert function_calls(message) == []


def test_calls_have_their_names_and_arguments() -> None:
    assert function_calls({"tool_calls": [CALL]}) == [{"name": "f", "arguments": "{"}]


def test_malformed_call_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a text, found dict"):
        function_calls({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
