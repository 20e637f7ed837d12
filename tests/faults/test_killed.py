"""kill -9: acknowledged feedback is kept, and nothing is used twice."""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import func, select

from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Sample as TrainerSample
from app.core.settings import DEMO_MODEL
from app.models import Batch, BatchState, Feedback, Reward, Sample, SampleState, Turn, TurnState, Version
from tests.support.deployment import Harness
from tests.support.held_updates import UpdateHold
from tests.support.processes import PATIENCE_SECONDS, processes, until
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate
from workers.reconcile import reconcile
from workers.training.assemble import assemble

SAMPLES = 24
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the default, with the embedded broker


async def create_turns(harness: Harness, count: int) -> list[str]:
    """Create rated turns with the model's log-probs, and return their ids."""
    rng = random.Random(7)

    def random_ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(300, 900) for _ in range(length))

    samples = [
        TrainerSample(f"sample-{n}", random_ids(20), random_ids(40), (0.0,) * 40, reward=0.0, version=0)
        for n in range(count)
    ]
    ids = []
    for number, logprobs in enumerate(recompute_logprobs(DEMO_MODEL, None, samples)):
        turn = await harness.turn(
            own_prompt_ids=list(samples[number].prompt_ids),
            output_ids=list(samples[number].output_ids),
            logprobs=logprobs.tolist(),
            sampling={"temperature": 1.0},
        )
        ids.append(turn.id)
        answer = await harness.vote(turn.id, "up" if number % 2 else "down", id=f"thumb-{number}")
        assert answer.status_code == 201
    return ids


@pytest.mark.slow
async def test_trainer_killed_during_an_update_loses_nothing_and_repeats_nothing(
    harness: Harness, tmp_path: Path
) -> None:
    hold = UpdateHold(tmp_path)
    settings = hold.settings(harness.settings).replace(
        {
            "trainer.batch_size": SAMPLES,
            "trainer.max_batch_size": SAMPLES,
            "workers.lease_seconds": 3.0,
            "workers.reconcile_seconds": 0.5,
        }
    )
    turns = await create_turns(harness, SAMPLES)
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, settings) == 1

    async def read_batch() -> Batch:
        return (await harness.all(Batch))[0]

    async def is_trained() -> bool:
        return (await read_batch()).state == BatchState.TRAINED

    with processes(settings) as running:
        running.start("beat", "trainer")
        [rank] = await hold.wait()
        owner = (await read_batch()).lease_owner
        assert owner is not None and owner.endswith(f":{rank}")
        os.kill(rank, signal.SIGKILL)
        hold.open()
        running.start("worker")
        await until(is_trained, PATIENCE_SECONDS, "the batch is trained after the kill")

    trained_batch = await read_batch()
    versions = [version for version in await harness.all(Version) if version.number > 0]
    assert trained_batch.attempt == 2
    assert [version.batch_id for version in versions] == [trained_batch.id], "one batch, one version"
    samples = await harness.all(Sample)
    assert Counter(sample.turn_id for sample in samples) == Counter(turns)
    assert {(sample.state, sample.batch_id) for sample in samples} == {(SampleState.TRAINED, trained_batch.id)}
    assert {row.idempotency_key for row in await harness.all(Feedback)} == {f"thumb-{n}" for n in range(SAMPLES)}


async def test_api_killed_during_a_reply_keeps_acknowledged_feedback(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    headers = {"authorization": f"Bearer {harness.key}"}
    chat: dict[str, Any] = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 600}

    with processes(harness.settings) as running:
        running.start("api")
        async with httpx2.AsyncClient(base_url=running.settings.local_url, headers=headers, timeout=60) as client:
            done = (await client.post("/v1/chat/completions", json=chat)).json()["id"]
            assert (await client.post("/v1/feedback", json=like(done, "one"))).status_code == 201
            scripted.reply_text, scripted.seconds_per_token = "word " * 500, 0.02
            with pytest.raises(httpx2.TransportError):
                async with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as reply:
                    cut = reply.headers["x-completion-id"]
                    assert (await client.post("/v1/feedback", json=like(cut, "two"))).status_code == 201
                    running.kill("api")
                    async for _ in reply.aiter_bytes():
                        pass
            running.start("api")
            again = await client.post("/v1/feedback", json=like(cut, "two"))
            assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")

    assert {row.idempotency_key for row in await harness.all(Feedback)} == {"one", "two"}
    assert (await harness.get(Turn, cut)).state == TurnState.OPEN

    async def is_aborted() -> bool:
        await reconcile(harness.db, harness.settings.replace({"server.chat_timeout_seconds": 0.5}))
        return (await harness.get(Turn, cut)).state == TurnState.ABORTED

    await until(is_aborted, PATIENCE_SECONDS, "the reconciler has closed the open turn")
    await curate(harness.db, harness.settings)
    await curate(harness.db, harness.settings)
    assert {(sample.turn_id, sample.state) for sample in await harness.all(Sample)} == {
        (done, SampleState.OPEN),
        (cut, SampleState.DROPPED),
    }
    async with harness.db.read() as session:
        assert await session.scalar(select(func.count()).select_from(Reward)) == 2


def like(completion_id: str, key: str) -> dict[str, Any]:
    return {"id": key, "completion_id": completion_id, "kind": "binary", "value": True}
