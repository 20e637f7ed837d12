"""Ask an advisory service about every locked package, with pip-audit.

Exit status: 0 none is affected, 1 some are, 3 not every package was audited, 4 the service did not answer. pip-audit
itself ends with 0 when it skips a package, and with 1 both for an advisory and for a service that does not answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LOCKS = ("torch.txt", "attune.txt", "engine.txt", "vllm.txt")
AFFECTED, INCOMPLETE, UNREACHABLE = 1, 3, 4


def report(lock: str, output: str, error: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines to print for one lock, from what pip-audit wrote."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (error.strip().splitlines() or ["no output"])[-1].rpartition(": ")[2].partition('")')[0]
        return UNREACHABLE, [f"{lock} is not audited, because the advisory service did not answer: {reason}."]
    lines = [
        f"{lock}: {package['name']} {package['version']}: {advisory['id']}, fixed in "
        f"{', '.join(advisory['fix_versions']) or 'no version yet'}"
        for package in packages
        for advisory in package.get("vulns", [])
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped:
        lines.append(f"{lock}: not audited, because the advisory service does not know them: {', '.join(skipped)}")
    if not packages:
        lines.append(f"{lock}: not audited, because it names no package")
    affected = any(package.get("vulns") for package in packages)
    status = AFFECTED if affected else INCOMPLETE if skipped or not packages else 0
    return status, lines or [f"{lock}: {len(packages)} packages, none with a known advisory"]


def main(flags: list[str]) -> int:
    statuses = []
    for lock in LOCKS:
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        command += ["--vulnerability-service", "osv", "--format", "json", *flags, "--requirement", str(FOLDER / lock)]
        result = subprocess.run(command, capture_output=True, text=True)
        status, lines = report(lock, result.stdout, result.stderr)
        print("\n".join(f"audit: {line}" for line in lines))
        statuses.append(status)
        if status == UNREACHABLE:  # nor will it answer for the next lock
            break
    return AFFECTED if AFFECTED in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
