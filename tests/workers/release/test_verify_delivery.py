"""Delivery: a payload is built only from sealed files, because a payload that SGLang cannot unpickle crashes it; and an
engine that computes with the parent's weights is noticed, in bfloat16 too."""

import logging
import random
from pathlib import Path

import pytest

from alignment.artifacts.manifest import MANIFEST
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.errors import DamagedAdapter
from app.core.settings import DEMO_MODEL, Settings
from app.models import Version
from tests.support.adapters import make_adapter
from workers.release.delivery.adapters import build_payload
from workers.release.verify_delivery import NotDelivered, Timings, require_delivered


@pytest.mark.parametrize("file", [ADAPTER, ADAPTER_CONFIG, MANIFEST])
def test_file_changed_since_the_check_is_refused(tmp_path: Path, file: str) -> None:
    sha256 = make_adapter(tmp_path / "shop-v1", DEMO_MODEL)
    path = tmp_path / "shop-v1" / file
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))
    with pytest.raises(DamagedAdapter, match=file):
        build_payload(tmp_path / "shop-v1", sha256)


NOISE = {"float32": 1e-6, "bfloat16": 0.002}  # between engine and trainer, as measured
Row = list[list[float]]


def version_with(own: Row, parent: Row | None) -> Version:
    probe = {"ids": [], "logprobs": own} | ({} if parent is None else {"parent_logprobs": parent})
    return Version(adapter_name="shop-v2", probe=probe)


def settings_of(dtype: str) -> Settings:
    return Settings.model_validate({"dtype": dtype})


def add_noise(scores: Row, size: float, seed: int) -> Row:
    generator = random.Random(seed)
    return [[score + generator.gauss(0, size) for score in row] for row in scores]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parent_under_the_versions_name_is_refused_and_the_version_is_not(dtype: str, seed: int) -> None:
    """The update moves log-probs by 0.015, less than the tolerance in bfloat16."""
    parent = [[-2.0] * 30 for _ in range(6)]
    own = add_noise(parent, 0.015, seed)
    version, settings, timings = version_with(own, parent), settings_of(dtype), Timings()
    require_delivered(add_noise(own, NOISE[dtype], seed + 1), version, settings, timings)
    assert timings.seconds["probe_share"] > 0.5
    with pytest.raises(
        NotDelivered, match="nearer to the parent" if dtype == "bfloat16" else "differ from the trainer"
    ):
        require_delivered(add_noise(parent, NOISE[dtype], seed + 2), version, settings, timings)


def test_small_update_is_told_from_its_parent_in_float32() -> None:
    """The update moves log-probs by less than the tolerance."""
    parent = [[-2.0] * 30]
    own = [[-2.0 + 0.0008 * (-1) ** at for at in range(30)]]
    with pytest.raises(NotDelivered, match="nearer to the parent"):
        require_delivered(add_noise(parent, 1e-6, 0), version_with(own, parent), settings_of("float32"), Timings())


def test_update_that_moved_nothing_is_accepted_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    parent, timings = [[-2.0] * 30], Timings()
    own = add_noise(parent, 0.0005, 1)
    with caplog.at_level(logging.WARNING):
        require_delivered(add_noise(parent, 0.002, 2), version_with(own, parent), settings_of("bfloat16"), timings)
    assert timings.seconds["probe_share_error"] > 0.1 and "too little to tell its delivery" in caplog.text


def test_noise_of_the_answer_does_not_refuse_the_version() -> None:
    """The largest noise that was measured, against it on a token that the update moved by little more."""
    noise, settings = 0.013, settings_of("bfloat16")
    engine_noise = [noise * (-1) ** at for at in range(29)]
    for move in (0.0251, 0.2):
        parent, own = [[-2.0] * 30], [[-2.0 + move, *[-2.0] * 29]]
        engine = [[-2.0 + move - noise, *(-2.0 + value for value in engine_noise)]]
        require_delivered(engine, version_with(own, parent), settings, Timings())
    with pytest.raises(NotDelivered, match="nearer to the parent"):
        refused = [[-2.0 + noise, *(-2.0 + value for value in engine_noise)]]
        require_delivered(refused, version_with(own, parent), settings, Timings())


def test_version_of_an_older_release_is_compared_by_the_tolerance_alone() -> None:
    timings = Timings()
    require_delivered([[-1.9]], version_with([[-2.0]], None), settings_of("bfloat16"), timings)
    assert "probe_share" not in timings.seconds
