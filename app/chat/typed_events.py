"""Stream a reply as typed events: what the wire formats share whose events have a name."""

import logging
from collections.abc import AsyncIterator
from typing import Protocol, cast

import anyio
import orjson
from starlette.responses import Response

from app.chat.service import Chunks, Reply
from app.core.errors import AttuneError
from app.core.http import event_stream
from app.inference.chat_format import ChatChunk

log = logging.getLogger("attune.chat")
Event = dict[str, object]


class EventTranslator(Protocol):
    """Translates a chat's chunks. `start` comes first, `finish` or `fail` last; each returns the events to send."""

    def start(self) -> list[Event]: ...

    def add_chunk(self, chunk: ChatChunk) -> list[Event]: ...

    def finish(self) -> list[Event]: ...

    def fail(self, error: AttuneError) -> list[Event]: ...


async def typed_event_stream(reply: Reply[Chunks], translator: EventTranslator, headers: dict[str, str]) -> Response:
    """Return the response that streams the reply as the translator's events."""
    encoded_events = server_sent_events(reply.headers["x-completion-id"], reply.content, translator)
    await anext(encoded_events)
    return event_stream(encoded_events, headers)


async def server_sent_events(completion_id: str, chunks: Chunks, translator: EventTranslator) -> AsyncIterator[bytes]:
    """Yield one empty item, then the encoded events.

    However it ends, the chat stream is closed, which records the turn and ends the engine's work. The empty item enters
    the generator: one that was never entered would not run its clean-up.
    """
    try:
        chunk = await anext(chunks, None)
        yield b""
        try:
            yield encode_events(translator.start())
            while chunk is not None:
                yield encode_events(translator.add_chunk(cast(ChatChunk, chunk)))
                chunk = await anext(chunks, None)
            yield encode_events(translator.finish())
        except AttuneError as error:
            log.warning("the stream of %s failed: %s", completion_id, error)
            yield encode_events(translator.fail(error))
    finally:
        with anyio.CancelScope(shield=True):
            await chunks.aclose()


def encode_events(events: list[Event]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n" for event in events)
