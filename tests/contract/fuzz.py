"""Fuzz every route of an application in this process: `make fuzz`. Resumes where it stopped.

Three parts take turns: cases of each operation, valid and invalid ones, that schemathesis generates from the OpenAPI
document (`operations`); chains of operations in which a response has the ids of the next request (`stateful`); and
damaged bodies (`bodies`). A chunk of cases has a seed and a new deployment, so that it can be repeated alone:

    python -m tests.contract.fuzz --only operations:17
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition, InvalidArgument, Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok

from app.core.migrate import upgrade
from app.core.settings import Settings
from tests.benchmarks.results import append_row, read_rows
from tests.contract.harness import UNLIMITED, ContractHarness, contract_harness, requests_sent_to
from tests.contract.openapi_checks import EXCLUDED_CHECKS, call_and_validate, prepare, schema
from tests.contract.test_hostile_bodies import ROUTES, TYPES, bodies_of, check_body

OUT = Path(".attune/fuzz.jsonl")
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # half of the time is spent on fsync otherwise
PARTS = ("operations", "bodies", "stateful")
EXAMPLES = {"operations": 6, "bodies": 25, "stateful": 5}  # of each way to call a route, and chains of a run
CHAIN_STEPS, CHAIN_RUNS = 12, 12
MAX_MESSAGE = 3000
Check = Callable[[], None]


def chunk_settings(part: str) -> settings:
    return settings(
        max_examples=EXAMPLES[part],
        stateful_step_count=CHAIN_STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )


def operation_checks(harness: ContractHarness, number: int) -> Iterator[tuple[str, Check]]:
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        for mode in GenerationMode:

            @chunk_settings("operations")
            @seed(number)
            @given(case=operation.as_strategy(mode))
            def check(case: Any) -> None:
                call_and_validate(case, harness)

            yield f"{operation.label} {mode.value}", check


def body_checks(harness: ContractHarness, number: int) -> Iterator[tuple[str, Check]]:
    for method, path in ROUTES:
        with_inputs = given(body=bodies_of(method, path), kind=st.sampled_from(TYPES))
        send = partial(check_body, harness, method, path)
        yield f"{method} {path}", chunk_settings("bodies")(seed(number)(with_inputs(body_check(send))))


def body_check(send: Callable[[bytes, str], None]) -> Callable[..., None]:
    def check(body: bytes, kind: str) -> None:
        send(body, kind)

    return check


@cache
def state_machine() -> Any:
    return schema.as_state_machine()


def chain_checks(harness: ContractHarness, number: int) -> Iterator[tuple[str, Check]]:
    """Yield short runs of the state machine, and then a check that raises the failures of all their responses.

    What a chain can do next depends on random ids of earlier responses. So a chain can neither be repeated nor made
    smaller, and Hypothesis may end a run because it cannot repeat a choice.
    """
    found: dict[str, BaseException] = {}

    class Chain(state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return prepare(case, harness, known_names=False)

        def validate_response(self, response: Any, case: Any, *args: Any, **kwargs: Any) -> None:
            try:
                case.validate_response(response, excluded_checks=EXCLUDED_CHECKS, transport_kwargs=kwargs or None)
            except (Exception, FailureGroup) as error:
                found.setdefault(case.operation.label, error)

    def run(run_number: int) -> None:
        with suppress(FlakyStrategyDefinition):
            run_state_machine_as_test(seed(run_number)(Chain), settings=chunk_settings("stateful"))

    for run_number in range(number * CHAIN_RUNS, (number + 1) * CHAIN_RUNS):
        yield f"chains {run_number}", partial(run, run_number)
    for name, error in found.items():
        yield name, partial(raise_error, error)


def raise_error(error: BaseException) -> None:
    raise error


CHECKS = {"operations": operation_checks, "bodies": body_checks, "stateful": chain_checks}


def run_chunk(part: str, number: int, blank: Path) -> dict[str, Any]:
    """Run one chunk on a new deployment. Return what it found, with the failures in their smallest form."""
    began, failures = time.monotonic(), []
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        copy(blank, Path(folder) / "attune.db")
        with (
            contract_harness(Settings(home=Path(folder), policy="shop", limits=UNLIMITED)) as harness,
            requests_sent_to(harness),
        ):
            for name, check in CHECKS[part](harness, number):
                try:
                    check()
                except Unsatisfiable:  # a route without parameters has no invalid requests
                    continue
                except InvalidArgument:  # a fault of this module
                    raise
                except (Exception, FailureGroup) as error:
                    failures.append({"check": name, "message": describe(error)[:MAX_MESSAGE]})
            return {
                "part": part,
                "seed": number,
                "cases": harness.statuses.total(),
                "seconds": round(time.monotonic() - began, 1),
                "statuses": dict(harness.statuses),
                "routes": dict(harness.routes),
                "failures": failures,
            }


def describe(error: BaseException) -> str:
    """Return the message of an error with its causes."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(describe(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000, help="stop when all runs together have so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", metavar="PART:SEED", help="run this chunk again, and record nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        blank = Path(folder) / "blank.db"
        upgrade(f"sqlite+aiosqlite:///{blank}")
        if arguments.only:
            part, _, number = arguments.only.partition(":")
            row = run_chunk(part, int(number), blank)
            print_failures([row])
            sys.exit(1 if row["failures"] else 0)
        rows = read_rows(arguments.out)
        while (count := sum(row["cases"] for row in rows)) < arguments.cases:
            part = min(arguments.parts, key=lambda each: sum(row["cases"] for row in rows if row["part"] == each))
            number = 1 + max((row["seed"] for row in rows if row["part"] == part), default=0)
            rows.append(run_chunk(part, number, blank))
            append_row(arguments.out, rows[-1])
            print(
                f"fuzz: {part}:{number}, {count + rows[-1]['cases']:,} cases, {len(rows[-1]['failures'])} failures",
                flush=True,
            )
    print_report(rows)
    sys.exit(1 if any(row["failures"] for row in rows) else 0)


def print_failures(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for failure in row["failures"]:
            print(f"\n{row['part']}:{row['seed']} {failure['check']}\n{failure['message']}")


def print_report(rows: list[dict[str, Any]]) -> None:
    statuses, routes = Counter[str](), Counter[str]()
    for row in rows:
        statuses.update(row["statuses"])
        routes.update(row["routes"])
    cases, seconds = sum(row["cases"] for row in rows), sum(row["seconds"] for row in rows)
    print_failures(rows)
    print("\n| route | cases | 2xx |\n| --- | ---: | ---: |")
    for name in sorted({key.rpartition(" ")[0] for key in routes}):
        count = sum(value for key, value in routes.items() if key.rpartition(" ")[0] == name)
        print(f"| {name} | {count:,} | {routes[f'{name} 2xx']:,} |")
    failures = sum(len(row["failures"]) for row in rows)
    print(f"\n{cases:,} cases in {len(rows)} chunks, {cases / max(seconds, 1):.0f} a second: {dict(statuses)}")
    print(f"{failures} failures")


if __name__ == "__main__":
    main()
