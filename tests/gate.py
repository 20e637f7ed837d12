"""Run `make test`, and what fails in it once more, alone: `.ci/run` calls this.

A defect fails twice. What fails once and then passes is flaky: the run is green, and the test is listed at the end with
its first failure, so that it is mended next.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from app.core.settings import REPOSITORY

FAILED_TESTS = Path(".pytest_cache") / "v" / "cache" / "lastfailed"
MAX_REPEATED = 20  # more failures than this are no accident
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - (.*))?$")
STATUS = re.compile(r"^make(?:\[\d+\])?: \*\*\* .* Error (\d+)$")
SOME_FAILED = 1  # pytest's exit status; the higher ones mean that it was interrupted, or ran no test
RUN = ("make", "--no-print-directory", "test")


def run(command: list[str], folder: Path) -> tuple[int, dict[str, str]]:
    """Run a make target and print what it prints.

    Returns:
        The exit status of what it ran, and the tests that pytest's summary lists as failed, with their first line.
    """
    failures, status = {}, 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            if match := SUMMARY.match(line.rstrip()):
                failures[match[1]] = match[2] or ""
            if match := STATUS.match(line.rstrip()):
                status = int(match[1])
    return status or job.returncode, failures


def read_failed_tests(folder: Path) -> list[str]:
    file = folder / FAILED_TESTS
    return sorted(json.loads(file.read_text())) if file.exists() else []


def run_twice(test: list[str], repeat: list[str], folder: Path = REPOSITORY) -> int:
    """Run the tests of a folder, and what failed once more; return the exit status."""
    (folder / FAILED_TESTS).unlink(missing_ok=True)
    status, failures = run(test, folder)
    failed = read_failed_tests(folder)
    if status != SOME_FAILED or not failed or len(failed) > MAX_REPEATED:
        return status
    if not all("::" in test_id for test_id in failed):
        return status  # a module or a process: other tests were not run
    print(f"\ngate: {len(failed)} failed and are run once more, alone: {', '.join(failed)}\n", flush=True)
    status, _ = run(repeat, folder)
    flaky = sorted({*failed} - {*read_failed_tests(folder)}) if status in (0, SOME_FAILED) else []
    if flaky:
        print(f"\nflaky, {len(flaky)}: failed in the whole run, passed alone")
        for test_id in flaky:
            print(f"  {test_id}\n    {failures.get(test_id, 'see above')}")
    return status


def main() -> None:
    options = "-n 0 --last-failed --last-failed-no-failures none"
    sys.exit(run_twice([*RUN], [*RUN, f"PYTEST_ARGS={options}"]))


if __name__ == "__main__":
    main()
