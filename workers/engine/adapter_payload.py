"""An adapter's files → the bytes in which SGLang takes it within the call: pickled tensors, which it reads with an
allow-list of its own. Nothing in them refers to this machine's memory, so the engine may be on another.

SGLang dies of a payload that it cannot unpickle, so one is made of nothing but the very bytes that were sealed.
"""

import base64
import hashlib
import json
import pickle
from pathlib import Path

from alignment.artifacts import ADAPTER, ADAPTER_CONFIG, Description, sealed
from alignment.errors import DamagedAdapter
from app.inference.client import Payload


def prepare() -> None:
    """Seconds that the first payload would take longer: torch, which nobody needs here where adapters come by path."""
    import safetensors.torch  # noqa: F401


def payload(folder: Path, manifest_sha256: str) -> Payload:
    """The folder has been checked; raises DamagedAdapter if it changed since."""
    from safetensors.torch import load

    files, _ = sealed(folder, manifest_sha256)
    config, tensors = (_whole(folder, name, files) for name in (ADAPTER_CONFIG, ADAPTER))
    return Payload(json.loads(config), base64.b64encode(pickle.dumps(load(tensors))).decode())


def _whole(folder: Path, name: str, files: dict[str, Description]) -> bytes:
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise DamagedAdapter(f"{name} in {folder} is not what was sealed.")
    return content
