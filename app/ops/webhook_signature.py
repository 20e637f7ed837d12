"""Signatures of webhooks, as Standard Webhooks 1.0.0 specifies them (https://www.standardwebhooks.com)."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterable

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32


def new_secret() -> str:
    """Return a random signing secret. Example: "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw…" """
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def sign(secret: str, id: str, timestamp: int, body: str) -> str:
    """Return the signature of one secret. Example: "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=" """
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signature = hmac.new(key, f"{id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signature).decode()}"


def signature_headers(signing_secrets: Iterable[str], id: str, timestamp: int, body: str) -> dict[str, str]:
    """Return the headers of an attempt, with one signature of each secret."""
    signatures = " ".join(sign(secret, id, timestamp, body) for secret in signing_secrets)
    return {"webhook-id": id, "webhook-timestamp": str(timestamp), "webhook-signature": signatures}
