"""Build the payload in which SGLang takes an adapter within the load call, instead of a path on shared storage.

The payload is pickled tensors, which SGLang unpickles with an allow-list of its own. Nothing in it refers to this
machine's memory, so the engine may run on another machine. SGLang dies of a payload that it cannot unpickle, so a
payload is built only from the bytes that were sealed.
"""

import base64
import hashlib
import json
import pickle
from pathlib import Path

from alignment.artifacts import ADAPTER, ADAPTER_CONFIG, FileEntry, read_manifest
from alignment.errors import DamagedAdapter
from app.inference.client import AdapterPayload


def preload_torch() -> None:
    """Import torch now, so that the first payload does not take seconds longer.

    Only `adapter_delivery = "memory"` needs torch in this process.
    """
    import safetensors.torch  # noqa: F401


def build_payload(directory: Path, manifest_sha256: str) -> AdapterPayload:
    """Return the payload of an adapter directory that has been checked. Raise DamagedAdapter if it changed since."""
    from safetensors.torch import load

    files, _ = read_manifest(directory, manifest_sha256)
    config, tensors = (_read_sealed(directory, name, files) for name in (ADAPTER_CONFIG, ADAPTER))
    return AdapterPayload(json.loads(config), base64.b64encode(pickle.dumps(load(tensors))).decode())


def _read_sealed(directory: Path, name: str, files: dict[str, FileEntry]) -> bytes:
    content = (directory / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise DamagedAdapter(f"{name} in {directory} is not what was sealed.")
    return content
