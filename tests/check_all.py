"""`make check-all`: the slow tests and every target of `make smoke`, one after another, with one table at the end.

The table is written to docs/measurements/check-all.json after each target, with the commit. Run it before an issue is
called resolved; it is no condition for landing.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

from app.core.settings import REPOSITORY
from tests.smoke import SMOKE, Result, Target, print_results, run_target

RESULTS = REPOSITORY / "docs" / "measurements" / "check-all.json"
TARGETS = (Target("test-slow", prints=(r"\d+ passed",)), *SMOKE)


def describe_commit() -> str:
    """Return the commit that is checked out, with a mark if files differ from it."""
    commit = git("rev-parse", "--short=12", "HEAD")
    own = RESULTS.relative_to(REPOSITORY)
    return f"{commit}, changed" if git("status", "--porcelain", "--", ".", f":!{own}") else commit


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def write_results(commit: str, results: list[Result]) -> None:
    RESULTS.write_text(json.dumps({"commit": commit, "results": [asdict(row) for row in results]}, indent=2) + "\n")


def read_results(commit: str) -> list[Result]:
    """Return what a run of this commit that was cut off has found."""
    if not RESULTS.exists():
        return []
    stored = json.loads(RESULTS.read_text())
    return [Result(**row) for row in stored["results"]] if stored["commit"] == commit else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="make check-all", description=__doc__)
    parser.add_argument("--resume", action="store_true", help="leave out what has passed at this commit")
    args = parser.parse_args()
    commit = describe_commit()
    results = [row for row in read_results(commit) if row.failure is None] if args.resume else []
    passed = {row.target for row in results}
    for target in TARGETS:
        if target.name not in passed:
            results.append(run_target(target))
            write_results(commit, results)
    print_results(results)
    sys.exit(any(row.failure is not None for row in results))


if __name__ == "__main__":
    main()
