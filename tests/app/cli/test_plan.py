"""`attune plan`: from a config.json alone, as text and as JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alignment.models.describe import describe_folder
from app.cli import plan
from app.cli.main import app
from tests.alignment.planning.test_memory import write_config


@pytest.fixture(autouse=True)
def described_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "describe_by_program", describe_folder)


def test_plan_is_printed_with_memory_time_and_reasons(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama-8b") / "config.json"
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--gpus", "2", "--rank", "16"])
    assert result.exit_code == 0, result.output
    for text in (
        "LlamaForCausalLM: 8.03 B parameters; adapters of rank 16",
        "2 × H100-80",
        "trainer: 1 GPU(s)",
        "why:",
    ):
        assert text in result.output
    assert "GiB  with fragmentation and CUDA, on each GPU" in result.output
    assert "an update takes about" in result.output and "a version is delivered in about" in result.output


def test_plan_as_json(tmp_path: Path) -> None:
    write_config(tmp_path, "llama-70b")
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "8", "--context", "8192", "--json"]
    fields = json.loads(CliRunner().invoke(app, arguments).output)
    assert fields["gpus"] == 8 and fields["context"] == 8192 and fields["problems"]
    assert fields["trainer"]["gpus"] + fields["engine"]["tp"] == 8


def test_what_does_not_fit_is_an_exit_status_and_a_sentence(tmp_path: Path) -> None:
    write_config(tmp_path, "llama-70b")
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpus", "1"])
    assert result.exit_code == 1
    assert "what to change:" in result.output and "the engine needs" in result.output


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path)])
    assert isinstance(result.exception, ValueError) and "config.json" in str(result.exception)
