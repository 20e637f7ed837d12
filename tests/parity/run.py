"""Compare Attune's formulas with those of verl, TRL, OpenRLHF and AReaL: `make parity`.

Prints tables. The exit status is 1 where a difference exceeds its bound, where an intended difference has vanished, or
where a public formula is neither compared with a peer nor listed as one that no peer has. `--write` updates
docs/parity.md; `--quick` is the short mode for CI.
"""

import argparse
import secrets
import sys
import warnings
from collections.abc import Iterator

import torch

from tests.parity import table
from tests.parity.catalogue import CASES, uncompared
from tests.parity.compare import rows
from tests.parity.differences import DIFFERENCES
from tests.parity.references import compare_with_references


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="default: random")
    parser.add_argument("--repeats", type=int, default=2, help="batches of each kind and shape")
    parser.add_argument("--quick", action="store_true", help="seed 0 unless given, one batch of each kind and shape")
    parser.add_argument("--write", action="store_true", help="write the results to docs/parity.md")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else 0 if args.quick else secrets.randbelow(2**31)
    warnings.simplefilter("ignore")
    failures = [f"{name} is neither compared with a peer nor listed in NO_PEER" for name in uncompared()]
    lines: list[str] = []
    for line in report(seed, 1 if args.quick else args.repeats, failures):
        lines.append(line)
        print(line, flush=True)
    if args.write and not failures:
        table.write("\n".join(lines) + "\n")
    return 1 if failures else 0


def report(seed: int, repeats: int, failures: list[str]) -> Iterator[str]:
    """Yield the report line by line. Add the failures to `failures`."""
    yield from (table.provenance(seed), "", "### Loss and gradient", "", table.ROWS)
    count = batches = 0
    for row in rows(CASES, seed, repeats):
        yield table.line(row)
        count, batches = count + 1, batches + row.batches
        if not row.is_within_bound:
            failures.append(f"{row.case.function} {row.case.title}: {row.peer}, {row.dtype}")
    yield from ("", "### Bounds wider than 1e-9 (float64) and 1e-6 (float32)", "", table.reasons())
    yield from ("", "### Different on purpose", "", table.DIFFERENCES)
    generator = torch.Generator().manual_seed(seed)
    for difference in DIFFERENCES:
        measured = difference.measure(generator)
        yield table.difference_line(difference, measured)
        if measured.gap <= 1e-9:
            failures.append(f"{difference.what}: {difference.peer} does not differ any more")
    yield from ("", "### No peer has it", "", table.without_peer())
    yield from ("", "### Independent references in float64 NumPy", "", table.REFERENCES)
    for comparison in compare_with_references(seed, repeats):
        yield table.reference_line(comparison)
        if not comparison.is_within_bound:
            failures.append(f"{comparison.function} differs from its reference by {comparison.difference:.1e}")
    summary = "all within their bounds." if not failures else "\n".join(["", *(f"- {text}" for text in failures)])
    yield ""
    yield f"{count} rows over {batches} comparisons, {len(DIFFERENCES)} differences on purpose: {summary}"


if __name__ == "__main__":
    sys.exit(main())
