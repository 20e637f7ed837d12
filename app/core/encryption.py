"""Encrypt secrets that the database keeps, with keys that it does not keep: AES-256-GCM.

A stored value names its key, so that it can be said which one is missing: "aesgcm:3f0c9a12:9y1s…". Values that an
earlier release has stored are clear text; `SecretCipher.decrypt` returns them as they are.
"""

import base64
import hashlib
import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.core.private_files import create_once
from app.core.settings import Settings

PREFIX = "aesgcm:"
NONCE_BYTES = 12
CLEAR_TEXT = "clear text"


class SecretUnreadable(Exception):
    """No key of this process decrypts the value. The message names the key that would."""


def key_id(key: str) -> str:
    """Return a short name of a key. Example: "3f0c9a12" """
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def key_id_of(stored: str) -> str:
    """Return the name of the key that a stored value was encrypted with, or CLEAR_TEXT."""
    return stored.removeprefix(PREFIX).partition(":")[0] if stored.startswith(PREFIX) else CLEAR_TEXT


class SecretCipher:
    """Encrypts with the first of the keys, and decrypts with any of them. Keys are 32 bytes in base64."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._ciphers = {key_id(key): AESGCM(base64.b64decode(key)) for key in keys}
        self.first_id = next(iter(self._ciphers), None)

    @property
    def key_ids(self) -> set[str]:
        return set(self._ciphers)

    def encrypt(self, secret: str) -> str:
        """Return what is stored in place of the secret: four thirds of its length, and 54 characters."""
        assert self.first_id is not None, "a cipher without keys only decrypts"
        nonce = secrets.token_bytes(NONCE_BYTES)
        encrypted = self._ciphers[self.first_id].encrypt(nonce, secret.encode(), None)
        return f"{PREFIX}{self.first_id}:{base64.b64encode(nonce + encrypted).decode()}"

    def decrypt(self, stored: str) -> str:
        """Return the secret. Raises SecretUnreadable."""
        id = key_id_of(stored)
        if id == CLEAR_TEXT:
            return stored
        if id not in self._ciphers:
            raise SecretUnreadable(f"it is encrypted with the key {id}, which this deployment does not have")
        try:
            content = base64.b64decode(stored.removeprefix(f"{PREFIX}{id}:"))
            return self._ciphers[id].decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], None).decode()
        except (InvalidTag, ValueError) as error:
            raise SecretUnreadable(f"it was changed since it was encrypted with the key {id}") from error


def read_cipher(settings: Settings) -> SecretCipher:
    """Return the cipher with the keys of the settings, or of the file under `home`; without keys if there is none."""
    if settings.database.encryption_keys:
        return SecretCipher([key.get_secret_value() for key in settings.database.encryption_keys])
    try:
        return SecretCipher(settings.encryption_file.read_text().split())
    except FileNotFoundError:
        return SecretCipher([])


def load_cipher(settings: Settings) -> SecretCipher:
    """Return the cipher as `read_cipher` does. A file with a new key is created at first use."""
    if not settings.database.encryption_keys:
        create_once(settings.encryption_file, lambda: base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
    return read_cipher(settings)
