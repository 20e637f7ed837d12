"""The trainer's state between two updates, on disk as safetensors and JSON, and the export of version directories.

adapter_model.safetensors   adapter_config.json     for the engine; with full weights, a Hugging Face model's own files
trainer/optimizer.exp_avg.safetensors, trainer/optimizer.exp_avg_sq.safetensors, trainer/state.json
                                                    to resume training bit for bit
trainer/critic.safetensors                          if there is a critic: its tensors and their moments
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.artifacts.manifest import publish_directory, verify, write_manifest
from alignment.artifacts.specs import ADAPTER, TRAINER_STATE, WEIGHTS, AdapterSpec, check_adapter
from alignment.errors import DamagedAdapter
from alignment.models import lora, parallel

OPTIMIZER_FILES = "optimizer.*safetensors"  # one for each moment; earlier releases wrote one for both
CRITIC = Path(TRAINER_STATE, "critic.safetensors")
STATE = Path(TRAINER_STATE, "state.json")
_TENSOR, _MOMENT = "tensor.", "moment."


@dataclass(frozen=True)
class Progress:
    """The number of updates and optimizer steps so far, the learning rate's scale, and the algorithm's own state."""

    updates: int = 0
    optimizer_steps: int = 0
    critic_steps: int = 0
    lr_scale: float = 1.0
    algorithm: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleState:
    """A role's full tensors on the CPU by file name, and the optimizer's moments; None if it was not trained yet."""

    tensors: dict[str, Tensor]
    moments: dict[str, Tensor] | None


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a trainer."""

    actor: RoleState
    critic: RoleState | None
    progress: Progress


@dataclass(frozen=True)
class Export:
    """An exported directory and the hash of its manifest.

    Example: Export(path=Path("versions/shop-v4"), manifest_sha256="9f86d0…")
    """

    path: Path
    manifest_sha256: str


def export(
    directory: Path, content: Checkpoint, spec: AdapterSpec | None, base_model: Path, lineage: Mapping[str, object]
) -> Export:
    """Write a checkpoint as an immutable version directory, as `export_directory` does."""
    return export_directory(directory, lambda folder: write(folder, content, spec, base_model), lineage)


def export_directory(directory: Path, write: Callable[[Path], None], lineage: Mapping[str, object]) -> Export:
    """Create `directory` atomically with whatever `write` puts into the folder that it is given.

    Rank 0 writes; all ranks must call it and get the hash of the manifest. Raises FileExistsError if the directory
    exists.
    """
    sha256 = _write_and_rename(directory, write, lineage) if parallel.rank() == 0 else ""
    return Export(directory, parallel.broadcast_text(sha256))


def _write_and_rename(directory: Path, write: Callable[[Path], None], lineage: Mapping[str, object]) -> str:
    """Write to a temporary directory with a manifest, rename it into place, and return the hash of the manifest."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):  # the engine may run as another user
            path.chmod(0o755 if path.is_dir() else 0o644)
        sha256 = write_manifest(temporary, lineage)
        publish_directory(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a successful rename it no longer exists
    return sha256


def optimizer_file(moment: str) -> Path:
    """Return the file of one of the optimizer's moments, "exp_avg" or "exp_avg_sq". They are written side by side."""
    return Path(TRAINER_STATE, f"optimizer.{moment}.safetensors")


def write(directory: Path, content: Checkpoint, spec: AdapterSpec | None, base_model: Path) -> None:
    """Write a checkpoint into an empty directory. `spec` is None for full weights."""
    assert content.actor.moments is not None, "a trainer always has moments"
    (directory / STATE).parent.mkdir()
    files = {directory / (WEIGHTS if spec is None else ADAPTER): content.actor.tensors}
    for name, tensor in content.actor.moments.items():
        files.setdefault(directory / optimizer_file(name.partition(".")[0]), {})[name] = tensor
    if content.critic is not None and content.critic.moments is not None:
        tensors = {_TENSOR + name: tensor for name, tensor in content.critic.tensors.items()}
        moments = {_MOMENT + name: moment for name, moment in content.critic.moments.items()}
        files[directory / CRITIC] = tensors | moments
    if spec is None:
        for path in base_model.iterdir():  # the configuration and the tokenizer, which an engine needs
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in path.name:
                shutil.copyfile(path, directory / path.name)
    else:
        lora.write_config(directory, spec, base_model)
    metadata = {"format": "pt"} if spec is None else None
    with ThreadPoolExecutor(len(files)) as threads:  # a release waits for this, and writing needs no lock of Python
        list(threads.map(lambda path, tensors: save_file(tensors, path, metadata), files, files.values()))
    (directory / STATE).write_text(json.dumps(asdict(content.progress)))


def read(directory: Path, spec: AdapterSpec | None, manifest_sha256: str | None = None) -> Checkpoint:
    """Return the checkpoint in a version directory. `spec` is None for full weights.

    A version without trainer state has no moments and no progress. Raises DamagedAdapter if the directory is damaged,
    does not fit the base model, or has another manifest than the one with this hash.
    """
    verify(directory, manifest_sha256)
    if spec is not None:
        check_adapter(directory, spec)
    elif not (directory / WEIGHTS).exists():
        raise DamagedAdapter(f"{directory} has no {WEIGHTS}: it is not a version of full weights.")
    tensors = load_file(directory / (WEIGHTS if spec is None else ADAPTER))
    if not (directory / STATE).exists():
        return Checkpoint(RoleState(tensors, None), None, Progress())
    progress = replace(Progress(), **json.loads((directory / STATE).read_text()))
    critic = None
    if (directory / CRITIC).exists():
        critic_file = load_file(directory / CRITIC)
        critic = RoleState(_with_prefix(critic_file, _TENSOR), _with_prefix(critic_file, _MOMENT))
    moments: dict[str, Tensor] = {}
    for path in sorted((directory / TRAINER_STATE).glob(OPTIMIZER_FILES)):
        moments |= load_file(path)
    return Checkpoint(RoleState(tensors, moments), critic, progress)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names have the prefix, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
