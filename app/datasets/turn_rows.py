"""The export of turns: the rows of the Parquet file and its schema."""

from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]

from app.core.database import Database
from app.datasets import repository
from app.datasets.parquet_writer import IsDisconnected, ParquetWriter
from app.datasets.repository import ExportFilter
from app.models import Feedback, Turn
from app.policies.references import format_reference

PAGE_SIZE = 64  # turns in memory at a time; one may have a prompt of megabytes

FEEDBACK_TYPE = pa.struct(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("raw_value", pa.string()),
        ("comment", pa.string()),
        ("source_kind", pa.string()),
        ("source_id", pa.string()),
        ("created_at", pa.float64()),
        ("effective", pa.bool_()),
    ]
)

TURNS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("completion_id", pa.string()),
        ("choice_index", pa.int32()),
        ("conversation_id", pa.string()),
        ("parent_id", pa.string()),
        ("created_at", pa.float64()),
        ("model", pa.string()),
        ("policy", pa.string()),
        ("version", pa.int32()),
        ("route_reason", pa.string()),
        ("messages", pa.string()),
        ("request_params", pa.string()),
        ("reply", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampling", pa.string()),
        ("temperature", pa.float64()),
        ("finish_reason", pa.string()),
        ("length_penalty", pa.float64()),
        ("exclusion_reason", pa.string()),
        ("prefix_reuse", pa.string()),
        ("state", pa.string()),
        ("end_user", pa.string()),
        ("metadata", pa.map_(pa.string(), pa.string())),
        ("feedback", pa.list_(FEEDBACK_TYPE)),
    ]
)


async def write_turns(
    db: Database, export_filter: ExportFilter, writer: ParquetWriter, is_disconnected: IsDisconnected
) -> None:
    """Write every turn that matches the filter, oldest first. Each page is read in one short transaction."""
    last: tuple[float, str] | None = None
    while True:
        async with db.read() as session:
            rows = await repository.read_turns(session, export_filter, last, PAGE_SIZE)
            turn_ids = [turn.id for turn, _, _ in rows]
            feedback = await repository.read_feedback(session, export_filter.project_id, turn_ids)
        await writer.add([_turn_row(turn, policy, number, feedback[turn.id]) for turn, policy, number in rows])
        if len(rows) < PAGE_SIZE or await is_disconnected():
            return
        last = (rows[-1][0].created_at, rows[-1][0].id)


def _turn_row(turn: Turn, policy: str, number: int, feedback: Sequence[tuple[Feedback, bool]]) -> dict[str, Any]:
    copied = {name: getattr(turn, name) for name in TURNS_SCHEMA.names if hasattr(turn, name) and name != "metadata"}
    return {
        **copied,
        "model": format_reference(policy, number),
        "policy": policy,
        "version": number,
        "messages": _to_json(turn.messages),
        "request_params": _to_json(turn.request_params),
        "reply": None if turn.reply is None else _to_json(turn.reply),
        "sampling": _to_json(turn.sampling),
        "temperature": turn.sampling.get("temperature"),
        "metadata": {
            key: value if isinstance(value, str) else _to_json(value) for key, value in turn.request_metadata.items()
        },
        "feedback": [_feedback_row(row, effective) for row, effective in feedback],
    }


def _feedback_row(row: Feedback, effective: bool) -> dict[str, Any]:
    return {
        "id": row.id,
        "kind": row.kind,
        "name": row.name,
        "value": row.value,
        "raw_value": None if row.raw_value is None else _to_json(row.raw_value),
        "comment": row.comment,
        "source_kind": row.source_kind,
        "source_id": row.source_id,
        "created_at": row.created_at,
        "effective": effective,
    }


def _to_json(value: Any) -> str:
    return orjson.dumps(value).decode()
