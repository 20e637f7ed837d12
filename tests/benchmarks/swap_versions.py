"""Make random versions as a trainer exports them: adapters or full weights, with a manifest and probe log-probs."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from sqlalchemy import func, select

from alignment.artifacts.manifest import publish_directory
from alignment.artifacts.specs import ADAPTER, WEIGHTS
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.models.base_model import pick_device
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import load_tokenizer, probe_ids, score_sequences
from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, Version, VersionState, new_id
from tests.support.adapters import make_adapter
from tests.support.full_weights import make_weights


@dataclass(frozen=True)
class UnpublishedVersion:
    """A version in a separate directory, not yet exported to the versions directory."""

    folder: Path
    manifest_sha256: str
    probe: dict[str, Any]
    full: bool = False


def make_versions(
    directory: Path, base_model: Path, count: int, config: TrainerConfig | None = None
) -> list[UnpublishedVersion]:
    """Make `count` versions; without LoRA in `config` they are full weights.

    They differ by far more than the engine's numerical error, so the log-probs of a reply identify its version.
    """
    config = config or TrainerConfig(device="cpu")
    full = config.lora is None
    policy = PolicyModel(base_model, config, pick_device(config.device), reference=not full)
    ids = probe_ids(load_tokenizer(base_model), "float32")
    versions = []
    for number in range(count):
        folder = directory / f"version-{number}"
        if full:
            sha256 = make_weights(folder, base_model, seed=number, noise=0.02)
        else:
            sha256 = make_adapter(folder, base_model, seed=number, lora=config.lora)
        policy.load_adapter(load_file(folder / (WEIGHTS if full else ADAPTER)))
        scores = score_sequences(policy, [ScoredSequence(row, start=1) for row in ids], max_tokens=2048).tolist()
        logprobs = [row[: len(row_ids) - 1] for row, row_ids in zip(scores, ids, strict=True)]
        versions.append(
            UnpublishedVersion(folder, sha256, {"ids": [list(row) for row in ids], "logprobs": logprobs}, full)
        )
    return versions


async def publish(db: Database, settings: Settings, policy_id: str, unpublished: UnpublishedVersion) -> str:
    """Export and commit the version as the trainer does, and enqueue its evaluation. Return its id."""
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id)
        newest = await session.scalar(select(func.max(Version.number)).where(Version.policy_id == policy_id))
        number = (newest or 0) + 1
        name = f"{policy.name}-v{number}"
        start, path = time.perf_counter(), settings.versions_dir / name
        settings.versions_dir.mkdir(parents=True, exist_ok=True)
        shutil.copytree(unpublished.folder, path.with_suffix(".new"))
        publish_directory(path.with_suffix(".new"), path)
        version = Version(
            id=new_id("ver"),
            policy_id=policy.id,
            number=number,
            parent_id=policy.head_version_id,
            state=VersionState.TRAINED,
            adapter_name=name,
            adapter_path=str(path),
            manifest_sha256=unpublished.manifest_sha256,
            probe=unpublished.probe,
            full_weights=unpublished.full,
            timings={"export": time.perf_counter() - start},
        )
        session.add(version)
        await session.flush()
        policy.head_version_id = version.id
        enqueue_after_commit(session, "evaluate")
        return version.id
