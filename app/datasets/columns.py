"""The columns of what leaves."""

import pyarrow as pa  # type: ignore[import-untyped]

FEEDBACK = pa.struct(
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
        ("counts", pa.bool_()),
    ]
)

TURNS = pa.schema(
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
        ("feedback", pa.list_(FEEDBACK)),
    ]
)

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

PREFERENCES = pa.schema(
    [
        ("prompt", MESSAGES),
        ("chosen", MESSAGES),
        ("rejected", MESSAGES),
        ("feedback_id", pa.string()),
        ("chosen_id", pa.string()),
        ("rejected_id", pa.string()),
        ("source_kind", pa.string()),
        ("created_at", pa.float64()),
    ]
)
