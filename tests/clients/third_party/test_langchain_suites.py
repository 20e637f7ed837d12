"""LangChain's conformance suites (`langchain-tests`) for ChatOpenAI and ChatAttune, on the demo model and on SmolLM2.

`langchain_tests/reasons.py` has the tests that fail on each model, and why; docs/clients.md lists them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.pretrained import CONFIG, FOLDER
from tests.clients.conftest import Running, run_attune
from tests.clients.third_party.environments import REPOSITORY, run_pytest
from tests.support.engine_fixture import engine_spec, require_engine_environment, run_engine

CLASSES = [f"{name} and not Unit" for name in ("TestChatOpenAI", "TestChatAttune")]
SMOLLM2 = REPOSITORY / FOLDER


def run_suite(name: str, base_url: str, api_key: str, *more: str, seconds: float = 1500) -> None:
    """Assert that each test of the class passes, or fails as reasons.py says."""
    options = ["-p", "reasons", "-k", name, "--tb=short", "-q", "-o", "asyncio_default_test_loop_scope=session"]
    options += ["-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_mode=auto", "--benchmark-disable"]
    done = run_pytest("langchain_tests", [*options, *more], base_url, api_key, seconds)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # installing the environment is part of it
@pytest.mark.parametrize("name", CLASSES)
def test_suite_on_the_demo_model(name: str, attune: Running) -> None:
    run_suite(name, attune.base_url, attune.key, "--failures-of=demo")


@pytest.fixture(scope="module")
def smollm2(blank_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a running Attune that serves SmolLM2-135M-Instruct."""
    if not (SMOLLM2 / CONFIG).exists():
        pytest.skip("no SmolLM2-135M-Instruct: `make smollm2` downloads it (93 MB) and needs 0.5 GB")
    require_engine_environment()
    home = tmp_path_factory.mktemp("smollm2")
    with run_engine(engine_spec(home, SMOLLM2)) as engine, run_attune(home, blank_sqlite, engine) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(4800)  # ten minutes for both classes at once on two cores at a load of 12
@pytest.mark.parametrize("name", CLASSES)
def test_suite_on_smollm2(name: str, smollm2: Running) -> None:
    run_suite(name, smollm2.base_url, smollm2.key, "--failures-of=smollm2", seconds=4000)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_unit_suite() -> None:
    run_suite("Unit", "http://127.0.0.1:9/v1", "sk-attune-x")
