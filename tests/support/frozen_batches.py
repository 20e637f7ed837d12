"""Batches as `assemble` leaves them, of turns whose log-probs are those of the version that spoke."""

import random
from pathlib import Path

from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.types import Sample as Draft
from app.core.database import Database, now
from app.core.settings import DEMO_MODEL
from app.models import Batch, Policy, Project, Sample, SampleState, Version, VersionState, new_id
from app.projects.bootstrap import first_policy
from tests.support.turns import finished


async def another_policy(db: Database, name: str, base_model: str) -> str:
    """A policy in a project of its own."""
    async with db.write() as session:
        project = Project(id=new_id("proj"), name=f"of {name}")
        session.add(project)
        await session.flush()
        await first_policy(session, project.id, name, base_model)
        policy = next(row for row in session.identity_map.values() if isinstance(row, Policy))
        return policy.id


async def freeze(db: Database, policy_id: str, count: int = 8, seed: int = 0, length: int = 16) -> str:
    """An open batch on the policy's head, half of it liked; replies of `length` tokens."""
    rng = random.Random(seed)
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id)
        head = await session.get_one(Version, policy.head_version_id)
        head.state, head.live_at = VersionState.LIVE, now()
        directory = None if head.adapter_path is None else Path(head.adapter_path)
        drafts = [draft(rng, number, length) for number in range(count)]
        batch = Batch(id=new_id("bat"), policy_id=policy_id, parent_id=head.id, num_samples=count)
        session.add(batch)
        await session.flush()
        for number, logprobs in enumerate(recompute_logprobs(DEMO_MODEL, directory, drafts)):
            id = new_id("chatcmpl")
            said = {"prompt_ids": list(drafts[number].prompt_ids), "output_ids": list(drafts[number].output_ids)}
            told = {"logprobs": logprobs.tolist(), "num_output_tokens": len(logprobs)}
            session.add(finished(policy, head, id, **said, **told))
            await session.flush()
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


def draft(rng: random.Random, number: int, length: int) -> Draft:
    prompt, output = (tuple(rng.randrange(300, 900) for _ in range(tokens)) for tokens in (12, length))
    return Draft(f"draft-{number}", prompt, output, (0.0,) * length, reward=0.0, version=0)
