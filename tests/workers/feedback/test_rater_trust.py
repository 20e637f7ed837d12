"""Raters are counted, weighed and held back, on both databases."""

import asyncio

from sqlalchemy import func, literal, select, union_all, update

from alignment.signals.rater_trust import Heard, allowance, weight
from app.core.database import now
from app.models import Audit, Rater, Sample, SampleState, Standing
from app.projects.service import create_project
from app.raters.repository import EVERYBODY
from tests.support.deployment import Ring
from workers.feedback import rater_trust
from workers.feedback.curate import curate
from workers.feedback.rater_trust import Trusted


async def weigh(ring: Ring, said: dict[str, list[float]], **changed: object) -> dict[str, Trusted]:
    project_id = (await ring.policy()).project_id
    async with ring.db.write() as session:
        return await rater_trust.weigh(
            session, project_id, said, ring.settings.model_copy(update={"trust": True, **changed})
        )


async def rater(ring: Ring, name: str) -> Rater:
    row: Rater = await ring.get(Rater, ((await ring.policy()).project_id, name))
    return row


async def stand(ring: Ring, name: str, standing: Standing, reason: str | None = None) -> None:
    async with ring.db.write() as session:
        row = update(Rater).where(Rater.name == name).values(standing=standing, reason=reason)
        await session.execute(row)


async def test_what_a_rater_says_is_counted_page_after_page(ring: Ring) -> None:
    first = await weigh(ring, {"HUMAN/7": [1.0, -1.0], "HUMAN/8": [0.5, 0.0]})
    await weigh(ring, {"HUMAN/7": [1.0]})
    assert first == {"HUMAN/7": Trusted(0.4), "HUMAN/8": Trusted(0.4)}
    seven, eight = await rater(ring, "HUMAN/7"), await rater(ring, "HUMAN/8")
    assert (seven.num_up, seven.num_down, seven.num_today) == (2, 1, 3)
    assert (eight.num_up, eight.num_down, eight.num_today) == (1, 0, 2), "0 is neither up nor down"
    crowd = await rater(ring, EVERYBODY)
    assert (crowd.num_up, crowd.num_down) == (3, 1)


async def test_a_day_ends_on_the_clock_of_the_database(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0] * 3})
    async with ring.db.write() as session:
        await session.execute(update(Rater).values(day=Rater.day - 1))
    await weigh(ring, {"HUMAN/7": [1.0]})
    assert (await rater(ring, "HUMAN/7")).num_today == 1


async def test_a_flood_is_held_and_on_record(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0] * 4}, max_rater_day=5)
    flooded = await weigh(ring, {"HUMAN/7": [-1.0] * 2}, max_rater_day=5)
    assert flooded["HUMAN/7"].held == "6 rewards in a day, where 5 may be"
    row = await rater(ring, "HUMAN/7")
    assert (row.standing, row.reason) == (Standing.HELD, flooded["HUMAN/7"].held)
    [audit] = [row for row in await ring.all(Audit) if row.action == "hold rater"]
    assert (audit.subject, audit.reason) == ("HUMAN/7", row.reason)
    async with ring.db.write() as session:
        await session.execute(update(Rater).values(day=Rater.day - 1))
    later = await weigh(ring, {"HUMAN/7": [1.0]}, max_rater_day=5)
    assert later["HUMAN/7"].held == row.reason, "only an admin lets go"


async def test_the_trusted_are_never_held_and_the_blocked_have_no_weight(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await stand(ring, "HUMAN/7", Standing.TRUSTED)
    await stand(ring, "HUMAN/8", Standing.BLOCKED)
    said = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0] * 9}
    assert await weigh(ring, said, max_rater_day=5) == {"HUMAN/7": Trusted(1.0), "HUMAN/8": Trusted(0.0)}
    assert (await rater(ring, "HUMAN/7")).standing == Standing.TRUSTED


async def test_without_trust_nobody_is_doubted_and_an_admins_word_holds(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await stand(ring, "HUMAN/8", Standing.HELD, "odd")
    said = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0]}
    answer = await weigh(ring, said, max_rater_day=5, trust=False)
    assert answer == {"HUMAN/7": Trusted(1.0), "HUMAN/8": Trusted(1.0, "odd")}


async def test_programs_may_be_loud(ring: Ring) -> None:
    assert (await weigh(ring, {"CODE/tests": [1.0] * 9}, max_rater_day=5))["CODE/tests"].held is None
    crowd = [row for row in await ring.all(Rater) if row.name == EVERYBODY]
    assert crowd == [], "and are no part of what people say"


async def test_a_rater_who_thumbs_down_what_the_others_like_is_held(ring: Ring) -> None:
    for page in range(10):
        said = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        answer = await weigh(ring, said | {"HUMAN/troll": [-1.0] * 3})
    troll = answer["HUMAN/troll"].held
    assert troll is not None and troll.startswith("says up to 0% of ")
    assert [row.name for row in await ring.all(Rater) if row.standing == Standing.HELD] == ["HUMAN/troll"]


async def test_a_burst_on_one_page_is_held_at_once(ring: Ring) -> None:
    said = {f"HUMAN/{number}": [1.0] for number in range(12)} | {"HUMAN/loud": [1.0] * 48}
    answer = await weigh(ring, said)
    assert [name for name, one in answer.items() if one.held] == ["HUMAN/loud"]
    assert (await rater(ring, EVERYBODY)).num_up == 12, "what is held is not what the others say"


async def test_what_an_admin_has_let_pass_is_not_doubted_again_but_a_flood_is(ring: Ring) -> None:
    for page in range(10):
        said = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        await weigh(ring, said | {"HUMAN/grim": [-1.0] * 3})
    await stand(ring, "HUMAN/grim", Standing.NORMAL, "hard to please, and right")
    assert (await weigh(ring, {"HUMAN/grim": [-1.0]}))["HUMAN/grim"].held is None
    assert (await weigh(ring, {"HUMAN/grim": [-1.0] * 9}, max_rater_day=5))["HUMAN/grim"].held is not None


async def test_agreement_moves_the_weight(ring: Ring) -> None:
    project_id = (await ring.policy()).project_id
    async with ring.db.write() as session:
        turn = [Heard("HUMAN/7", 1.0), Heard("HUMAN/8", -1.0), Heard(None, 1.0)]
        await rater_trust.agree(session, project_id, [turn] * 6)
    answer = await weigh(ring, {"HUMAN/7": [1.0], "HUMAN/8": [-1.0]})
    assert answer["HUMAN/7"].weight == weight(3.0, 3.0), "each comparison is shared by the two others"
    assert answer["HUMAN/8"].weight == weight(0.0, 6.0) == 0.0


async def test_a_batch_takes_as_many_of_a_raters_samples_as_they_are_believed(ring: Ring) -> None:
    project_id = (await ring.policy()).project_id
    known = {"HUMAN/poor": (0.0, 9.0), "HUMAN/new": (0.0, 0.0), "HUMAN/fair": (6.0, 1.0), "HUMAN/good": (90.0, 0.0)}
    async with ring.db.write() as session:
        for name, (agreed, disagreed) in known.items():
            session.add(Rater(project_id=project_id, name=name, agreed=agreed, disagreed=disagreed))
        session.add(Rater(project_id=project_id, name="HUMAN/staff", standing=Standing.TRUSTED))
    wanted = {name: allowance(8, weight(*tally)) for name, tally in known.items()} | {"HUMAN/staff": 12}
    assert wanted["HUMAN/new"] == 3 and wanted["HUMAN/poor"] == 1
    places = union_all(*[select(literal(place).label("place")) for place in range(1, 13)]).subquery()
    rows = select(Rater.name, func.count()).join(places, rater_trust.within(places.c.place, 8)).group_by(Rater.name)
    async with ring.db.read() as session:
        assert dict((await session.execute(rows)).tuples().all()) == wanted
        nobody = select(func.count()).select_from(places.outerjoin(Rater, Rater.name == "HUMAN/unknown"))
        assert await session.scalar(nobody.where(rater_trust.within(places.c.place, 8))) == 3


async def test_a_rater_of_a_single_turn_leaves_no_row(ring: Ring) -> None:
    assert await weigh(ring, {"turn/chatcmpl-1": [1.0]}) == {"turn/chatcmpl-1": Trusted(0.4)}
    assert {row.name for row in await ring.all(Rater)} == {EVERYBODY}


async def test_two_workers_who_count_at_once_lose_nothing(ring: Ring) -> None:
    names = [f"HUMAN/{number}" for number in range(20)]
    said = [{name: [1.0] for name in names}, {name: [-1.0] for name in reversed(names)}] * 5
    await asyncio.gather(*[weigh(ring, one) for one in said])
    rows = {row.name: row for row in await ring.all(Rater)}
    assert {(rows[name].num_up, rows[name].num_down) for name in names} == {(5, 5)}
    assert (rows[EVERYBODY].num_up, rows[EVERYBODY].num_down) == (100, 100)


async def test_raters_of_two_projects_are_two(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0]})
    async with ring.db.write() as session:
        other, _ = await create_project(session, "other", "shop", "model")
        await rater_trust.weigh(session, other.id, {"HUMAN/7": [-1.0]}, ring.settings)
    rows = [row for row in await ring.all(Rater) if row.name == "HUMAN/7"]
    assert sorted((row.num_up, row.num_down) for row in rows) == [(0, 1), (1, 0)]


async def test_a_flood_takes_what_waits_for_a_batch_with_it(ring: Ring) -> None:
    settings = ring.settings.model_copy(update={"trust": True, "max_rater_day": 2})
    source = {"kind": "HUMAN", "id": "7"}
    for _ in range(2):
        await ring.thumb((await ring.turn()).id, source=source)
    await ring.thumb((await ring.turn()).id, source={"kind": "HUMAN", "id": "8"})
    await curate(ring.db, settings)
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.OPEN}
    await ring.thumb((await ring.turn()).id, source=source)
    await curate(ring.db, settings)
    states = {(sample.rater, sample.state) for sample in await ring.all(Sample)}
    assert states == {("HUMAN/7", SampleState.HELD), ("HUMAN/8", SampleState.OPEN)}


async def test_near_duplicates_are_one_cluster_and_an_empty_reply_is_none() -> None:
    assert rater_trust.cluster([1, 2, 3], [4, 5]) == rater_trust.cluster([1, 2, 3], [4, 5])
    assert rater_trust.cluster([1, 2, 3], [4, 5]) != rater_trust.cluster([1, 2, 3], [4, 6])
    assert rater_trust.cluster([1, 2, 3], []) is None


async def test_a_row_is_young_on_the_databases_clock(ring: Ring) -> None:
    await weigh(ring, {"HUMAN/7": [1.0]})
    async with ring.db.read() as session:
        age = await session.scalar(select(now() - Rater.created_at).where(Rater.name == "HUMAN/7"))
    assert age is not None and -1.0 < age < 60.0
