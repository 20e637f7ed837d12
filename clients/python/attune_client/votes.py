"""Votes in a user interface, where people change them and take them back. The modules of Gradio and others use this."""

import hashlib
import logging
import time
from typing import Any

from attune_client.client import Attune
from attune_client.errors import Conflict, NotFound
from attune_client.feedback import AsyncFeedback, FeedbackReceiver
from attune_client.types import FeedbackFields

log = logging.getLogger("attune_client")
MAX_LENGTH = 255  # of a key and of the id of a source
Receiver = Attune | FeedbackReceiver[Any]


def receiver_of(client: Receiver) -> FeedbackReceiver[Any]:
    """Return where votes go: a client's `feedback`, or that or an offline queue itself."""
    receiver = client.feedback if isinstance(client, Attune) else client
    if isinstance(receiver, AsyncFeedback) or not isinstance(receiver, FeedbackReceiver):
        raise TypeError(f"pass Attune, its feedback or its queue, not {type(client).__name__}")
    return receiver


def source_id(connector: str, user: str) -> str:
    """Return the id of a person of a user interface. Example: ("gradio", "ada") -> "gradio:ada"."""
    return shorten(f"{connector}:{user}")


def shorten(id: str) -> str:
    """Return an id of at most 255 characters: a longer one with its hash in place of its end."""
    digest = hashlib.sha256(id.encode()).hexdigest()
    return id if len(id) <= MAX_LENGTH else f"{id[: MAX_LENGTH - 65]}…{digest}"


def send_vote(
    client: Receiver,
    reply: Any,
    value: bool | int | str | None,
    *,
    key: str,
    **fields: Any,
) -> None:
    """Send a vote, or take the one with this key back.

    Args:
        client: Attune, its feedback or its queue.
        reply: A reply, its id, or a target of the API.
        value: A thumb, a rating from 1 to 5, a label, or None if the vote was taken back.
        key: The vote's id. A later value replaces the one before, whichever arrives first.
        fields: `source`, `comment` and others of FeedbackFields.
    """
    receiver, sent_at = receiver_of(client), time.time()
    named: FeedbackFields = {"key": shorten(key), "sent_at": sent_at, **fields}  # type: ignore[typeddict-item]
    try:
        if value is None:
            receiver.withdraw_key(named["key"], sent_at=sent_at)
        elif isinstance(value, bool):
            receiver.up(reply, **named) if value else receiver.down(reply, **named)
        elif isinstance(value, str):
            receiver.label(reply, value, **named)
        else:
            receiver.rate(reply, value, **named)
    except NotFound as error:
        log.info("a vote on a reply that Attune does not have, such as one of another model: %s", error)
    except Conflict as error:
        if error.code != "superseded":
            raise
