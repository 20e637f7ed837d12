"""Raters are counted, weighed and held back, on both databases."""

import asyncio

from sqlalchemy import func, literal, select, union_all, update

from alignment.signals.rater_trust import RaterSignal, allowance, weight
from app.core.database import now
from app.models import Audit, Rater, RaterStanding, Sample, SampleState
from app.projects.service import create_project
from app.raters.repository import EVERYBODY
from tests.support.deployment import Harness
from workers.feedback import rater_trust
from workers.feedback.curate import curate
from workers.feedback.rater_trust import Trusted


async def weigh(harness: Harness, said: dict[str, list[float]], **changed: object) -> dict[str, Trusted]:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        return await rater_trust.weigh(
            session, project_id, said, harness.settings.model_copy(update={"trust": True, **changed})
        )


async def rater(harness: Harness, name: str) -> Rater:
    row: Rater = await harness.get(Rater, ((await harness.policy()).project_id, name))
    return row


async def stand(harness: Harness, name: str, standing: RaterStanding, reason: str | None = None) -> None:
    async with harness.db.write() as session:
        row = update(Rater).where(Rater.name == name).values(standing=standing, reason=reason)
        await session.execute(row)


async def test_what_a_rater_says_is_counted_page_after_page(harness: Harness) -> None:
    first = await weigh(harness, {"HUMAN/7": [1.0, -1.0], "HUMAN/8": [0.5, 0.0]})
    await weigh(harness, {"HUMAN/7": [1.0]})
    assert first == {"HUMAN/7": Trusted(0.4), "HUMAN/8": Trusted(0.4)}
    seven, eight = await rater(harness, "HUMAN/7"), await rater(harness, "HUMAN/8")
    assert (seven.num_up, seven.num_down, seven.num_today) == (2, 1, 3)
    assert (eight.num_up, eight.num_down, eight.num_today) == (1, 0, 2), "0 is neither up nor down"
    crowd = await rater(harness, EVERYBODY)
    assert (crowd.num_up, crowd.num_down) == (3, 1)


async def test_a_day_ends_on_the_clock_of_the_database(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0] * 3})
    async with harness.db.write() as session:
        await session.execute(update(Rater).values(counted_day=Rater.counted_day - 1))
    await weigh(harness, {"HUMAN/7": [1.0]})
    assert (await rater(harness, "HUMAN/7")).num_today == 1


async def test_a_flood_is_held_and_on_record(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0] * 4}, max_rater_day=5)
    flooded = await weigh(harness, {"HUMAN/7": [-1.0] * 2}, max_rater_day=5)
    assert flooded["HUMAN/7"].held == "6 rewards in a day, where 5 may be"
    row = await rater(harness, "HUMAN/7")
    assert (row.standing, row.reason) == (RaterStanding.QUARANTINED, flooded["HUMAN/7"].held)
    [audit] = [row for row in await harness.all(Audit) if row.action == "hold rater"]
    assert (audit.subject, audit.reason) == ("HUMAN/7", row.reason)
    async with harness.db.write() as session:
        await session.execute(update(Rater).values(counted_day=Rater.counted_day - 1))
    later = await weigh(harness, {"HUMAN/7": [1.0]}, max_rater_day=5)
    assert later["HUMAN/7"].held == row.reason, "only an admin lets go"


async def test_the_trusted_are_never_held_and_the_blocked_have_no_weight(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await stand(harness, "HUMAN/7", RaterStanding.TRUSTED)
    await stand(harness, "HUMAN/8", RaterStanding.BLOCKED)
    said = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0] * 9}
    assert await weigh(harness, said, max_rater_day=5) == {"HUMAN/7": Trusted(1.0), "HUMAN/8": Trusted(0.0)}
    assert (await rater(harness, "HUMAN/7")).standing == RaterStanding.TRUSTED


async def test_without_trust_nobody_is_doubted_and_an_admins_word_holds(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await stand(harness, "HUMAN/8", RaterStanding.QUARANTINED, "odd")
    said = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0]}
    answer = await weigh(harness, said, max_rater_day=5, trust=False)
    assert answer == {"HUMAN/7": Trusted(1.0), "HUMAN/8": Trusted(1.0, "odd")}


async def test_programs_may_be_loud(harness: Harness) -> None:
    assert (await weigh(harness, {"CODE/tests": [1.0] * 9}, max_rater_day=5))["CODE/tests"].held is None
    crowd = [row for row in await harness.all(Rater) if row.name == EVERYBODY]
    assert crowd == [], "and are no part of what people say"


async def test_a_rater_who_thumbs_down_what_the_others_like_is_held(harness: Harness) -> None:
    for page in range(10):
        said = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        answer = await weigh(harness, said | {"HUMAN/troll": [-1.0] * 3})
    troll = answer["HUMAN/troll"].held
    assert troll is not None and troll.startswith("says up to 0% of ")
    assert [row.name for row in await harness.all(Rater) if row.standing == RaterStanding.QUARANTINED] == [
        "HUMAN/troll"
    ]


async def test_a_burst_on_one_page_is_held_at_once(harness: Harness) -> None:
    said = {f"HUMAN/{number}": [1.0] for number in range(12)} | {"HUMAN/loud": [1.0] * 48}
    answer = await weigh(harness, said)
    assert [name for name, one in answer.items() if one.held] == ["HUMAN/loud"]
    assert (await rater(harness, EVERYBODY)).num_up == 12, "what is held is not what the others say"


async def test_what_an_admin_has_let_pass_is_not_doubted_again_but_a_flood_is(harness: Harness) -> None:
    for page in range(10):
        said = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        await weigh(harness, said | {"HUMAN/grim": [-1.0] * 3})
    await stand(harness, "HUMAN/grim", RaterStanding.NORMAL, "hard to please, and right")
    assert (await weigh(harness, {"HUMAN/grim": [-1.0]}))["HUMAN/grim"].held is None
    assert (await weigh(harness, {"HUMAN/grim": [-1.0] * 9}, max_rater_day=5))["HUMAN/grim"].held is not None


async def test_agreement_moves_the_weight(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        turn = [RaterSignal("HUMAN/7", 1.0), RaterSignal("HUMAN/8", -1.0), RaterSignal(None, 1.0)]
        await rater_trust.agree(session, project_id, [turn] * 6)
    answer = await weigh(harness, {"HUMAN/7": [1.0], "HUMAN/8": [-1.0]})
    assert answer["HUMAN/7"].weight == weight(3.0, 3.0), "each comparison is shared by the two others"
    assert answer["HUMAN/8"].weight == weight(0.0, 6.0) == 0.0


async def test_a_batch_takes_as_many_of_a_raters_samples_as_they_are_believed(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    known = {"HUMAN/poor": (0.0, 9.0), "HUMAN/new": (0.0, 0.0), "HUMAN/fair": (6.0, 1.0), "HUMAN/good": (90.0, 0.0)}
    async with harness.db.write() as session:
        for name, (agreed, disagreed) in known.items():
            session.add(Rater(project_id=project_id, name=name, agreement_weight=agreed, disagreement_weight=disagreed))
        session.add(Rater(project_id=project_id, name="HUMAN/staff", standing=RaterStanding.TRUSTED))
    wanted = {name: allowance(8, weight(*tally)) for name, tally in known.items()} | {"HUMAN/staff": 12}
    assert wanted["HUMAN/new"] == 3 and wanted["HUMAN/poor"] == 1
    places = union_all(*[select(literal(place).label("place")) for place in range(1, 13)]).subquery()
    rows = select(Rater.name, func.count()).join(places, rater_trust.within(places.c.place, 8)).group_by(Rater.name)
    async with harness.db.read() as session:
        assert dict((await session.execute(rows)).tuples().all()) == wanted
        nobody = select(func.count()).select_from(places.outerjoin(Rater, Rater.name == "HUMAN/unknown"))
        assert await session.scalar(nobody.where(rater_trust.within(places.c.place, 8))) == 3


async def test_a_rater_of_a_single_turn_leaves_no_row(harness: Harness) -> None:
    assert await weigh(harness, {"turn/chatcmpl-1": [1.0]}) == {"turn/chatcmpl-1": Trusted(0.4)}
    assert {row.name for row in await harness.all(Rater)} == {EVERYBODY}


async def test_two_workers_who_count_at_once_lose_nothing(harness: Harness) -> None:
    names = [f"HUMAN/{number}" for number in range(20)]
    said = [{name: [1.0] for name in names}, {name: [-1.0] for name in reversed(names)}] * 5
    await asyncio.gather(*[weigh(harness, one) for one in said])
    rows = {row.name: row for row in await harness.all(Rater)}
    assert {(rows[name].num_up, rows[name].num_down) for name in names} == {(5, 5)}
    assert (rows[EVERYBODY].num_up, rows[EVERYBODY].num_down) == (100, 100)


async def test_raters_of_two_projects_are_two(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0]})
    async with harness.db.write() as session:
        other, _ = await create_project(session, "other", "shop", "model")
        await rater_trust.weigh(session, other.id, {"HUMAN/7": [-1.0]}, harness.settings)
    rows = [row for row in await harness.all(Rater) if row.name == "HUMAN/7"]
    assert sorted((row.num_up, row.num_down) for row in rows) == [(0, 1), (1, 0)]


async def test_a_flood_takes_what_waits_for_a_batch_with_it(harness: Harness) -> None:
    settings = harness.settings.model_copy(update={"trust": True, "max_rater_day": 2})
    source = {"kind": "HUMAN", "id": "7"}
    for _ in range(2):
        await harness.thumb((await harness.turn()).id, source=source)
    await harness.thumb((await harness.turn()).id, source={"kind": "HUMAN", "id": "8"})
    await curate(harness.db, settings)
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}
    await harness.thumb((await harness.turn()).id, source=source)
    await curate(harness.db, settings)
    states = {(sample.rater, sample.state) for sample in await harness.all(Sample)}
    assert states == {("HUMAN/7", SampleState.QUARANTINED), ("HUMAN/8", SampleState.OPEN)}


async def test_near_duplicates_are_one_cluster_and_an_empty_reply_is_none() -> None:
    assert rater_trust.cluster([1, 2, 3], [4, 5]) == rater_trust.cluster([1, 2, 3], [4, 5])
    assert rater_trust.cluster([1, 2, 3], [4, 5]) != rater_trust.cluster([1, 2, 3], [4, 6])
    assert rater_trust.cluster([1, 2, 3], []) is None


async def test_a_row_is_young_on_the_databases_clock(harness: Harness) -> None:
    await weigh(harness, {"HUMAN/7": [1.0]})
    async with harness.db.read() as session:
        age = await session.scalar(select(now() - Rater.created_at).where(Rater.name == "HUMAN/7"))
    assert age is not None and -1.0 < age < 60.0
