"""Compressed request bodies: gzip and zlib of a bounded size, and no other encoding."""

import gzip
import zlib

import orjson
import pytest

from app.core.compression import decompress
from app.core.errors import BadRequest, TooLarge
from tests.support.deployment import Harness


async def test_compressed_body_is_read(harness: Harness) -> None:
    turn = await harness.turn()
    body = orjson.dumps({"completion_id": turn.id, "kind": "binary", "value": True, "id": "a"})
    statuses = []
    for encoding, content in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("identity", body)):
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        statuses.append((await harness.api.post("/v1/feedback", content=content, headers=headers)).status_code)
    assert statuses == [201, 200, 200]  # one body


async def test_other_encodings_are_refused(harness: Harness) -> None:
    for path in ("/v1/feedback", "/v1/chat/completions"):
        response = await harness.api.post(path, content=b"{}", headers={"content-encoding": "br"})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert response.headers["accept-encoding"] == "gzip, x-gzip, deflate"


async def test_body_that_grows_too_large_is_refused(harness: Harness) -> None:
    bomb = gzip.compress(b" " * (harness.settings.server.max_body_bytes + 1))
    response = await harness.api.post("/v1/feedback", content=bomb, headers={"content-encoding": "gzip"})
    assert response.status_code == 413 and len(bomb) < 10_000


def test_at_most_one_byte_beyond_the_limit_is_decompressed() -> None:
    assert decompress(gzip.compress(b"x" * 100), 100) == b"x" * 100
    with pytest.raises(TooLarge):
        decompress(gzip.compress(b"x" * 101), 100)


EMPTY = gzip.compress(b"{}")


@pytest.mark.parametrize(
    "body", [b"", b"{}", EMPTY[:-1], EMPTY + b"x"], ids=["nothing", "not compressed", "cut", "more after the end"]
)
def test_damaged_body_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decompress(body, 100)
