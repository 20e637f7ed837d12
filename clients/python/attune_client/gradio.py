"""Gradio: the thumbs of a chatbot.

    chatbot.like(vote(client), chatbot)

The messages of the assistant carry the completion id of their reply, as `{"metadata": {"id": reply.completion_id}}`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from attune_client.replies import ID_PREFIXES
from attune_client.votes import Receiver, receiver_of, send_vote, source_id


def vote(client: Receiver, user: Callable[[Any], str] | None = None) -> Callable[..., None]:
    """Return the listener of `gr.Chatbot.like`, whose input is the chatbot.

    Another thumb replaces the one before, pressing the same again takes it back, and other feedback options are labels.

    Args:
        client: Attune, its feedback or its queue.
        user: Returns who votes from a `gr.Request`: by default the person who logged in, or else the browser's session.
    """
    import gradio

    receiver = receiver_of(client)

    def send(history: Sequence[Any], data: gradio.LikeData, request: gradio.Request) -> None:
        reply = _find_completion_id(history, data.index)
        if reply is None:
            return
        person = user(request) if user else request.username or request.session_hash or "unknown"
        source = source_id("gradio", person)
        value = None if data.liked == "" else data.liked  # "" is a thumb that was pressed again
        send_vote(receiver, reply, value, key=f"{source}:{reply}", source=source)

    return send


def _find_completion_id(history: Sequence[Any], index: int | tuple[int, int]) -> str | None:
    """Return the last completion id in the messages of the assistant that begin here: thoughts may precede a reply."""
    found = None
    for message in history[index if isinstance(index, int) else index[0] :]:
        if message["role"] != "assistant":
            break
        id = (message.get("metadata") or {}).get("id")
        if isinstance(id, str) and id.startswith(ID_PREFIXES):
            found = id
    return found
