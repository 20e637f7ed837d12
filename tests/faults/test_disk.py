"""A full or failing disk, or a kill, at every system call of an export."""

import os
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.faults.suite import shim
from tests.faults.suite.parts import disk

FAULTS = ["ENOSPC", "EIO", "SIGKILL"] if os.environ.get("ATTUNE_FULL") == "1" else ["ENOSPC", "SIGKILL"]
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
async def test_failed_export_leaves_a_complete_version_or_none(tmp_path: Path, fault: str) -> None:
    if shim.compiler() is None:
        missing("no C compiler for the shim that makes a disk fail")
    told = await disk(tmp_path, fault)
    print(f"\n{told['counts']}")
    assert told["wrong"] == []
    assert {"write", "fsync", "rename", "mkdir", "open"} <= told["counts"].keys(), "each of them was made to fail"
    assert told["counts"]["went on"] > told["counts"]["faults"]
