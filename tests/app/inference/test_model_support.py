"""Models that SGLang computes wrongly without saying so are refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.core.settings import Settings
from app.inference.model_support import unsupported_reason
from app.ops.start_checks import check_base_model
from workers.engine.specs import engine_spec

MISTRAL_V01 = {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
PHI3_4K = {"model_type": "phi3", "sliding_window": 2047, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "context_length", "is_refused"),
    [
        (MISTRAL_V01, None, True),
        (MISTRAL_V01, 8192, True),
        (MISTRAL_V01, 4096, False),
        (MISTRAL_V01 | {"sliding_window": None}, None, False),  # v0.2 and later
        (PHI3_4K, None, True),
        (PHI3_4K, 2047, False),
        ({"model_type": "cohere2", "sliding_window": 4096, "max_position_embeddings": 132096}, None, True),
        ({"model_type": "gemma3_text", "sliding_window": 512, "max_position_embeddings": 32768}, None, False),
        ({"model_type": "llama", "max_position_embeddings": 131072}, None, False),
        ({}, None, False),
    ],
)
def test_windows_that_the_engine_gets_wrong(
    config: dict[str, Any], context_length: int | None, is_refused: bool
) -> None:
    assert (unsupported_reason(config, context_length) is not None) == is_refused


def test_attune_up_and_the_engine_refuse_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_V01))
    settings = Settings(home=tmp_path / "home", model=str(tmp_path))
    for start in (check_base_model, engine_spec):
        with pytest.raises(ValueError, match=r"is refused: .* Set ATTUNE_ENGINE__CONTEXT_LENGTH=4096"):
            start(settings)
    check_base_model(settings.replace({"engine.context_length": 4096}))
    check_base_model(Settings(home=tmp_path / "home", model="mistralai/Mistral-7B-v0.1"))  # not downloaded yet
