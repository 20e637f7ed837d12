"""Compressed request bodies."""

import zlib

from app.core.errors import BadRequest, TooLarge, UnsupportedMediaType

ENCODINGS = ("gzip", "x-gzip", "deflate")
AUTOMATIC_HEADER = zlib.MAX_WBITS | 32  # of gzip or of zlib


def require_known_encoding(encoding: str, known: tuple[str, ...] = ENCODINGS) -> None:
    """Raise UnsupportedMediaType for a Content-Encoding that is neither `identity` nor one of these."""
    if encoding not in ("", "identity", *known):
        instead = f"compress it with {known[0]}, or not at all" if known else "send it uncompressed"
        error = UnsupportedMediaType(f"A body with the Content-Encoding '{encoding[:64]}' is not supported: {instead}.")
        error.headers["accept-encoding"] = ", ".join(known) or "identity"
        raise error


def decompress(body: bytes, limit: int) -> bytes:
    """Return the body of a gzip or zlib stream. Raises TooLarge when more than `limit` bytes come out of it."""
    stream = zlib.decompressobj(AUTOMATIC_HEADER)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest("The body is not in its Content-Encoding.", code="invalid_body") from error
    if len(plain) > limit:
        raise TooLarge(f"The body may hold at most {limit} bytes when it is decompressed.")
    if not stream.eof or stream.unused_data:
        raise BadRequest("The body is not one complete stream of its Content-Encoding.", code="invalid_body")
    return plain
