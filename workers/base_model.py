"""The base model's directory, and the specs that its versions must match."""

from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download

from alignment.artifacts.manifest import verify
from alignment.artifacts.specs import AdapterSpec, WeightsSpec, check_adapter, check_weights
from alignment.config.trainer import LoRAConfig


def model_dir(model: str, *, weights: bool = True) -> Path:
    """Return the directory of a local model, or of the cached snapshot of a Hugging Face model.

    Without `weights` only the JSON files are downloaded.
    """
    path = Path(model)
    if path.is_dir():
        return path
    return Path(snapshot_download(model, allow_patterns=None if weights else ["*.json"]))


@lru_cache(maxsize=8)
def adapter_spec(model: str) -> AdapterSpec:
    return AdapterSpec.from_base_model(model_dir(model, weights=False), LoRAConfig())


@lru_cache(maxsize=2)
def weights_spec(model: str) -> WeightsSpec:
    return WeightsSpec.from_base_model(model_dir(model))


def check_version(model: str, directory: Path, manifest_sha256: str, *, full_weights: bool = False) -> None:
    """Raise DamagedAdapter unless the files are those that were sealed and match the base model's spec."""
    verify(directory, manifest_sha256)
    if full_weights:
        check_weights(directory, weights_spec(model))
        return
    check_adapter(directory, adapter_spec(model))
