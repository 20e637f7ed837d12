"""Verify webhooks, as Standard Webhooks 1.0.0 specifies (https://www.standardwebhooks.com)."""

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Mapping
from typing import cast

from attune_client.errors import WebhookVerificationFailed
from attune_client.types import WebhookEvent

SECRET_PREFIX = "whsec_"
TOLERANCE_SECONDS = 300.0


def verify(
    secret: str | Iterable[str],
    body: bytes | str,
    headers: Mapping[str, str],
    *,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> WebhookEvent:
    """Return the event of a webhook whose signature is valid. Raises WebhookVerificationFailed.

    Args:
        secret: The endpoint's secret ("whsec_…"), or several of them while one is replaced.
        body: The body of the request exactly as it came, before any parsing.
        headers: The headers of the request.
        tolerance_seconds: How far the time of the webhook may be from now. An older one may be a replay. Store the
            header `webhook-id` as well, and ignore what you have seen: a delivery may come twice.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        id, timestamp, signatures = (lower[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
        seconds = int(timestamp)
    except (KeyError, ValueError) as error:
        raise WebhookVerificationFailed("a header webhook-id, -timestamp or -signature is missing or wrong") from error
    if abs(time.time() - seconds) > tolerance_seconds:
        raise WebhookVerificationFailed("the webhook is too old, or a clock is wrong")
    content = body.encode() if isinstance(body, str) else body
    signed = f"{id}.{timestamp}.".encode() + content
    sent = [part.removeprefix("v1,") for part in signatures.split() if part.startswith("v1,")]
    secrets = [secret] if isinstance(secret, str) else list(secret)
    expected = [_sign(each, signed) for each in secrets]
    if not any(hmac.compare_digest(one.encode(), other.encode()) for one in expected for other in sent):
        raise WebhookVerificationFailed("no signature of the webhook was made with this secret")
    return cast(WebhookEvent, json.loads(content))


def _sign(secret: str, signed: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a webhook's secret is base64 after 'whsec_'") from error
    if not key:
        raise ValueError("the webhook's secret is empty")
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
