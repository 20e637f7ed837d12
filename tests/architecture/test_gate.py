"""The gate runs once more what failed, and calls flaky what then passes; groups of tests share one process."""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from tests import check_all, gate
from tests.smoke import SMOKE, Result, Target, find_failure
from tests.support.scheduling import GROUPS

FLAKY = """
from pathlib import Path

def test_that_fails_the_first_time():
    marker = Path(__file__).with_name("ran")
    first = not marker.exists()
    marker.touch()
    assert not first, "the first time"
"""
DEFECT = "def test_that_fails_always():\n    assert 1 == 2\n"
GOOD = "def test_that_passes():\n    pass\n"


OPTIONS = ("-ra", "--import-mode=importlib", "-p", "xdist")


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time that pytest takes to start is that of plugins which these tests do not need."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def run_gate(folder: Path, **sources: str) -> int:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    run = [sys.executable, "-m", "pytest", *OPTIONS]
    return gate.run_twice([*run, "-n", "2"], [*run, "--last-failed", "--last-failed-no-failures", "none"], folder)


def test_what_fails_once_is_listed_as_flaky(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gate(tmp_path, flaky=FLAKY, good=GOOD) == 0
    last = capsys.readouterr().out.partition("flaky, 1:")[2]
    assert "test_flaky.py::test_that_fails_the_first_time" in last and "AssertionError" in last


def test_what_fails_twice_fails_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gate(tmp_path, flaky=FLAKY, defect=DEFECT, good=GOOD) == 1
    last = capsys.readouterr().out.partition("flaky, 1:")[2]
    assert "test_flaky.py" in last and "test_defect.py" not in last


def test_module_that_cannot_be_imported_fails_the_gate(tmp_path: Path) -> None:
    assert run_gate(tmp_path, broken="import no_such_module\n", good=GOOD) != 0


def test_everything_passes(tmp_path: Path) -> None:
    assert run_gate(tmp_path, good=GOOD) == 0


@pytest.mark.parametrize("level", ["", "1"], ids=["make", "make in make"])
def test_status_is_that_of_pytest_below_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Only exit status 1 means that all tests ran and some failed; make's own exit status is always 2."""
    monkeypatch.setenv("MAKELEVEL", level)
    for status in (1, 3):
        (tmp_path / "Makefile").write_text(f"test:\n\t@exit {status}\n")
        assert gate.run(["make", "test"], tmp_path) == (status, {})


def test_groups_run_on_one_process(tmp_path: Path) -> None:
    places = [*GROUPS["engine"][:3], "tests/clients/typescript/test_browser.py", "tests/app/test_main.py"]
    for place in places:
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "import os\nimport time\nfrom pathlib import Path\nimport pytest\n"
            "@pytest.mark.parametrize('number', range(6))\n"
            "def test_place(number):\n"
            "    time.sleep(0.01)\n"
            f"    with Path({str(tmp_path / 'ran')!r}).open('a') as file:\n"
            f"        file.write({place!r} + ' ' + os.environ['PYTEST_XDIST_WORKER'] + '\\n')\n"
        )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = [sys.executable, "-m", "pytest", *OPTIONS, "-n", "2", "-p", "tests.support.scheduling"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) == 6 * len(places)
    assert len({worker for place, worker in ran if place in GROUPS["engine"]}) == 1
    assert len({worker for place, worker in ran}) == 2


def test_smoke_says_what_a_target_lacks(tmp_path: Path) -> None:
    target = Target("bench-x", prints=(r"^version ",), writes=("x.jsonl",))
    assert find_failure(target, 2, "version 1\n", tmp_path) == "failed: exit status 2"
    assert "printed nothing like" in (find_failure(target, 0, "no version\n", tmp_path) or "")
    assert find_failure(target, 0, "a\nversion 1\n", tmp_path) == "failed: it wrote no x.jsonl"
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert find_failure(target, 0, "a\nversion 1\n", tmp_path) is None


def test_smoke_asks_for_tables_with_rows(tmp_path: Path) -> None:
    target = Target("bench-x", tables=("| seed | votes |",))
    head = "| seed | votes | max \\|Δ\\| |\n|---|---|---|\n"
    assert find_failure(target, 0, f"text\n{head}| 1 | 2 | 3 |\n\nmore\n", tmp_path) is None
    for output in (
        "",
        head,
        f"{head}\n| 1 | 2 | 3 |\n",
        f"{head}| 1 | 2 | 3 |\n| 1 | 2 |\n",
        "| seed | 1 | 2 |\n|---|\n| 1 |\n",
    ):
        assert "no table" in (find_failure(target, 0, output, tmp_path) or "")


def test_smoke_runs_every_long_target_of_the_makefile() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    [phony] = [line for line in makefile.splitlines() if line.startswith(".PHONY:")]
    begun_by_people = {"setup", "setup-vllm", "lock", "audit", "clean", "smollm2", "lint", "bench-openwebui"}
    tests = {"test", "test-slow", "test-openwebui", "test-all", "smoke", "check-all"}
    assert {*phony.split()[1:]} - begun_by_people - tests == {target.name for target in SMOKE}


def test_check_all_resumes_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_all, "RESULTS", tmp_path / "check-all.json")
    results = [Result("docs", 0.5, None), Result("fuzz", 1.0, "failed: exit status 2")]
    check_all.write_results("abc", results)
    assert check_all.read_results("abc") == results
    assert check_all.read_results("def") == []


def test_processes_with_different_tests_fail_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pytest-xdist then runs no test at all, so that there is nothing to run once more."""
    source = "import os\nimport pytest\n@pytest.mark.parametrize('id', [os.getpid()])\ndef test_x(id):\n    pass\n"
    assert run_gate(tmp_path, differing=source, good=GOOD) == 1
    assert "once more" not in capsys.readouterr().out


def benchmarks() -> Iterator[tuple[str, str]]:
    """Yield the module of each benchmark that has options of `make smoke`, and what `make` passes to it."""
    of_target = re.compile(r"^(bench-[\w-]+):.*\n(?:\t.*\n)*?\t.*-m (tests\.benchmarks\.\w+) (.*)", re.MULTILINE)
    modules = {name: (module, rest) for name, module, rest in of_target.findall((REPOSITORY / "Makefile").read_text())}
    for target in SMOKE:
        if target.name in modules and target.name != "bench-trainer":  # it needs the peers' environment
            module, rest = modules[target.name]
            yield module, rest.replace("$(ATTUNE_BENCH_FLAGS)", target.options.format(out="/nowhere"))


SWAP = "tests.benchmarks.swap"


@pytest.mark.parametrize(("module", "options"), [*benchmarks(), (SWAP, "--engine sglang vllm --in-turn 2")])
def test_benchmarks_know_the_options_of_smoke(module: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(options), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0, "an option is refused before the help is printed"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--engine vllm --adaptation full", "vLLM serves adapters only"),
        ("--engine sglang vllm --adapter-delivery memory", "vLLM takes adapters by path only"),
        ("--engine sglang vllm --replicas 1", "raise --replicas"),
        ("--engine vllm vllm", "names a kind twice"),
        ("--engine vllm --in-turn 2", "needs two kinds"),
        ("--engine sglang vllm --in-turn 3 --publications 2", "a publication for each fleet"),
        ("--engine trl", "invalid choice: 'trl'"),
    ],
)
def test_swaps_are_refused_before_anything_starts(
    options: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SWAP, *shlex.split(options)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(SWAP, run_name="__main__")
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
