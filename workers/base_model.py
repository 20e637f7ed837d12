"""Where the base model lies, and what a version of it must look like."""

from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download

from alignment.artifacts import AdapterSpec, WeightsSpec, check_adapter, check_weights, verify
from alignment.config.trainer import LoRAConfig


def folder(model: str, *, weights: bool = True) -> Path:
    """A local folder as it is; of a hub name, its cached snapshot (without weights: the small files alone)."""
    path = Path(model)
    if path.is_dir():
        return path
    return Path(snapshot_download(model, allow_patterns=None if weights else ["*.json"]))


@lru_cache(maxsize=8)
def adapter_spec(model: str) -> AdapterSpec:
    return AdapterSpec.of(folder(model, weights=False), LoRAConfig())


@lru_cache(maxsize=2)
def weights_spec(model: str) -> WeightsSpec:
    return WeightsSpec.of(folder(model))


def check_version(model: str, directory: Path, manifest_sha256: str, *, full: bool = False) -> None:
    """Refuse what an engine must not see: bytes that were not sealed, or that are not of the base model's shape."""
    verify(directory, manifest_sha256)
    if full:
        check_weights(directory, weights_spec(model))
        return
    check_adapter(directory, adapter_spec(model))
