"""Feedback on the runs of agents: LangGraph, and the OpenAI Agents SDK.

replies = langgraph_replies(graph.invoke(request, config))     # or graph.get_state(config)
rate_run(client.feedback, replies, True, source={"kind": "CODE", "id": "tests"})
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Unpack

from attune_client.feedback import FeedbackKinds
from attune_client.replies import ID_PREFIXES
from attune_client.types import FeedbackFields

R = TypeVar("R")
NO_ID = 'a response of this run has no id: give feedback by metadata of your own, {"metadata": {…}} as the reply'


def langgraph_replies(state: Any) -> list[Any]:
    """Return the model's messages since the last message of the user.

    Args:
        state: The state that a graph returns, a snapshot of `get_state`, or a list of messages. The model must be a
            ChatAttune, since ChatOpenAI loses the ids of streamed replies.
    """
    values = getattr(state, "values", state) if not isinstance(state, Mapping) else state
    messages = list(values["messages"] if isinstance(values, Mapping) else values)
    start = max((at + 1 for at, message in enumerate(messages) if message.type == "human"), default=0)
    return [message for message in messages[start:] if message.type in ("ai", "AIMessageChunk")]


def agents_sdk_replies(result: Any) -> list[str]:
    """Return the ids of a run's model calls, in order. `result` is a RunResult, streamed or not.

    Over chat completions the SDK keeps no completion id, and invents one for streams; it keeps the request's id.
    """
    ids = []
    for response in result.raw_responses:
        known = [id for id in (response.response_id, response.request_id) if id and id.startswith(ID_PREFIXES)]
        if not known:
            raise ValueError(NO_ID)
        ids.append(known[0])
    return ids


def rate_run(
    feedback: FeedbackKinds[R], replies: Iterable[Any], value: bool | float, **fields: Unpack[FeedbackFields]
) -> list[R]:
    """Give the same feedback on every reply of a run: a thumb for a bool, a score in [-1, 1] for a number.

    `feedback` is that of a client or an offline queue. That of AsyncAttune returns awaitables: gather them. An `id`
    or a `key` gets the number of the reply appended.
    """
    results = []
    for number, reply in enumerate(replies):
        own = fields
        if "id" in fields:
            own = fields | {"id": f"{fields['id']}/{number}"}
        elif "key" in fields:
            own = fields | {"key": f"{fields['key']}/{number}"}
        if isinstance(value, bool):
            results.append(feedback.up(reply, **own) if value else feedback.down(reply, **own))
        else:
            results.append(feedback.score(reply, value, **own))
    return results
