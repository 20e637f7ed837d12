"""Webhook verification, against the service's own signatures."""

import json
import time

import pytest
from attune_client import WebhookVerificationFailed, verify_webhook
from standardwebhooks import Webhook

from app.ops.webhook_signature import new_secret, signature_headers

BODY = json.dumps({"type": "deployment.deployed", "timestamp": "2026-11-23T22:30:00Z", "data": {"number": 412}})
SECRET, OTHER = new_secret(), new_secret()


def headers_of(*secrets: str, seconds: float = 0.0) -> dict[str, str]:
    return signature_headers(secrets, "msg-1", int(time.time() + seconds), BODY)


def test_valid_signature() -> None:
    event = verify_webhook(SECRET, BODY.encode(), headers_of(SECRET))
    assert (event["type"], event["data"]) == ("deployment.deployed", {"number": 412})
    assert Webhook(SECRET).verify(BODY, headers_of(SECRET)) == event


def test_either_secret_verifies_during_a_rotation() -> None:
    title_case = {name.title(): value for name, value in headers_of(OTHER, SECRET).items()}
    assert verify_webhook(SECRET, BODY, title_case)
    assert verify_webhook([OTHER, SECRET], BODY, headers_of(SECRET))


@pytest.mark.parametrize(
    ("secret", "seconds", "changes", "body"),
    [
        (SECRET, 0, {}, BODY.replace("412", "413")),
        (OTHER, 0, {}, BODY),
        (SECRET, -301, {}, BODY),
        (SECRET, 310, {}, BODY),
        (SECRET, 0, {"webhook-id": "msg-2"}, BODY),
        (SECRET, 0, {"webhook-timestamp": "now"}, BODY),
        (SECRET, 0, {"webhook-signature": "v1,ä v2,abc"}, BODY),
    ],
    ids=["body", "secret", "old", "future", "id", "timestamp", "signature"],
)
def test_anything_else_is_refused(secret: str, seconds: float, changes: dict[str, str], body: str) -> None:
    headers = headers_of(secret, seconds=seconds)
    with pytest.raises(WebhookVerificationFailed):
        verify_webhook(SECRET, body, headers | changes)
    with pytest.raises(WebhookVerificationFailed):
        verify_webhook(SECRET, BODY, {})


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_not base64"])
def test_unusable_secret_is_an_error_of_the_program(secret: str) -> None:
    with pytest.raises(ValueError, match="secret"):
        verify_webhook(secret, BODY, headers_of(SECRET))
