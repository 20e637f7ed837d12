"""Rollouts on the real engine: group samples of a chat become a GRPO group, a prompt set becomes a version."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from sqlalchemy import select

from alignment.config.policy_gradient_algorithms import GRPOConfig
from alignment.config.rewards import RewardsConfig
from alignment.config.rollouts import RolloutsConfig
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import DEMO_MODEL, Settings
from app.main import create_app
from app.models import Origin, Rollout, RolloutPlan, RolloutState, Sample, SampleState, Turn, Version
from demo.dialogues import HELD_OUT, SYSTEM, SimulatedUser
from tests.journeys.deployments import create_deployment, engine_keys
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.judgements import ScriptedEndpoint, grade_response
from workers.context import WorkerContext
from workers.curate import curate
from workers.judging.judge import judge
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.rollouts.sampler import sample_rollouts
from workers.training import batch_claims
from workers.training.assemble import assemble
from workers.training.loop import TrainingLoop
from workers.training.ranks import RankGroup
from workers.training.trackers import Trackers

pytestmark = [pytest.mark.engine, pytest.mark.journey]
QUESTION = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When do you open on Saturday?"}]
EXTRA_REPLIES = 3


@pytest.fixture
async def journey(tmp_path: Path, engine: RunningEngine) -> AsyncIterator[Harness]:
    settings = Settings(
        home=tmp_path / "home",
        policy="shop",
        model=str(DEMO_MODEL),
        trainer={"batch_size": 16, "max_wait_seconds": 0.0, "optim": {"lr": 2e-3}, "kl_guard": 1.0},
        algorithm=GRPOConfig(),
        raters={"max_cluster_share": 1.0},
        rollouts=RolloutsConfig.model_validate(
            {"group_sampling": {"extra_replies": EXTRA_REPLIES}, "in_flight": 8, "max_plan_share": 1.0}
        ),
        **engine_keys(engine),
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database_url)
    db = Database(settings.database_url)
    harness = await create_deployment(engine, settings, db)
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://attune",
            headers={"authorization": f"Bearer {harness.key}"},
            timeout=120,
        ) as api,
    ):
        harness._api = api
        yield harness
    await db.close()


def grade_in_turn() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a judge that gives the grades 1 to 4 in turn, so that the rewards of four replies differ.

    A group is compared by what all of its replies have, here by the judge alone, and equal rewards teach nothing.
    """
    grades = cycle(range(1, 5))
    return lambda body: grade_response(next(grades))


async def test_group_samples_of_a_chat_become_a_grpo_group(journey: Harness) -> None:
    with ScriptedEndpoint(grade_in_turn()).serve() as url:
        judges = {"sources": [{"type": "explicit"}, {"type": "judge", "url": url, "model": "judge-model"}]}
        settings = journey.settings.replace(
            {"rewards": RewardsConfig.model_validate(judges), "trainer.batch_size": 4, "trainer.max_batch_size": 4}
        )
        body = {"model": "shop", "messages": QUESTION, "max_tokens": 48, "temperature": 1.2}
        answer = await journey.api.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        id = answer.json()["id"]
        assert (await journey.vote(id)).status_code == 201
        await curate(journey.db, settings)
        assert await sample_rollouts(journey.db, settings, "me") == EXTRA_REPLIES
        await curate(journey.db, settings)
        await judge(journey.db, settings, "me")
    chat_turn = await journey.get(Turn, id)
    async with journey.db.read() as session:
        is_group_sample = Turn.origin == Origin.GROUP_SAMPLE
        group_samples = list(
            await session.scalars(select(Turn).where(is_group_sample).order_by(Turn.choice_index, Turn.id))
        )
    assert len(group_samples) == EXTRA_REPLIES and {turn.exclusion_reason for turn in group_samples} == {None}
    prompts = [await journey.prompt_ids(turn.id) for turn in [chat_turn, *group_samples]]
    assert all(ids == prompts[0] for ids in prompts), "the prompt tokens are identical"
    assert len({tuple(turn.output_ids) for turn in [chat_turn, *group_samples]}) > 1, "the replies differ"
    assert all(len(turn.logprobs or ()) == len(turn.output_ids or ()) > 0 for turn in group_samples)
    assert await assemble(journey.db, settings) == 1
    claimed = await batch_claims.claim(journey.db, "me", settings)
    assert claimed is not None and {sample.group for sample in claimed.batch.samples} == {id}
    assert (
        len(claimed.batch.samples) == EXTRA_REPLIES + 1
        and len({sample.prompt_ids for sample in claimed.batch.samples}) == 1
    )
    assert len({sample.reward for sample in claimed.batch.samples}) > 1


def build_questions(count: int) -> bytes:
    """Return a Parquet file with the first question of simulated users, and the fact that answers it."""
    questions = [next(SimulatedUser(HELD_OUT + number).questions()) for number in range(count)]
    prompts = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}] for question in questions
    ]
    file = BytesIO()
    pq.write_table(pa.table({"prompt": prompts, "reference": [question.facts[0] for question in questions]}), file)
    return file.getvalue()


async def test_a_prompt_set_with_a_verifier_is_sampled_and_trained_on(journey: Harness) -> None:
    upload = await journey.api.post(
        "/v1/datasets", params={"name": "questions", "kind": "prompts"}, content=build_questions(8)
    )
    assert upload.status_code == 201, upload.text
    body = {
        "dataset": "questions",
        "verifier": {"type": "contains"},
        "n": 4,
        "temperature": 1.0,
        "max_tokens": 64,
    }
    created = await journey.api.post("/v1/policies/shop/rollouts/plans", json=body)
    assert created.status_code == 201, created.text
    settings = journey.settings
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.get_running_loop()
        group = await loop.run_in_executor(thread, RankGroup, settings)
        context = WorkerContext(settings)
        try:
            async with asyncio.timeout(300):
                while (await read_plan(journey)).state == "running":
                    await sample_rollouts(journey.db, settings, "me")
                    await assemble(journey.db, settings)
                    training_loop = TrainingLoop(group, context, Trackers(settings))
                    await loop.run_in_executor(thread, training_loop.run_pending_work)
                    await evaluate(journey.db, settings, "me")
                    await publish(journey.db, settings)
        finally:
            thread.submit(lambda: context.run(context.db.close())).result()
    plan = await read_plan(journey)
    assert (plan.state, plan.reason, plan.pass_number) == ("done", None, 1)
    rollouts = await journey.all(Rollout)
    assert len(rollouts) == 32 and {row.state for row in rollouts} == {RolloutState.DONE}
    assert len({row.reward for row in rollouts}) == 2, "some replies are correct and some are not"
    trained = [sample for sample in await journey.all(Sample) if sample.state == SampleState.TRAINED]
    versions = await journey.all(Version)
    assert len(trained) >= 16 and max(version.number for version in versions) >= 1
    turns = {turn.id: turn for turn in await journey.all(Turn)}
    groups = {turns[sample.turn_id].completion_id for sample in trained}
    assert len(groups) == len(trained) / 4, "every group is complete"
    lineage = (await journey.api.get("/v1/policies/shop/versions/1/lineage")).json()["data"]
    assert {entry["origin"] for entry in lineage} == {"prompt_set"}
    assert len({turn.version_id for turn in turns.values()}) >= 2, "later prompts are sampled from a later version"


async def read_plan(harness: Harness) -> RolloutPlan:
    [row] = await harness.all(RolloutPlan)
    assert isinstance(row, RolloutPlan)
    return row
