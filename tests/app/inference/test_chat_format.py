"""A whole completion as one chunk holds what the chunks of a stream add up to."""

from app.inference.chat_format import ChatCompletion, Usage, plain_usage, to_chunk

USAGE: Usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_completion_as_a_chunk() -> None:
    completion: ChatCompletion = {
        "id": "chatcmpl-1",
        "model": "shop@v1",
        "created": 17,
        "choices": [
            {
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": USAGE,
    }
    [choice] = to_chunk(completion)["choices"]
    part = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    assert choice["delta"] == {"content": None, "tool_calls": [part]} and choice["finish_reason"] == "tool_calls"
    assert to_chunk(completion)["usage"] == USAGE


def test_usage_is_passed_on_without_fields_of_the_engine() -> None:
    assert plain_usage({**USAGE, "prompt_tokens_details": {"cached_tokens": 1}}) == USAGE
