"""Where the base model lies, and what an adapter of it must look like."""

from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download

from alignment.config import LoRAConfig
from alignment.manifest import AdapterSpec, check_adapter, verify


def folder(model: str, *, weights: bool = True) -> Path:
    """A local folder as it is; of a hub name, its cached snapshot (without weights: the small files alone)."""
    path = Path(model)
    if path.is_dir():
        return path
    return Path(snapshot_download(model, allow_patterns=None if weights else ["*.json"]))


@lru_cache(maxsize=8)
def adapter_spec(model: str) -> AdapterSpec:
    return AdapterSpec.of(folder(model, weights=False), LoRAConfig())


def check_version(model: str, directory: Path, manifest_sha256: str) -> None:
    """Refuse what an engine must not see: bytes that were not sealed, or an adapter the base model does not take."""
    verify(directory, manifest_sha256)
    check_adapter(directory, adapter_spec(model))
