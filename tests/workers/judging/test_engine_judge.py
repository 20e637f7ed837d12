"""The real SGLang as the judge's endpoint: the wire, not the judgement, of which so small a model has none."""

import pytest
from pydantic import SecretStr

from app.models import JudgementState
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.judgements import judged, listening


@pytest.mark.engine
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_engine_answers_by_the_schema(harness: Harness, engine: RunningEngine) -> None:
    await harness.turn()
    source = {
        "type": "judge",
        "url": engine.spec.url,
        "model": "base",
        "key": "engine",
        "rubric": "Is it kind?",
        "max_tokens": 64,
        "timeout_seconds": 120,
    }
    settings = listening(harness, source, secrets={"engine": SecretStr(engine.spec.api_key)}, lease_seconds=20.0)
    [judgement] = await judged(harness, settings)
    assert judgement.state == JudgementState.DONE, judgement.reason
    assert judgement.value in (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert judgement.details["asks"] <= 2, "the schema was taken, with a reason or (it rambles) for the grade alone"
    assert judgement.details["tokens"] > 0
