"""Helpers that write and read Parquet files, and create replies and feedback."""

import io
from typing import Any

import httpx2
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from app.models import Feedback, FeedbackRank, Turn, new_id
from tests.support.deployment import Harness


def to_parquet(columns: dict[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


def read_rows(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(answer.content)).to_pylist()
    assert answer.headers["x-rows"] == str(len(rows))
    return rows


async def import_file(
    harness: Harness, content: bytes, *, name: str = "imported", kind: str = "preferences"
) -> httpx2.Response:
    return await harness.api.post("/v1/datasets", params={"name": name, "kind": kind}, content=content)


async def create_feedback(harness: Harness, turn: Turn | None, kind: str = "binary", **values: Any) -> Feedback:
    """Create feedback on a turn, or on `ranks` of turns."""
    ranks: list[tuple[Turn, int]] = values.pop("ranks", [])
    id = new_id("fb")
    row = Feedback(
        **{
            "id": id,
            "project_id": (await harness.policy()).project_id,
            "turn_id": turn.id if turn else None,
            "target": turn.id if turn else "+".join(sorted(ranked.id[-8:] for ranked, _ in ranks)),
            "kind": kind,
            "name": "default",
            "source_kind": "HUMAN",
            "idempotency_key": id,
            "fingerprint": "0" * 64,
            "request_metadata": {},
            **values,
        }
    )
    async with harness.db.write() as session:
        session.add(row)
        await session.flush()
        session.add_all([FeedbackRank(feedback_seq=row.seq, turn_id=ranked.id, rank=rank) for ranked, rank in ranks])
    return row


async def create_reply(harness: Harness, text: str, question: str = "Open?", **values: Any) -> Turn:
    messages = [{"role": "user", "content": question}]
    return await harness.turn(own_messages=messages, reply={"role": "assistant", "content": text}, **values)
