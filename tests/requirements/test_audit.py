"""`make audit` never says that a package has no advisory when nobody has looked."""

import json

import pytest

from requirements.audit import AFFECTED, INCOMPLETE, UNREACHABLE, report

CLEAN = {"name": "orjson", "version": "3.13.0", "vulns": []}
SKIPPED = {"name": "orjson", "skip_reason": "Dependency not found on PyPI and could not be audited: orjson (3.13.0)"}
VULNERABLE = {"name": "orjson", "version": "3.9.0", "vulns": [{"id": "PYSEC-2024-40", "fix_versions": ["3.9.15"]}]}


@pytest.mark.parametrize(
    ("packages", "status", "line"),
    [
        ([CLEAN], 0, "1 packages, none with a known advisory"),
        ([CLEAN, SKIPPED], INCOMPLETE, "not audited, because the advisory service does not know them: orjson"),
        ([], INCOMPLETE, "it names no package"),
        ([VULNERABLE, SKIPPED], AFFECTED, "orjson 3.9.0: PYSEC-2024-40, fixed in 3.9.15"),
    ],
)
def test_status_of_what_pip_audit_reports(packages: list[object], status: int, line: str) -> None:
    result, lines = report("attune.txt", json.dumps({"dependencies": packages, "fixes": []}), "")
    assert result == status and any(line in one for one in lines)


def test_service_that_does_not_answer_is_named() -> None:
    error = "Traceback (most recent call last):\nrequests.exceptions.ConnectionError: Failed to resolve the name\n"
    status, [line] = report("attune.txt", "", error)
    assert status == UNREACHABLE and "did not answer" in line and "Failed to resolve the name" in line
