"""The study's gate is the service's: the same words, the same raters held, the same samples let in."""

from random import Random

from alignment.types import Sample
from demo.offline.poisoning import BATCH, Gate, Word, assembled
from tests.support.deployment import Harness
from workers.feedback import rater_trust


def word(rater: str, reward: float, number: int = 0, conversation: str = "c") -> Word:
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
        turn=0,
    )
    return Word(rater, sample)


async def test_the_gate_holds_whom_the_service_holds(harness: Harness) -> None:
    settings = harness.settings.model_copy(update={"trust": True})
    project_id = (await harness.policy()).project_id
    draw, gate, held = Random(5), Gate(), dict[str, str]()
    for page in range(14):
        liked = 0.35 + 0.04 * page
        words = [
            word(f"HUMAN/{draw.randrange(60)}", 1.0 if draw.random() < liked else -1.0, number) for number in range(60)
        ]
        words += [word(f"HUMAN/troll-{number}", 1.0 if draw.random() < 0.1 else -1.0) for number in (0, 0, 0, 1, 1, 1)]
        words += [word("HUMAN/loud", 1.0)] * (40 if page == 3 else 1)
        said: dict[str, list[float]] = {}
        for rater, sample in words:
            said.setdefault(rater, []).append(sample.reward)
        gate.hear(words)
        async with harness.db.write() as session:
            answer = await rater_trust.weigh(session, project_id, said, settings)
        held |= {name: one.held for name, one in answer.items() if one.held is not None}
    assert gate.held == held
    assert set(held) == {"HUMAN/troll-0", "HUMAN/troll-1", "HUMAN/loud"}


def test_nobody_is_in_a_batch_more_often_than_the_caps_allow() -> None:
    loud = [word("loud", 1.0, number, f"c-{number}") for number in range(50)]
    chatty = [word(f"rater-{number}", 1.0, number, "one conversation") for number in range(50)]
    others = [word(f"other-{number}", 1.0, number, f"d-{number}") for number in range(200)]
    batch = assembled([*loud, *chatty, *others], 4, 9)
    assert len(batch) == BATCH
    assert sum(one.rater == "loud" for one in batch) == 4
    assert sum(one.sample.conversation == "one conversation" for one in batch) == 9
