"""Turns → rows of Parquet."""

from collections.abc import Sequence
from typing import Any

import orjson

from app.core.database import Database
from app.datasets import repository
from app.datasets.columns import TURNS
from app.datasets.parquet_writer import Gone, ParquetWriter
from app.datasets.repository import Wanted
from app.models import Feedback, Turn

PAGE = 64  # turns in memory at a time: one may hold a prompt of megabytes


async def write(db: Database, wanted: Wanted, sheet: ParquetWriter, gone: Gone) -> None:
    """One page in one short read transaction after the other, each behind the last row of the one before."""
    last: tuple[float, str] | None = None
    while True:
        async with db.read() as session:
            found = await repository.turns_after(session, wanted, last, PAGE)
            said = await repository.said_of(session, wanted.project_id, [turn.id for turn, _, _ in found])
        await sheet.add([_row(turn, policy, number, said[turn.id]) for turn, policy, number in found])
        if len(found) < PAGE or await gone():
            return
        last = (found[-1][0].created_at, found[-1][0].id)


def _row(turn: Turn, policy: str, number: int, said: Sequence[tuple[Feedback, bool]]) -> dict[str, Any]:
    same = {name: getattr(turn, name) for name in TURNS.names if hasattr(turn, name) and name != "metadata"}
    return {
        **same,
        "model": f"{policy}@v{number}",
        "policy": policy,
        "version": number,
        "messages": _json(turn.messages),
        "request_params": _json(turn.request_params),
        "reply": None if turn.reply is None else _json(turn.reply),
        "sampling": _json(turn.sampling),
        "temperature": turn.sampling.get("temperature"),
        "metadata": {
            key: value if isinstance(value, str) else _json(value) for key, value in turn.request_metadata.items()
        },
        "feedback": [_feedback(row, counts) for row, counts in said],
    }


def _feedback(row: Feedback, counts: bool) -> dict[str, Any]:
    return {
        "id": row.id,
        "kind": row.kind,
        "name": row.name,
        "value": row.value,
        "raw_value": None if row.raw_value is None else _json(row.raw_value),
        "comment": row.comment,
        "source_kind": row.source_kind,
        "source_id": row.source_id,
        "created_at": row.created_at,
        "counts": counts,
    }


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
