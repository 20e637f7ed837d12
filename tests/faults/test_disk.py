"""A full or failing disk, or a kill, at every system call of an export."""

import os
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.faults.suite import shim
from tests.faults.suite.cases import run_disk_case

FAULTS = ["ENOSPC", "EIO", "SIGKILL"] if os.environ.get("ATTUNE_FULL") == "1" else ["ENOSPC", "SIGKILL"]
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
async def test_failed_export_leaves_a_complete_version_or_none(tmp_path: Path, fault: str) -> None:
    if shim.compiler() is None:
        skip_or_fail("no C compiler for the shim that makes a disk fail")
    row = await run_disk_case(tmp_path, fault)
    print(f"\n{row['counts']}")
    assert row["errors"] == []
    assert {"write", "fsync", "rename", "mkdir", "open"} <= row["counts"].keys(), "each of these calls failed once"
    assert row["counts"]["trained"] > row["counts"]["faults"]
