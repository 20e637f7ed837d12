"""`python -m tests.families.matrix`: run the matrix of model families, and write the table of docs/models.md.

Each family: build a tiny random checkpoint → walk it → train two versions → serve the base model and both versions, and
compare each with transformers. Results are kept in docs/measurements/families.jsonl; `--only NAME` repeats some.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.families.checkpoints import FAMILIES, Family, build
from tests.families.serving import EngineFailed, serve_family
from tests.families.training import train_family

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "measurements" / "families.jsonl"
PAGE = REPOSITORY / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
BASE_TOLERANCE, ADAPTER_TOLERANCE = 1e-4, 1e-3  # nats, in float32


@dataclass(frozen=True)
class FamilyResult:
    """The outcome of one family: largest differences from transformers in nats, or who refuses it, and why."""

    name: str
    architecture: str = ""
    target_modules: tuple[str, ...] = ()
    trainer: tuple[float, ...] = ()  # base model, first, second version
    engine: tuple[float, ...] = ()
    start_seconds: float = 0.0
    refused_by: str | None = None
    reason: str = ""


def run_family(family: Family, folder: Path) -> FamilyResult:
    """Run one family. A refusal is a result; anything else that goes wrong is raised."""
    checkpoint = build(family, folder / "model")
    try:
        trained = train_family(checkpoint, folder / "versions")
    except ValueError as error:
        return FamilyResult(family.name, refused_by="trainer", reason=str(error))
    result = FamilyResult(
        family.name,
        trained.architecture,
        tuple(sorted(trained.spec.target_modules)),
        tuple(version.distance for version in trained.versions),
    )
    try:
        served = asyncio.run(serve_family(checkpoint, trained, folder))
    except EngineFailed as error:
        return replace(result, refused_by="engine", reason=str(error))
    result = replace(result, engine=served.distances, start_seconds=round(served.start_seconds, 1))
    base, *versions = served.distances
    if not (base <= BASE_TOLERANCE and max(versions) <= ADAPTER_TOLERANCE):
        reason = f"log-probs of engine and transformers differ by {max(served.distances):.2g}"
        return replace(result, refused_by="both", reason=reason)
    return result


def read_results() -> dict[str, FamilyResult]:
    if not RESULTS.exists():
        return {}
    return {fields["name"]: FamilyResult(**fields) for fields in map(json.loads, RESULTS.read_text().splitlines())}


def table(results: dict[str, FamilyResult]) -> str:
    """Return the tables of docs/models.md: families that pass, then those that are refused."""
    passed = [
        "| models | class | adapters on | trainer − transformers | engine − transformers: base | versions |",
        "|---|---|---|---|---|---|",
    ]
    refused = ["| models | class | refused by | reason |", "|---|---|---|---|"]
    for family in FAMILIES:
        result = results[family.name]
        if result.refused_by is None:
            targets = ", ".join(name.removesuffix("_proj") for name in result.target_modules)
            figures = f"{max(result.trainer):.0e} | {result.engine[0]:.0e} | {max(result.engine[1:]):.0e}"
            passed.append(f"| {family.models} | `{result.architecture}` | {targets} | {figures} |")
        else:
            who = "the parity check" if result.refused_by == "both" else f"the {result.refused_by}"
            reason = result.reason.partition(". ")[0].replace("|", "\\|")
            refused.append(f"| {family.models} | `{result.architecture or '–'}` | {who} | {reason} |")
    return "\n".join([*passed, "", *refused])


def write_page(results: dict[str, FamilyResult]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.families.matrix", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[family.name for family in FAMILIES])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = read_results()
    for family in FAMILIES:
        if arguments.only is None or family.name in arguments.only:
            with TemporaryDirectory() as folder:
                results[family.name] = result = run_family(family, Path(folder))
            print(json.dumps(asdict(result)), flush=True)
            rows = [results[known.name] for known in FAMILIES if known.name in results]
            RESULTS.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in rows))
    write_page(results)


if __name__ == "__main__":
    main()
