"""A fixture of one real vLLM for a whole test run, `vllm_engine`. Without its environment the tests are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adapters import adapter_spec
from tests.support.engine_fixture import DEMO_MODEL, REPOSITORY, RunningEngine, free_port, run_engine
from workers.engine.vllm_spec import VLLMSpec

PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"


def require_vllm_environment() -> None:
    """Skip the test where vLLM is not installed, or the demo model is not built: the tiny one's heads are too small."""
    if not PYTHON.exists():
        pytest.skip(f"vLLM's environment is not installed (make setup-vllm): {PYTHON} is missing")
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.skip("the demo model is not built")


def vllm_spec(folder: Path, model: Path) -> VLLMSpec:
    return VLLMSpec(
        python=PYTHON,
        model=str(model),
        api_key="test-key",
        admin_key="-test-admin-key",  # a generated key may begin with a dash
        log_path=folder / "engine.log",
        port=free_port(),
        device="cpu",
        context_length=2048,
        tool_call_parser="hermes",
        adapter=adapter_spec(model),
    )


@pytest.fixture(scope="session")
def vllm_engine(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    require_vllm_environment()
    with run_engine(vllm_spec(tmp_path_factory.mktemp("vllm"), engine_model)) as running:
        yield running
