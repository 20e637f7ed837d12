"""Print facts about the source tree that anyone can repeat: `make facts`.

Counts are taken from the working tree. The counts before issue 12, and those of `Any` before and now, are stored in
docs/measurements/facts.json, and the minutes of `.ci/run` in docs/measurements/gate.md.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.core.settings import REPOSITORY
from tests.architecture.any_uses import count_any_uses
from tests.architecture.source_tree import (
    PACKAGES,
    count_code_lines,
    find_cycles,
    find_modules,
    import_graph,
    package_graph,
)
from tests.architecture.vocabulary import REPLACEMENTS, SOURCE_FOLDERS, find_retired_names

MEASUREMENTS = Path("docs/measurements/facts.json")
GATE_RUNS = Path("docs/measurements/gate.md")


def count_sources(root: Path = REPOSITORY) -> dict[str, dict[str, int]]:
    """Return the number of modules and of code lines in each source folder."""
    counts = {}
    for folder in SOURCE_FOLDERS:
        sources = [module.source for module in find_modules(folder, root=root)]
        counts[folder] = {"modules": len(sources), "code_lines": sum(map(count_code_lines, sources))}
    return counts


def count_cycles() -> dict[str, int]:
    graph = import_graph(find_modules(*PACKAGES))
    return {"modules": len(find_cycles(graph)), "packages": len(find_cycles(package_graph(graph)))}


def check_contracts() -> tuple[int, int]:
    """Return how many import contracts are kept and broken."""
    command = [Path(sys.executable).parent / "lint-imports"]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    match = re.search(r"Contracts: (\d+) kept, (\d+) broken", output)
    if match is None:
        raise RuntimeError(f"lint-imports did not report its contracts:\n{output}")
    return int(match[1]), int(match[2])


def print_any_uses(before: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Print the uses of `Any`, and return them."""
    now = {package: count.as_json() for package, count in count_any_uses().items()}
    print(f"{'uses of Any':<12}{'per 1,000 lines':>17}{'before':>9}{'dict[str, Any]':>17}{'before':>9}")
    for package, counts in now.items():
        old = before["packages"][package]
        per_line = f"{counts['any_per_thousand_lines']:>17}{old['any_per_thousand_lines']:>9}"
        print(f"{package:<12}{per_line}{counts['dict_str_any']:>17}{old['dict_str_any']:>9}")
    print(f"(before: {before['commit']})")
    return now


def main() -> None:
    parser = argparse.ArgumentParser(prog="make facts", description=__doc__)
    parser.add_argument("--count", type=Path, metavar="ROOT", help="only count the sources of another tree, as JSON")
    args = parser.parse_args()
    if args.count is not None:
        print(json.dumps(count_sources(args.count.resolve()), indent=2))
        return
    measurements: dict[str, Any] = json.loads((REPOSITORY / MEASUREMENTS).read_text())
    before, now = measurements["before"]["sources"], count_sources()
    print(f"{'folder':<12}{'modules':>9}{'before':>9}{'code lines':>13}{'before':>9}")
    for folder, counts in now.items():
        old = before.get(folder, {"modules": 0, "code_lines": 0})
        print(f"{folder:<12}{counts['modules']:>9}{old['modules']:>9}{counts['code_lines']:>13}{old['code_lines']:>9}")
    totals = [
        sum(counts[key] for counts in tree.values()) for key in ("modules", "code_lines") for tree in (now, before)
    ]
    print(f"{'total':<12}{totals[0]:>9}{totals[1]:>9}{totals[2]:>13}{totals[3]:>9}")
    print(f"(before: {measurements['before']['commit']}; code lines: without docstrings, comments and blank lines)")
    cycles = count_cycles()
    print(f"import cycles: {cycles['modules']} among modules, {cycles['packages']} among packages")
    num_passed, num_broken = check_contracts()
    print(f"import contracts: {num_passed} kept, {num_broken} broken")
    measurements["any_uses"]["now"] = print_any_uses(measurements["any_uses"]["before"])
    (REPOSITORY / MEASUREMENTS).write_text(json.dumps(measurements, indent=2) + "\n")
    print(f"retired words: {len(find_retired_names())} names with one of {len(REPLACEMENTS)} words")
    print(f"make test: {measurements['before']['make_test_minutes']} minutes before; .ci/run now, set-up included:")
    print("\n".join(line for line in (REPOSITORY / GATE_RUNS).read_text().splitlines() if line.startswith("|")))


if __name__ == "__main__":
    main()
