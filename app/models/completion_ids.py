"""The ids that a completion is known by: of its request, its response and message, and as LiteLLM writes the second."""

import re
from base64 import b64decode

REWRITTEN = re.compile(r"litellm:.*;response_id:(resp_[^;]+)")


def to_completion_id(id: str) -> str:
    """Return the id of the completion that this request, response or message id belongs to; another id as it is.

    The ids that one request is known by differ in their prefixes only: the header x-request-id is "req-9f2c…", the
    completion "chatcmpl-9f2c…", its response on /v1/responses "resp_9f2c…", its message on /v1/messages "msg_9f2c…".
    LiteLLM returns another id for a
    response, "resp_" and the base64 of "litellm:custom_llm_provider:openai;model_id:None;response_id:resp_9f2c…".
    """
    if id.startswith("resp_"):
        id = _original_id(id)
    for prefix in ("req-", "resp_", "msg_"):
        if id.startswith(prefix):
            return "chatcmpl-" + id.removeprefix(prefix)
    return id


def _original_id(id: str) -> str:
    """Return the response id within one of LiteLLM; another id as it is."""
    encoded = id.removeprefix("resp_")
    try:
        match = REWRITTEN.fullmatch(b64decode(encoded + "=" * (-len(encoded) % 4), validate=True).decode("ascii"))
    except ValueError:  # it is not base64, or not of ASCII text
        return id
    return id if match is None else match[1]
