"""Rewards → how far their raters are believed. Counts raters, holds back floods and what no taste explains."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Table, case, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterSignal, Tally
from app.core.database import database_time, dialect_insert, now
from app.core.settings import Settings
from app.models import Rater, RaterStanding, record_audit
from app.raters import repository
from app.raters.names import comes_back, is_person
from app.raters.repository import EVERYBODY

DAY = 86_400
TABLE: Table = Rater.__table__  # type: ignore[assignment]


class Trusted(NamedTuple):
    """`weight` from 0 to 1; `held` is why samples with this rater's word wait for an admin, None if they need not."""

    weight: float = 1.0
    held: str | None = None


class Known(NamedTuple):
    """A rater as the database has them, this page's words included."""

    name: str
    standing: str
    reason: str | None
    tally: Tally
    num_today: int


async def weigh(
    session: AsyncSession, project_id: str, said: Mapping[str, Sequence[float]], settings: Settings
) -> dict[str, Trusted]:
    """Count what each rater has newly said, and say how far each is believed from now on.

    A standing is an admin's, or a doubt's until an admin has spoken. Without `settings.trust` nobody is doubted, but
    an admin's word still holds.
    """
    pages = {name: _tally(values) for name, values in said.items()}
    counts = {name: len(values) for name, values in said.items() if is_person(name)}
    counted_day = int(await database_time(session)) // DAY
    all_time, lately = await _crowd(session, project_id)
    trusted: dict[str, Trusted] = {}
    for rater in await _count(session, project_id, said, pages, counted_day):
        doubt = None
        if settings.trust and rater.standing == RaterStanding.NORMAL:
            others = rater_trust.crowd_shares(all_time, lately, _before(rater.tally, pages[rater.name]))
            doubt = _doubt(rater, counts, others, settings)
        if doubt is not None:
            await _hold(session, project_id, rater.name, doubt)
            rater = rater._replace(standing=RaterStanding.QUARANTINED, reason=doubt)
        trusted[rater.name] = _trusted(rater, settings)
    silent = {name for name, one in trusted.items() if one.held is not None or one.weight == 0.0}
    silent |= {name for name in said if not is_person(name)}
    await _add_to_crowd(session, project_id, rater_trust.voices(pages, silent))
    return {name: trusted.get(name, newcomer(settings)) for name in said}


async def agree(session: AsyncSession, project_id: str, turns: Sequence[Sequence[RaterSignal]]) -> None:
    """Compare the words about each turn that more than one source has spoken about."""
    gained: dict[str, tuple[float, float]] = {}
    for turn in turns:
        for name, (agreement_weight, disagreement_weight) in rater_trust.agreement(turn).items():
            before = gained.get(name, (0.0, 0.0))
            gained[name] = (before[0] + agreement_weight, before[1] + disagreement_weight)
    rows = [
        {
            "project_id": project_id,
            "name": name,
            "agreement_weight": agreement_weight,
            "disagreement_weight": disagreement_weight,
        }
        for name, (agreement_weight, disagreement_weight) in sorted(gained.items())
        if comes_back(name)
    ]
    if rows:
        await session.execute(
            _upsert(
                session,
                rows,
                agreement_weight=TABLE.c.agreement_weight,
                disagreement_weight=TABLE.c.disagreement_weight,
            )
        )


def within(place: ColumnElement[int], most: int) -> ColumnElement[bool]:
    """May a rater's sample that is the `place`-th into a batch? `alignment.signals.rater_trust.allowance` in SQL, for a statement
    that has Rater joined from outside; whoever is not on record is a newcomer, and the trusted may have them all."""
    alpha, beta = rater_trust.PRIOR
    agreement_weight, disagreement_weight = (
        func.coalesce(Rater.agreement_weight, 0.0),
        func.coalesce(Rater.disagreement_weight, 0.0),
    )
    belief = (alpha + agreement_weight - beta - disagreement_weight) / (
        alpha + beta + agreement_weight + disagreement_weight
    )
    return or_(place == 1, place <= most * belief, func.coalesce(Rater.standing, "") == RaterStanding.TRUSTED)


def cluster(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str | None:
    """The same short word for turns that are nearly the same."""
    return rater_trust.signature(prompt_ids, output_ids) if output_ids else None


def _tally(values: Sequence[float]) -> Tally:
    return Tally(sum(value > 0 for value in values), sum(value < 0 for value in values))


def _before(tally: Tally, page: Tally) -> Tally:
    return Tally(tally.up - page.up, tally.down - page.down)


def newcomer(settings: Settings) -> Trusted:
    return Trusted(rater_trust.weight(0.0, 0.0) if settings.trust else 1.0)


def _trusted(rater: Known, settings: Settings) -> Trusted:
    if rater.standing == RaterStanding.BLOCKED:
        return Trusted(0.0)
    if rater.standing == RaterStanding.TRUSTED or not settings.trust:
        return Trusted(1.0, rater.reason if rater.standing == RaterStanding.QUARANTINED else None)
    believed = rater_trust.weight(rater.tally.agreed, rater.tally.disagreed)
    return Trusted(believed, (rater.reason or "held") if rater.standing == RaterStanding.QUARANTINED else None)


def _doubt(rater: Known, counts: Mapping[str, int], shares: Sequence[float], settings: Settings) -> str | None:
    """A flood counts whenever it comes; what an admin has seen and let pass (a reason is on record) is not asked again.

    Programs are answered for by the key that lets them in: they may be loud and one-sided, but not contrary.
    """
    if is_person(rater.name):
        if rater.num_today > settings.max_rater_day:
            return f"{rater.num_today} rewards in a day, where {settings.max_rater_day} may be"
        if (loud := rater_trust.burst(rater.name, counts)) is not None:
            return loud
    if rater.reason is not None:
        return None
    one_sided = rater_trust.one_sided(rater.tally, shares) if is_person(rater.name) else None
    return one_sided or rater_trust.contrary(rater.tally)


async def _hold(session: AsyncSession, project_id: str, name: str, reason: str) -> None:
    """What is not in a batch yet waits for an admin too."""
    await session.execute(
        update(Rater)
        .where(Rater.project_id == project_id, Rater.name == name)
        .values(standing=RaterStanding.QUARANTINED, reason=reason)
        .execution_options(synchronize_session=False)
    )
    held = await repository.quarantine_samples(session, project_id, name, reason)
    subject = name[:128]
    record_audit(session, "curate", "hold rater", subject, reason, project_id=project_id, rater=name, samples=held)


async def _count(
    session: AsyncSession,
    project_id: str,
    said: Mapping[str, Sequence[float]],
    pages: Mapping[str, Tally],
    counted_day: int,
) -> list[Known]:
    """One statement for the page. Always in the order of names, so that two workers never wait for each other."""
    rows = [
        {
            "project_id": project_id,
            "name": name,
            "num_up": int(pages[name].up),
            "num_down": int(pages[name].down),
            "counted_day": counted_day,
            "num_today": len(said[name]),
        }
        for name in sorted(said)
        if comes_back(name)
    ]
    if not rows:
        return []
    today = case((TABLE.c.counted_day == counted_day, TABLE.c.num_today), else_=0)
    upsert = _upsert(
        session, rows, num_up=TABLE.c.num_up, num_down=TABLE.c.num_down, num_today=today, counted_day=literal(0)
    )
    columns = (
        Rater.name,
        Rater.standing,
        Rater.reason,
        Rater.num_up,
        Rater.num_down,
        Rater.agreement_weight,
        Rater.disagreement_weight,
    )
    counted = await session.execute(upsert.returning(*columns, Rater.num_today))
    return [Known(name, standing, reason, Tally(*tally), today) for name, standing, reason, *tally, today in counted]


def _upsert(session: AsyncSession, rows: Sequence[dict[str, Any]], **kept: ColumnElement[Any]) -> Any:
    """New rows, and for those that are there: what is `kept` of a column plus what is new."""
    zeros = {
        "num_up": 0,
        "num_down": 0,
        "agreement_weight": 0.0,
        "disagreement_weight": 0.0,
        "counted_day": 0,
        "num_today": 0,
    }
    full = [{"standing": RaterStanding.NORMAL, **zeros, **row, "created_at": now()} for row in rows]
    statement = dialect_insert(session, TABLE).values(full)
    added = {name: value + statement.excluded[name] for name, value in kept.items()}
    return statement.on_conflict_do_update(index_elements=["project_id", "name"], set_=added)


async def _crowd(session: AsyncSession, project_id: str) -> tuple[Tally, Tally]:
    """What everybody has said, ever and lately: the row EVERYBODY, whose agreed and disagreed are ups and downs that
    fade."""
    row = await session.execute(
        select(Rater.num_up, Rater.num_down, Rater.agreement_weight, Rater.disagreement_weight).where(
            Rater.project_id == project_id, Rater.name == EVERYBODY
        )
    )
    up, down, lately_up, lately_down = row.one_or_none() or (0, 0, 0.0, 0.0)
    return Tally(up, down), Tally(lately_up, lately_down)


async def _add_to_crowd(session: AsyncSession, project_id: str, page: Tally) -> None:
    if not page.words:
        return
    kept = rater_trust.fade(page)
    values = {
        "num_up": int(page.up),
        "num_down": int(page.down),
        "agreement_weight": page.up,
        "disagreement_weight": page.down,
    }
    row = {"project_id": project_id, "name": EVERYBODY, **values}
    fading = {
        "agreement_weight": TABLE.c.agreement_weight * kept,
        "disagreement_weight": TABLE.c.disagreement_weight * kept,
    }
    await session.execute(_upsert(session, [row], num_up=TABLE.c.num_up, num_down=TABLE.c.num_down, **fading))
