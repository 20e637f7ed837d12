"""Format the results as Markdown, and write them to `docs/parity.md`."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from tests.parity.case import VERSIONS
from tests.parity.catalogue import CASES, NO_PEER
from tests.parity.compare import Row
from tests.parity.differences import Difference, Measured
from tests.parity.references import Comparison

PAGE = Path("docs/parity.md")
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
NAMES = {"verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF", "areal": "AReaL"}
ROWS = "| ours | peer | dtype | max \\|Δloss\\| | max \\|Δgrad\\| | bound | verdict |\n|---|---|---|---|---|---|---|"
REFERENCES = "| ours | max \\|Δ\\| | bound | verdict |\n|---|---|---|---|"
DIFFERENCES = "| what | peer | ours | theirs | max \\|Δ\\| | why |\n|---|---|---|---|---|---|"


def provenance(seed: int) -> str:
    peers = ", ".join(f"{name} {version(package)}" for package, name in NAMES.items())
    assert {package: version(package) for package in VERSIONS} == VERSIONS, "other versions of the peers are installed"
    day = datetime.now(UTC).date().isoformat()
    return f"{day}: {peers}; torch {torch.__version__}, Python {platform.python_version()}, seed {seed}."


def line(row: Row) -> str:
    dtype = str(row.dtype).removeprefix("torch.")
    name = f"`{row.case.function}` {row.case.title}"
    gradient = "–" if row.gradient is None else short(row.gradient)
    verdict = ("agrees" if row.is_within_bound else "**DISAGREES**") + (
        f", {row.refused} refused" if row.refused else ""
    )
    cells = [name, NAMES[row.peer], dtype, short(row.value), gradient, short(row.bound), verdict]
    return "| " + " | ".join(cells) + " |"


def short(x: float) -> str:
    return f"{x:.0e}" if x else "0"


def difference_line(difference: Difference, measured: Measured) -> str:
    def format_result(result: torch.Tensor) -> str:
        if result.numel() > 1:
            return f"[{', '.join(map(str, result.shape))}]"
        return "refused" if result.isnan().all() else f"{float(result):.4g}"

    sides = [format_result(measured.ours), format_result(measured.theirs)]
    cells = [difference.what, NAMES[difference.peer], *sides, f"{measured.gap:.1e}", difference.why]
    return "| " + " | ".join(cells) + " |"


def reasons() -> str:
    """Return why some bounds are wider than 1e-9 and 1e-6."""
    cases_by_reason: dict[str, list[str]] = {}
    for case in CASES:
        if case.why:
            cases_by_reason.setdefault(case.why, []).append(f"`{case.function}` {case.title}")
    return "\n".join(f"- {why}: {'; '.join(dict.fromkeys(cases))}." for why, cases in cases_by_reason.items())


def reference_line(comparison: Comparison) -> str:
    verdict = "agrees" if comparison.is_within_bound else "**DISAGREES**"
    cells = [f"`{comparison.function}`", short(comparison.difference), short(comparison.bound), verdict]
    return "| " + " | ".join(cells) + " |"


def without_peer() -> str:
    """Return the table of formulas that no peer has."""
    return "\n".join(["| ours | why |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in NO_PEER.items())])


def write(measured: str) -> None:
    """Replace the results between the markers of docs/parity.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + measured + END + rest.split(END)[1])
