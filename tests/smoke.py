"""`make smoke`: run every make target other than the tests in its shortest form.

A target must end well and print the tables that it should have, whatever their figures. After a failure the others are
run all the same.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.core.settings import REPOSITORY

LOG_LINES = 40


@dataclass(frozen=True)
class Target:
    """A make target, and what its output must have.

    Args:
        variable: The variable of the Makefile that passes options to it.
        options: They make it short. `{out}` is a folder for its results, which is removed afterwards.
        prints: Regular expressions; each must match some line of its output.
        writes: Files below `{out}` that must hold something.
    """

    name: str
    variable: str = ""
    options: str = ""
    prints: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        arguments = [f"{self.variable}={self.options.format(out=out)}"] if self.variable else []
        return ["make", "--no-print-directory", self.name, *arguments]


@dataclass(frozen=True)
class Result:
    target: str
    minutes: float
    failure: str | None

    @property
    def verdict(self) -> str:
        return "passed" if self.failure is None else self.failure


def bench(name: str, options: str, **checks: tuple[str, ...]) -> Target:
    return Target(f"bench-{name}", "ATTUNE_BENCH_FLAGS", options, **checks)


SMOKE = (
    Target("help", prints=(r"^setup\s",)),
    Target("facts", prints=(r"^import cycles: 0 ", r" 0 broken$")),
    Target("sbom"),
    Target("chart", prints=(r" passed",)),
    Target("docs", prints=(r"index\.html$",)),
    Target("parity", "ATTUNE_PARITY_FLAGS", "--quick"),
    bench("trainer", "--models demo --threads 2 --rounds 1 --demo-prompts 2"),
    bench("learning", "--runs GRPO --seeds 0 --updates 1 --out {out}/learning.jsonl", writes=("learning.jsonl",)),
    bench(
        "staleness",
        "--losses decoupled --lags 0 --seeds 0 --updates 1 --out {out}/staleness.jsonl",
        writes=("staleness.jsonl",),
    ),
    bench(
        "rates",
        "--algorithms KTO --rates 1e-3 --seeds 0 --updates 1 --out {out}/rates.jsonl",
        writes=("rates.jsonl",),
    ),
    bench(
        "late-votes",
        "--strategies mixed --delays late --seeds 0 --minutes 6 --out {out}/late_votes.jsonl",
        writes=("late_votes.jsonl",),
    ),
    bench(
        "sparse-votes",
        "--recipes model-one-pass --judged 0.5 --seeds 0 --max-votes 100 --out {out}/sparse_votes.jsonl",
        writes=("sparse_votes.jsonl",),
    ),
    bench("growth", "--turns 1000 --rounds 1"),
    bench("scaling", "--turns 1000 --rounds 1"),
    bench(
        "poisoning",
        "--attacks nobody --protections on --updates 1 --evaluation-users 4 --out {out}/poisoning.jsonl",
        writes=("poisoning.jsonl",),
    ),
    bench("reward-model", "--labels 60 --train-prompts 150 --evaluation-prompts 48 --out {out}/reward-model"),
    bench(
        "canary",
        "--cases better --seeds 0 --max-updates 1 --patience 15 --people 4 --out {out}/canary.jsonl",
        writes=("canary.jsonl",),
    ),
    Target("model", "ATTUNE_MODEL_FLAGS", "--dialogues 200 --no-measure --out {out}/model"),
    Target("demo", "ATTUNE_DEMO_FLAGS", "--once --updates 1"),
    bench("overlap", "--rows 1 --updates 3 --runs 1 --out {out}/overlap.jsonl", writes=("overlap.jsonl",)),
    bench(
        "votes",
        "--set ATTUNE_TRAINER__BATCH_SIZE=16 --max-votes 40 --max-minutes 2 --out {out}/votes.jsonl",
        writes=("votes.jsonl",),
    ),
    bench("policies", "--updates 1 --replies 5 --out {out}/policies.jsonl", writes=("policies.jsonl",)),
    bench("swap", "--publications 2 --moves 2 --peer 1 --people 1 --quiet 0"),
    bench("swap-full", "--publications 1 --moves 1 --peer 0 --people 1 --quiet 0"),
    Target(
        "faults",
        "ATTUNE_FAULTS_FLAGS",
        "--parts kills --where embedded --kinds worker --kills 1 --seconds 20 --results {out}/faults.jsonl",
        writes=("faults.jsonl",),
    ),
    Target("fuzz", "ATTUNE_FUZZ_FLAGS", "--cases 500 --parts bodies --out {out}/fuzz.jsonl", writes=("fuzz.jsonl",)),
)


def find_failure(target: Target, status: int, output: str, out: Path) -> str | None:
    """Return why a target did not do what it should; None if it did."""
    if status != 0:
        return f"failed: exit status {status}"
    for pattern in target.prints:
        if not re.search(pattern, output, re.MULTILINE):
            return f"failed: it printed nothing like {pattern!r}"
    for name in target.writes:
        path = out / name
        if not (path.is_file() and path.stat().st_size):
            return f"failed: it wrote no {name}"
    return None


def run_target(target: Target) -> Result:
    """Run a target and print how it ended, with the end of its output if it failed."""
    print(f"smoke: make {target.name} {target.options}".rstrip(), flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        done = subprocess.run(
            target.command(out), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        failure = find_failure(target, done.returncode, done.stdout, out)
    result = Result(target.name, round((time.monotonic() - started) / 60, 1), failure)
    if failure is not None:
        print("\n".join(done.stdout.splitlines()[-LOG_LINES:]))
    print(f"smoke: make {target.name}: {result.verdict}, {result.minutes} min", flush=True)
    return result


def print_results(results: Sequence[Result]) -> None:
    table = Table("target", "minutes", "verdict")
    for result in results:
        table.add_row(result.target, f"{result.minutes:.1f}", result.verdict)
    Console().print(table)


def main() -> None:
    wanted = sys.argv[1:]
    results = [run_target(target) for target in SMOKE if not wanted or target.name in wanted]
    print_results(results)
    sys.exit(any(result.failure is not None for result in results))


if __name__ == "__main__":
    main()
