"""`make smoke`: run every make target other than the tests in its shortest form.

A target must end well and print the tables that it should have, whatever their figures. After a failure the others are
run all the same. What a target prints is in .attune/smoke/<target>.log while it runs and afterwards.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.core.settings import REPOSITORY

LOG_LINES = 40
LOGS = REPOSITORY / ".attune" / "smoke"


@dataclass(frozen=True)
class Target:
    """A make target, and what its output must have.

    Args:
        variable: The variable of the Makefile that passes options to it.
        options: They make it short. `{out}` is a folder for its results, which is removed afterwards.
        prints: Regular expressions; each must match some line of its output.
        tables: How the first lines of its Markdown tables begin; each must have rows of as many cells as that line.
        writes: Files below `{out}` that must hold something.
    """

    name: str
    variable: str = ""
    options: str = ""
    prints: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
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
    Target("parity", "ATTUNE_PARITY_FLAGS", "--quick", tables=("| ours | peer |",)),
    bench(
        "trainer",
        "--models demo --threads 2 --rounds 1 --demo-prompts 2",
        tables=("| threads | ours, tokens/s | TRL |", "| | demo model, "),
    ),
    bench(
        "learning",
        "--runs GRPO --seeds 0 --updates 1 --out {out}/learning.jsonl",
        tables=("| algorithm | settings that differ from the defaults |",),
        writes=("learning.jsonl",),
    ),
    bench(
        "staleness",
        "--losses decoupled --lags 0 --seeds 0 --updates 1 --out {out}/staleness.jsonl",
        tables=("| updates behind |",),
        writes=("staleness.jsonl",),
    ),
    bench(
        "lags",
        "--algorithms KTO --lags 1 --seeds 41 --updates 1 --out {out}/lags.jsonl",
        tables=("| algorithm | updates behind |",),
        writes=("lags.jsonl",),
    ),
    bench(
        "rates",
        "--algorithms KTO --rates 1e-3 --seeds 0 --updates 1 --out {out}/rates.jsonl",
        tables=("| algorithm | seeds |",),
        writes=("rates.jsonl",),
    ),
    bench(
        "update-kl",
        "--algorithms KTO --seeds 41 --updates 2 --out {out}/update_kl.jsonl",
        tables=("| | target | held out |",),
        writes=("update_kl.jsonl",),
    ),
    bench(
        "late-votes",
        "--strategies PPO --delays late --seeds 0 --minutes 6 --out {out}/late_votes.jsonl",
        tables=("| votes | loss |",),
        writes=("late_votes.jsonl",),
    ),
    bench(
        "corrections",
        "--arms both --seeds 0 --updates 1 --users 8 --out {out}/corrections.jsonl",
        tables=("| feedback |",),
        writes=("corrections.jsonl",),
    ),
    bench(
        "sparse-votes",
        "--recipes model-one-pass --judged 0.5 --seeds 0 --max-votes 100 --out {out}/sparse_votes.jsonl",
        tables=("| recipe | judged |",),
        writes=("sparse_votes.jsonl",),
    ),
    bench("growth", "--turns 1000 --rounds 1", tables=("| page | 1,000 turns |",)),
    bench(
        "waiting",
        "--samples 200 --databases sqlite --out {out}/waiting.jsonl",
        prints=(r'"look": "second"',),
        writes=("waiting.jsonl",),
    ),
    bench(
        "long-acts",
        "--databases sqlite --acts nothing import --seconds 1 --rows 2000 --out {out}/long_acts.jsonl",
        tables=("| database | act | seconds |",),
        writes=("long_acts.jsonl",),
    ),
    bench("scaling", "--turns 1000 --rounds 1", tables=("| old turns | curate, ms per batch |",)),
    bench(
        "poisoning",
        "--attacks nobody --protections on --updates 1 --evaluation-users 4 --out {out}/poisoning.jsonl",
        tables=("| attack | protections |",),
        writes=("poisoning.jsonl",),
    ),
    bench(
        "noisy-raters",
        "--algorithms KTO --noise coin-raters --seeds 41 --updates 1 --out {out}/noisy_raters.jsonl",
        tables=("| algorithm | raters | updates |",),
        writes=("noisy_raters.jsonl",),
    ),
    bench(
        "environments",
        "--databases sqlite --turns 2 --attempts 4 --group 2 --seconds 0.5",
        tables=("| what | turns per second |",),
    ),
    bench(
        "games",
        "--updates 1 --every 1 --games 8 --evaluation 16 --pretraining 50 --out {out}/games.jsonl",
        tables=("| game | credit |",),
        writes=("games.jsonl",),
    ),
    bench("sandboxes", "--seconds 0.5", tables=("| sandbox | one at a time, per second |",)),
    bench("rater-weights", "--crowds 1", tables=("| approval | who says nothing |",)),
    bench(
        "reward-model",
        "--labels 60 --train-prompts 150 --evaluation-prompts 48 --out {out}/reward-model",
        tables=("| feedback | held out: accuracy |",),
    ),
    bench(
        "canary",
        "--cases better --seeds 0 --max-updates 1 --patience 15 --people 4 --out {out}/canary.jsonl",
        tables=("| version | seed |",),
        writes=("canary.jsonl",),
    ),
    Target("model", "ATTUNE_MODEL_FLAGS", "--dialogues 200 --no-measure --out {out}/model", prints=(r"^trained in ",)),
    Target(
        "demo", "ATTUNE_DEMO_FLAGS", "--once --updates 1", prints=(r"^ *versions *$", r"^ *figures *$", "approval, v0")
    ),
    bench(
        "overlap",
        "--rows 1 --updates 3 --runs 1 --out {out}/overlap.jsonl",
        tables=("| max_staleness | runs |",),
        writes=("overlap.jsonl",),
    ),
    bench(
        "votes",
        "--set ATTUNE_TRAINER__BATCH_SIZE=16 --max-votes 40 --max-minutes 2 --out {out}/votes.jsonl",
        tables=("| model | judged |",),
        writes=("votes.jsonl",),
    ),
    bench(
        "policies",
        "--updates 1 --replies 5 --out {out}/policies.jsonl",
        tables=("| seed | policy | algorithm |",),
        writes=("policies.jsonl",),
    ),
    bench("intake", "--votes 60 --outage 1 --databases sqlite", tables=("| route | database |",)),
    bench("delivery", "--updates 1 --kl-targets 0.01", tables=("| KL target | updates |",)),
    bench("swap", "--publications 2 --moves 2 --peer 1 --people 1 --quiet 0", tables=("| milliseconds | p50 |",)),
    bench("swap-full", "--publications 1 --moves 1 --peer 0 --people 1 --quiet 0", tables=("| milliseconds | p50 |",)),
    Target(
        "faults",
        "ATTUNE_FAULTS_FLAGS",
        "--parts kills --where embedded --kinds worker --kills 1 --seconds 20 --results {out}/faults.jsonl",
        prints=(r"^where +process +kills ", r"^embedded +worker "),
        writes=("faults.jsonl",),
    ),
    Target(
        "fuzz",
        "ATTUNE_FUZZ_FLAGS",
        "--cases 500 --parts bodies --out {out}/fuzz.jsonl",
        tables=("| route | cases |",),
        writes=("fuzz.jsonl",),
    ),
)


def has_table(output: str, header: str) -> bool:
    """Return whether a Markdown table that begins like this is printed, with rows as wide as its head."""
    lines = iter(output.replace(r"\|", "").splitlines())
    for line in lines:
        if line.startswith(header):
            rows = list(takewhile(lambda row: row.startswith("|"), lines))[1:]  # the first one is the rule
            return bool(rows) and all(row.count("|") == line.count("|") for row in rows)
    return False


def find_failure(target: Target, status: int, output: str, out: Path) -> str | None:
    """Return why a target did not do what it should; None if it did."""
    if status != 0:
        return f"failed: exit status {status}"
    for pattern in target.prints:
        if not re.search(pattern, output, re.MULTILINE):
            return f"failed: it printed nothing like {pattern!r}"
    for header in target.tables:
        if not has_table(output, header):
            return f"failed: it printed no table {header!r} with rows of that many columns"
    for name in target.writes:
        path = out / name
        if not (path.is_file() and path.stat().st_size):
            return f"failed: it wrote no {name}"
    return None


def run_target(target: Target) -> Result:
    """Run a target and print how it ended, with the end of its output if it failed."""
    print(f"smoke: make {target.name} {target.options}".rstrip(), flush=True)
    started = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{target.name}.log"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with log.open("w") as file:
            done = subprocess.run(target.command(out), cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT)
        output = log.read_text(errors="replace")
        failure = find_failure(target, done.returncode, output, out)
    result = Result(target.name, round((time.monotonic() - started) / 60, 1), failure)
    if failure is not None:
        print("\n".join(output.splitlines()[-LOG_LINES:]))
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
