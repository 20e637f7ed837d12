"""The poisoning experiment quarantines the same raters as the service."""

from random import Random

from alignment.types import Sample
from tests.support.deployment import Harness
from tests.support.offline.poisoning import BATCH, InMemoryRaterTrust, RatedSample, assemble_batch
from workers.feedback import rater_trust


def rated_sample(rater: str, reward: float, number: int = 0, conversation: str = "c") -> RatedSample:
    sample = Sample(
        turn_id=f"turn-{number}",
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        reward=reward,
        version=0,
        lag=0,
        group=f"turn-{number}",
        conversation=conversation,
        turn_index=0,
    )
    return RatedSample(rater, sample)


async def test_experiment_quarantines_the_raters_that_the_service_quarantines(harness: Harness) -> None:
    settings = harness.settings.replace({"raters.trust": True})
    project_id = (await harness.policy()).project_id
    rng, trust, quarantined = Random(5), InMemoryRaterTrust(), dict[str, str]()
    for page in range(14):
        approval = 0.35 + 0.04 * page
        rated_samples = [
            rated_sample(f"HUMAN/{rng.randrange(60)}", 1.0 if rng.random() < approval else -1.0, number)
            for number in range(60)
        ]
        rated_samples += [
            rated_sample(f"HUMAN/troll-{number}", 1.0 if rng.random() < 0.1 else -1.0) for number in (0, 0, 0, 1, 1, 1)
        ]
        rated_samples += [rated_sample("HUMAN/burst", 1.0)] * (40 if page == 3 else 1)
        rewards: dict[str, list[float]] = {}
        for rater, sample in rated_samples:
            rewards.setdefault(rater, []).append(sample.reward)
        trust.update(rated_samples)
        async with harness.db.write() as session:
            trust_by_rater = await rater_trust.update_trust(session, project_id, rewards, settings)
        quarantined |= {
            name: rater_state.quarantine_reason
            for name, rater_state in trust_by_rater.items()
            if rater_state.quarantine_reason is not None
        }
    assert trust.quarantined == quarantined
    assert set(quarantined) == {"HUMAN/troll-0", "HUMAN/troll-1", "HUMAN/burst"}


def test_batch_respects_the_caps_per_rater_and_conversation() -> None:
    from_one_rater = [rated_sample("frequent rater", 1.0, number, f"c-{number}") for number in range(50)]
    from_one_conversation = [rated_sample(f"rater-{number}", 1.0, number, "one conversation") for number in range(50)]
    others = [rated_sample(f"other-{number}", 1.0, number, f"d-{number}") for number in range(200)]
    batch = assemble_batch([*from_one_rater, *from_one_conversation, *others], 4, 9)
    assert len(batch) == BATCH
    assert sum(rated.rater == "frequent rater" for rated in batch) == 4
    assert sum(rated.sample.conversation == "one conversation" for rated in batch) == 9
