"""Compares Attune's formulas with those of verl, TRL, OpenRLHF and AReaL: `make parity`.

Prints a table and ends with 1 where a difference passes its bound, where a difference on purpose is no difference,
or where a public formula is neither compared nor said to stand alone. `--write` keeps the table in docs/parity.md.
"""

import argparse
import secrets
import sys
import warnings
from collections.abc import Iterator

import torch

from alignment import functional
from tests.parity import table
from tests.parity.catalogue import ALONE, CASES
from tests.parity.compare import rows
from tests.parity.differences import DIFFERENCES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="fresh unless given")
    parser.add_argument("--repeats", type=int, default=2, help="batches of each kind and shape")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/parity.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    broken = [f"{name} is compared with nobody, and no reason is given" for name in uncompared()]
    lines: list[str] = []
    for line in report(asked.seed, asked.repeats, broken):
        lines.append(line)
        print(line, flush=True)
    if asked.write and not broken:
        table.write("\n".join(lines) + "\n")
    return 1 if broken else 0


def report(seed: int, repeats: int, broken: list[str]) -> Iterator[str]:
    """Line by line, as it is found; what must not be goes into `broken` too."""
    yield from (table.provenance(seed), "", "### Loss and gradient", "", table.ROWS)
    count = batches = 0
    for row in rows(CASES, seed, repeats):
        yield table.line(row)
        count, batches = count + 1, batches + row.batches
        if not row.holds:
            broken.append(f"{row.case.function} {row.case.title}: {row.peer}, {row.dtype}")
    yield from ("", "### Bounds wider than 1e-9 (float64) and 1e-6 (float32)", "", table.reasons())
    yield from ("", "### Different on purpose", "", table.DIFFERENCES)
    generator = torch.Generator().manual_seed(seed)
    for difference in DIFFERENCES:
        measured = difference.measure(generator)
        yield table.difference_line(difference, measured)
        if measured.gap <= 1e-9:
            broken.append(f"{difference.what}: {difference.peer} does not differ")
    yield from ("", "### Compared with nobody", "", table.alone(), "")
    verdict = "all within their bounds." if not broken else "\n".join(["", *(f"- {text}" for text in broken)])
    yield f"{count} rows over {batches} pairs of answers, {len(DIFFERENCES)} differences on purpose: {verdict}"


def uncompared() -> list[str]:
    """Public formulas without a case and without a reason; the types that they answer with are none."""
    named = {case.function for case in CASES} | set(ALONE)
    answers = {"Gae", "KTOLoss", "PolicyLoss", "PreferenceLoss", "RolloutCorrection", "ValueLoss"}
    return [name for name in functional.__all__ if name not in named | answers]


if __name__ == "__main__":
    sys.exit(main())
