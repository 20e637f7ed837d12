"""Batches as `assemble` leaves them, of turns with the real log-probs of their version."""

import random
from pathlib import Path

from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Sample as TrainSample
from app.core.database import Database, now
from app.core.settings import DEMO_MODEL
from app.models import Batch, BatchTurn, Policy, Project, Sample, SampleState, Version, VersionState, new_id
from app.projects.service import create_policy
from tests.support.turns import make_turn


async def create_project_with_policy(db: Database, name: str, base_model: str) -> str:
    """Create a policy in a new project, and return its id."""
    async with db.write() as session:
        project = Project(id=new_id("proj"), name=f"of {name}")
        session.add(project)
        await session.flush()
        await create_policy(session, project.id, name, base_model)
        policy = next(row for row in session.identity_map.values() if isinstance(row, Policy))
        return policy.id


async def create_batch(db: Database, policy_id: str, count: int = 8, seed: int = 0, length: int = 16) -> str:
    """Create an open batch of the policy's head version and return its id.

    Half of the samples have a positive reward. Replies have `length` tokens.
    """
    rng = random.Random(seed)
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id)
        head = await session.get_one(Version, policy.head_version_id)
        head.state, head.live_at = VersionState.LIVE, now()
        directory = None if head.adapter_path is None else Path(head.adapter_path)
        samples = [build_sample(rng, number, length) for number in range(count)]
        batch = Batch(id=new_id("bat"), policy_id=policy_id, parent_id=head.id, num_samples=count)
        session.add(batch)
        await session.flush()
        for number, logprobs in enumerate(recompute_logprobs(DEMO_MODEL, directory, samples)):
            id = new_id("chatcmpl")
            prompt_ids, output_ids = samples[number].prompt_ids, samples[number].output_ids
            tokens = {"own_prompt_ids": list(prompt_ids), "output_ids": list(output_ids)}
            values = {"logprobs": logprobs.tolist(), "num_output_tokens": len(logprobs)}
            session.add(make_turn(policy, head, id, **tokens, **values))
            await session.flush()
            session.add(BatchTurn(batch_id=batch.id, turn_id=id))
            session.add(
                Sample(
                    turn_id=id,
                    policy_id=policy_id,
                    version_id=head.id,
                    reward=1.0 if number % 2 else -1.0,
                    state=SampleState.BATCHED,
                    batch_id=batch.id,
                )
            )
        return batch.id


def build_sample(rng: random.Random, number: int, length: int) -> TrainSample:
    prompt_ids, output_ids = (tuple(rng.randrange(300, 900) for _ in range(num_tokens)) for num_tokens in (12, length))
    return TrainSample(f"sample-{number}", prompt_ids, output_ids, (0.0,) * length, reward=0.0, version=0)
