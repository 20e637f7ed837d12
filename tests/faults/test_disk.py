"""A disk that is full, broken or dies with its process, at every call of publishing a version."""

import os
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.faults.suite import shim
from tests.faults.suite.parts import disk

FAULTS = ["ENOSPC", "EIO", "SIGKILL"] if os.environ.get("ATTUNE_FULL") == "1" else ["ENOSPC", "SIGKILL"]
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_call_of_an_export_fails_the_version_is_whole_or_not_there(tmp_path: Path, fault: str) -> None:
    if shim.compiler() is None:
        missing("no C compiler for the shim that makes a disk fail")
    told = await disk(tmp_path, fault)
    print(f"\n{told['counts']}")
    assert told["wrong"] == []
    assert {"write", "fsync", "rename", "mkdir", "open"} <= told["counts"].keys(), "each of them was made to fail"
    assert told["counts"]["went on"] > told["counts"]["faults"]
