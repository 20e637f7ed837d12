"""Bodies as Langfuse's clients send them: recorded from the SDKs 3, 4 and 5, and from LibreChat's source."""

from base64 import b64encode
from typing import Any

import httpx2

from app.chat.trace_ids import derive_trace_id
from tests.support.deployment import Harness

PUBLIC_KEY = "pk-lf-any"


def basic(key: str) -> dict[str, str]:
    """Return the header with which Langfuse's clients authenticate: any public key, and `key` as the secret."""
    return {"authorization": "Basic " + b64encode(f"{PUBLIC_KEY}:{key}".encode()).decode()}


def librechat_score(message_id: str, rating: str, tag: str | None = None, text: str | None = None) -> dict[str, Any]:
    """Return the score that LibreChat sends when a person presses a thumb."""
    trace_id = derive_trace_id(message_id)
    score: dict[str, Any] = {
        "id": f"feedback-{trace_id}",
        "traceId": trace_id,
        "name": "user-feedback",
        "value": 1 if rating == "thumbsUp" else 0,
        "dataType": "BOOLEAN",
        "metadata": {
            "messageId": message_id,
            "conversationId": "conv-1",
            "userId": "67a9",
            "endpoint": "Attune",
            "rating": rating,
        },
    }
    if tag is not None:
        score["metadata"]["tag"] = tag
    if comment := " — ".join(part for part in (tag, text) if part):
        score["comment"] = comment
    return score


def ingestion(*scores: dict[str, Any], timestamp: str = "2026-11-20T10:00:00.000Z") -> dict[str, Any]:
    """Return the body that the SDKs 3 and 4 send to /api/public/ingestion."""
    return {
        "batch": [
            {"id": f"{number:032x}", "type": "score-create", "timestamp": timestamp, "body": score}
            for number, score in enumerate(scores)
        ],
        "metadata": {"batch_size": len(scores), "sdk_name": "python", "sdk_version": "4.18.0", "public_key": "pk"},
    }


def sdk_score(id: str = "5f3a9c2b7d1e4f60", **fields: Any) -> dict[str, Any]:
    """Return the score of `create_score`, as all SDKs send it, but for its time."""
    return {"id": id, "name": "user-feedback", "value": 1.0, "environment": "default", **fields}


async def post(harness: Harness, path: str, body: Any, key: str | None = None, **headers: str) -> httpx2.Response:
    """Send a request as Langfuse's clients do."""
    auth = basic(harness.key if key is None else key)
    return await harness.api.post(f"/api/public/{path}", json=body, headers={**auth, **headers})
