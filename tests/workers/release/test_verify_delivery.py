"""Delivery: a payload is built only from sealed files, because a payload that SGLang cannot unpickle crashes it."""

from pathlib import Path

import pytest

from alignment.artifacts.manifest import MANIFEST
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.errors import DamagedAdapter
from app.core.settings import DEMO_MODEL
from tests.support.adapters import make_adapter
from workers.release.verify_delivery import build_payload


@pytest.mark.parametrize("file", [ADAPTER, ADAPTER_CONFIG, MANIFEST])
def test_file_changed_since_the_check_is_refused(tmp_path: Path, file: str) -> None:
    sha256 = make_adapter(tmp_path / "shop-v1", DEMO_MODEL)
    path = tmp_path / "shop-v1" / file
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))
    with pytest.raises(DamagedAdapter, match=file):
        build_payload(tmp_path / "shop-v1", sha256)
