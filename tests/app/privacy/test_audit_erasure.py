"""Erasure and the audit log: entries about the subject's raters lose the name, entries of the same subject stay."""

from app.models import Audit, Policy
from app.raters.names import hash_name
from tests.app.privacy.test_erasure import create_turn, erase
from tests.support.deployment import Harness


async def audit_subjects(harness: Harness) -> list[tuple[str, str, str | None]]:
    rows = sorted(await harness.all(Audit), key=lambda row: row.seq)
    return [(row.action, row.subject, row.reason) for row in rows if row.action != "subject.erased"]


async def pause(harness: Harness, policy: str) -> None:
    answer = await harness.api.post(f"/v1/policies/{policy}/training/pause", json={"reason": "why"})
    assert answer.status_code == 200


async def test_entries_of_a_policy_with_the_name_of_the_subject_stay(harness: Harness) -> None:
    await pause(harness, "shop")
    await create_turn(harness, end_user="shop")
    await erase(harness, "shop")
    assert await audit_subjects(harness) == [("training.halted", "shop", "why")]


async def test_entries_of_a_version_with_the_name_of_the_rater_stay(harness: Harness) -> None:
    """A reward model of the policy "end-user" is named like the rater of the end user "rm-1"."""
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).name = "end-user"
    await pause(harness, "end-user")
    async with harness.db.write() as session:
        entry = await session.get_one(Audit, 1)
        session.add(Audit(**{**columns(entry), "subject": "end-user/rm-1", "action": "reward_model.serving"}))
    await harness.api.put("/v1/raters/end-user/rm-1", json={"standing": "blocked", "reason": "rm-1 is rude"})
    await create_turn(harness, end_user="rm-1")
    await erase(harness, "rm-1")
    name = hash_name((await harness.policy()).project_id, "rm-1")
    assert await audit_subjects(harness) == [
        ("training.halted", "end-user", "why"),
        ("reward_model.serving", "end-user/rm-1", "why"),
        ("rater.blocked", name, None),
    ]


async def test_entries_of_another_rater_with_the_same_beginning_stay(harness: Harness) -> None:
    """An entry's subject is the first 128 characters of a rater's name."""
    for end in ("a", "b"):
        path = f"/v1/raters/HUMAN/{'x' * 200}{end}"
        await harness.api.put(path, json={"standing": "blocked", "reason": f"rude {end}"})
    await erase(harness, "x" * 200 + "a")
    assert [reason for _, _, reason in await audit_subjects(harness)] == [None, "rude b"]


def columns(entry: Audit) -> dict[str, object]:
    return {name: getattr(entry, name) for name in ("project_id", "actor", "reason", "details")}
