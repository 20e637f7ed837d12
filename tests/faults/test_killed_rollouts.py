"""kill -9 of the rollout worker during a reply: every prompt is sampled, and recorded once."""

import pytest

from app.models import Reward, Rollout, RolloutPlan, RolloutState, Sample, Turn, TurnState
from tests.support.deployment import Harness
from tests.support.processes import PATIENCE_SECONDS, processes, until
from tests.support.rollout_rows import create_plan, create_prompt_set
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the default, with the embedded broker
KILLS = 2


@pytest.mark.slow
async def test_plan_finishes_after_its_worker_is_killed(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, ("2 + 2?", "4"), ("3 + 4?", "7"))
    scripted.reply_text, scripted.is_blocked = "It is 4, I think.", lambda reply: True
    settings = harness.settings.replace({"workers.lease_seconds": 3.0, "workers.max_attempts": 10})
    await create_plan(harness)

    async def is_generating() -> bool:
        return bool(scripted.running)

    async def is_done() -> bool:
        return (await harness.all(RolloutPlan))[0].state == "done"

    with processes(settings) as running:
        running.start("worker", "beat", "rollout")
        for _ in range(KILLS):
            await until(is_generating, PATIENCE_SECONDS, "the engine generates a reply")
            running.kill("rollout")
            for reply in list(scripted.running.values()):
                reply.is_aborted = True  # the process that requested it was killed
            running.start("rollout")
        scripted.is_blocked = lambda reply: False
        await until(is_done, PATIENCE_SECONDS, "the plan is done")
    rows = await harness.all(Rollout)
    assert {row.state for row in rows} == {RolloutState.DONE} and max(row.attempt for row in rows) > 1
    assert sorted((row.row_number, row.choice_index, row.reward) for row in rows) == [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (1, 0, -1.0),
        (1, 1, -1.0),
    ]
    turns = await harness.all(Turn)
    assert len(turns) == len(await harness.all(Reward)) == len(await harness.all(Sample)) == 4
    assert all(turn.state == TurnState.DONE and len(turn.logprobs) == len(turn.output_ids) for turn in turns)
