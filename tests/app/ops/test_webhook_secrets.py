"""Signing secrets of webhooks are encrypted in the database and in backups, with a key that is in neither."""

import base64
import secrets
import stat
from pathlib import Path

import pytest
from sqlalchemy import update

from app.core.encryption import key_id, load_cipher, read_cipher
from app.core.settings import Settings
from app.models import WebhookDelivery, WebhookEndpoint
from app.ops import backup
from app.ops.webhooks import encrypt_secrets
from tests.support.deployment import Harness
from tests.support.settings import change_in_place
from tests.support.webhooks import Receiver, allow_private, create_deliveries, create_webhook, pause_training, send

URL = "https://hooks.example"


def set_keys(harness: Harness, *keys: str) -> Settings:
    """Restart, in effect, with other keys."""
    change_in_place(harness.settings, {"encryption_keys": ",".join(keys)})  # the API holds this object
    return harness.settings


def new_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


async def stored_secrets(harness: Harness) -> list[str]:
    return [text for row in await harness.all(WebhookEndpoint) for text in (row.secret, row.previous_secret) if text]


async def test_database_and_backup_hold_no_secret_in_clear_text(harness: Harness, tmp_path: Path) -> None:
    created = await create_webhook(harness, URL)
    rotated = (await harness.api.post(f"/v1/webhooks/{created['id']}/rotate-secret")).json()
    stored = await stored_secrets(harness)
    cipher = read_cipher(harness.settings)
    assert [cipher.decrypt(text) for text in stored] == [rotated["secret"], created["secret"]]
    assert all(text.startswith(f"aesgcm:{cipher.first_id}:") and len(text) <= 128 for text in stored)
    assert stat.S_IMODE(harness.settings.encryption_file.stat().st_mode) == 0o600
    if harness.db.embedded:
        clear = [one["secret"].removeprefix("whsec_").encode() for one in (created, rotated)]
        manifest = backup.create_backup(harness.settings, tmp_path / "backup", lambda *_: None)
        assert manifest.contents.webhook_secrets == {cipher.first_id: 2}
        key = harness.settings.encryption_file.read_bytes().strip()
        for file in (*tmp_path.rglob("backup/**/*"), *harness.settings.home.glob("attune.db*")):
            assert not file.is_file() or not any(text in file.read_bytes() for text in (*clear, key)), file
        assert backup.find_missing_keys(harness.settings, manifest) == []
        elsewhere = harness.settings.replace({"home": tmp_path / "elsewhere"})
        assert backup.find_missing_keys(elsewhere, manifest) == [cipher.first_id]


async def test_secret_in_clear_text_is_encrypted_and_still_signs(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver()
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        async with harness.db.write() as session:  # as a release without encryption has stored it
            await session.execute(update(WebhookEndpoint).values(secret=endpoint["secret"]))
        await pause_training(harness)
        await create_deliveries(harness)
        assert await send(harness) == 1
        await encrypt_secrets(harness.db, harness.settings)
        [stored] = await stored_secrets(harness)
        assert endpoint["secret"] not in stored
        await pause_training(harness)
        await create_deliveries(harness)
        assert await send(harness) == 1
    assert len(receiver.events(endpoint["secret"])) == 2


async def test_secrets_follow_a_rotation_of_the_key(harness: Harness) -> None:
    old, new = new_key(), new_key()
    set_keys(harness, old)
    created = await create_webhook(harness, URL)
    set_keys(harness, new, old)
    await encrypt_secrets(harness.db, harness.settings)
    [stored] = await stored_secrets(harness)
    assert stored.startswith(f"aesgcm:{key_id(new)}:")
    assert read_cipher(set_keys(harness, new)).decrypt(stored) == created["secret"]


async def test_lost_key_is_named_and_a_rotation_of_the_secret_helps(harness: Harness) -> None:
    allow_private(harness)
    old, new = new_key(), new_key()
    set_keys(harness, old)
    receiver = Receiver()
    with receiver.serve() as url:
        created = await create_webhook(harness, url)
        set_keys(harness, new)
        await encrypt_secrets(harness.db, harness.settings)  # changes nothing
        await pause_training(harness)
        await create_deliveries(harness)
        assert await send(harness) == 0
        [delivery] = await harness.all(WebhookDelivery)
        assert key_id(old) in delivery.reason and "rotate the secret" in delivery.reason and not receiver.received
        secret = (await harness.api.post(f"/v1/webhooks/{created['id']}/rotate-secret")).json()["secret"]
        assert (await harness.api.post(f"/v1/webhooks/{created['id']}/deliveries/{delivery.id}/redeliver")).is_success
        assert await send(harness) == 1
        assert len(receiver.events(secret)) == 1


@pytest.mark.parametrize("value", ["secret", "QUFBQQ==", "!" * 44])
def test_key_of_another_form_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="32 bytes in base64"):
        Settings(database={"encryption_keys": value})


def test_processes_that_start_together_create_one_key(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    assert read_cipher(settings).first_id is None and not settings.encryption_file.exists()
    first = load_cipher(settings)
    assert load_cipher(settings).key_ids == first.key_ids and len(first.key_ids) == 1
    assert [path.name for path in settings.home.iterdir()] == ["encryption.key"]
