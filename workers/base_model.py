"""The base model's directory, what it is made of, and the specs that its versions must match."""

import json
import sys
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from huggingface_hub import snapshot_download

from alignment.artifacts.manifest import verify
from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import CONFIG, TRAINER_STATE, AdapterSpec, WeightsSpec, check_adapter, check_weights
from alignment.config.trainer import LoRAConfig
from app.core.private_files import create_once
from app.core.settings import Settings
from app.policies.adapter_shape import ADAPTER_SPEC, require_adapter_shape
from app.policies.model_description import describe_by_program


def model_dir(model: str, *, weights: bool = True) -> Path:
    """Return the directory of a local model, or of the cached snapshot of a Hugging Face model.

    Without `weights` only the JSON files are downloaded.
    """
    path = Path(model)
    if path.is_dir():
        return path
    return Path(snapshot_download(model, allow_patterns=None if weights else ["*.json"]))


def describe_model(directory: Path) -> ModelSpec:
    """Return what the model in a directory is made of, from its config.json alone.

    A process that has imported torch finds out itself; any other one, whose memory torch would double, asks a new one.

    Raises ValueError for a configuration that transformers does not know, and for a model that training does not
    support.
    """
    if "torch" in sys.modules:
        from alignment.models.describe import describe_folder

        return describe_folder(directory)
    return describe_by_program(directory)


_adapter_specs: dict[tuple[Path, str, LoRAConfig], AdapterSpec] = {}


def adapter_spec(settings: Settings) -> AdapterSpec:
    """Return the spec of the adapters that this deployment trains: that of `adapter_spec.json` in `home`.

    The first process that needs it writes the file. Raises ValueError if the file was written for another base model,
    or for other settings of trainer.lora.
    """
    key = settings.home, settings.model, settings.trainer.lora
    if key not in _adapter_specs:
        _adapter_specs[key] = _read_adapter_spec(settings)
    return _adapter_specs[key]


def _read_adapter_spec(settings: Settings) -> AdapterSpec:
    directory, file = model_dir(settings.model, weights=False), settings.home / ADAPTER_SPEC
    config_sha256 = sha256((directory / CONFIG).read_bytes()).hexdigest()
    if not file.exists():
        model = describe_model(directory)
        spec = AdapterSpec.from_model(model, settings.trainer.lora).to_json()
        base = {"base_model": settings.model, "config_sha256": config_sha256, "dtype": "float32"}
        content = json.dumps(base | {"available_modules": model.target_modules} | spec, indent=1)
        create_once(file, lambda: content)
    require_adapter_shape(settings)
    fields = json.loads(file.read_text())
    if fields["config_sha256"] != config_sha256:
        raise ValueError(
            f"{file} describes the adapters of {fields['base_model']}, whose config.json was not that of {directory}. "
            "Set another `home` for another base model"
        )
    return AdapterSpec.from_json(fields)


@lru_cache(maxsize=2)
def weights_spec(model: str) -> WeightsSpec:
    return WeightsSpec.from_base_model(model_dir(model))


def check_adapter_files(settings: Settings, directory: Path, manifest_sha256: str) -> None:
    """Raise DamagedAdapter unless the files that engines read were sealed and match the spec of the adapters.

    The trainer checks its own state when it restores it: that takes twice as long, and a release waits for this.
    """
    verify(directory, manifest_sha256, skip=TRAINER_STATE)
    check_adapter(directory, adapter_spec(settings))


def check_weights_files(settings: Settings, directory: Path, manifest_sha256: str) -> None:
    """Raise DamagedAdapter unless the files that engines read were sealed and match the base model's weights."""
    verify(directory, manifest_sha256, skip=TRAINER_STATE)
    check_weights(directory, weights_spec(settings.model))
