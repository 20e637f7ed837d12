"""Rewards → trust in their raters. Counts raters and quarantines bursts and improbable patterns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Table, case, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterCounts, RaterSignal
from app.core.database import database_time, dialect_insert, now
from app.core.settings import Settings
from app.models import AuditAction, Rater, RaterStanding, record_audit
from app.raters import repository
from app.raters.names import is_person, is_recurring
from app.raters.repository import ALL_RATERS

DAY_SECONDS = 86_400
TABLE: Table = Rater.__table__  # type: ignore[assignment]


class RaterTrust(NamedTuple):
    """`weight` from 0 to 1; `quarantine_reason`: why samples with this rater's feedback wait for an admin, or None."""

    weight: float = 1.0
    quarantine_reason: str | None = None


class RaterRecord(NamedTuple):
    """A rater as stored, the feedback of this page included."""

    name: str
    standing: str
    reason: str | None
    counts: RaterCounts
    num_today: int


async def update_trust(
    session: AsyncSession, project_id: str, values: Mapping[str, Sequence[float]], settings: Settings
) -> dict[str, RaterTrust]:
    """Count the new rewards of each rater (`values`), and return how far each rater is trusted from now on.

    An admin sets a rater's standing; the checks here quarantine a rater until an admin decides. Without
    `settings.trust` no check runs, but the standings that admins set still hold.
    """
    new_counts = {name: _count_signs(rewards) for name, rewards in values.items()}
    num_rewards = {name: len(rewards) for name, rewards in values.items() if is_person(name)}
    day = int(await database_time(session)) // DAY_SECONDS
    all_time, recent = await _read_population(session, project_id)
    trust: dict[str, RaterTrust] = {}
    for rater in await _count(session, project_id, values, new_counts, day):
        suspicion = None
        if settings.trust and rater.standing == RaterStanding.NORMAL:
            previous = _subtract(rater.counts, new_counts[rater.name])
            rates = rater_trust.others_positive_rates(all_time, recent, previous)
            suspicion = _find_suspicion(rater, num_rewards, rates, settings)
        if suspicion is not None:
            await _quarantine(session, project_id, rater.name, suspicion)
            rater = rater._replace(standing=RaterStanding.QUARANTINED, reason=suspicion)
        trust[rater.name] = _trust_of(rater, settings)
    excluded = {name for name, one in trust.items() if one.quarantine_reason is not None or one.weight == 0.0}
    excluded |= {name for name in values if not is_person(name)}
    await _add_to_population(session, project_id, rater_trust.sum_page_counts(new_counts, excluded))
    return {name: trust.get(name, newcomer_trust(settings)) for name in values}


async def record_agreement(session: AsyncSession, project_id: str, turns: Sequence[Sequence[RaterSignal]]) -> None:
    """Compare the signals about each turn, and add the agreement to the records of their raters."""
    gains: dict[str, tuple[float, float]] = {}
    for turn in turns:
        for name, (agreement_weight, disagreement_weight) in rater_trust.count_agreement(turn).items():
            previous = gains.get(name, (0.0, 0.0))
            gains[name] = (previous[0] + agreement_weight, previous[1] + disagreement_weight)
    rows = [
        {
            "project_id": project_id,
            "name": name,
            "agreement_weight": agreement_weight,
            "disagreement_weight": disagreement_weight,
        }
        for name, (agreement_weight, disagreement_weight) in sorted(gains.items())
        if is_recurring(name)
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


def is_within_allowance(position: ColumnElement[int], limit: int) -> ColumnElement[bool]:
    """Return whether a batch may take a rater's sample at this position (from 1), as a SQL condition.

    This is `alignment.signals.rater_trust.sample_quota` in SQL, for a statement that has Rater joined from outside. A
    rater without a record counts as a newcomer, and a trusted rater has no limit.
    """
    alpha, beta = rater_trust.PRIOR
    agreement_weight, disagreement_weight = (
        func.coalesce(Rater.agreement_weight, 0.0),
        func.coalesce(Rater.disagreement_weight, 0.0),
    )
    weight = (alpha + agreement_weight - beta - disagreement_weight) / (
        alpha + beta + agreement_weight + disagreement_weight
    )
    is_trusted = func.coalesce(Rater.standing, "") == RaterStanding.TRUSTED
    return or_(position == 1, position <= limit * weight, is_trusted)


def cluster_key(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str | None:
    """Return a key that turns with nearly the same tokens share, None for an empty reply."""
    return rater_trust.minhash_signature(prompt_ids, output_ids) if output_ids else None


def _count_signs(values: Sequence[float]) -> RaterCounts:
    return RaterCounts(sum(value > 0 for value in values), sum(value < 0 for value in values))


def _subtract(counts: RaterCounts, new: RaterCounts) -> RaterCounts:
    return RaterCounts(counts.up - new.up, counts.down - new.down)


def newcomer_trust(settings: Settings) -> RaterTrust:
    """Return the trust in a rater without a record."""
    return RaterTrust(rater_trust.rater_weight(0.0, 0.0) if settings.trust else 1.0)


def _trust_of(rater: RaterRecord, settings: Settings) -> RaterTrust:
    is_quarantined = rater.standing == RaterStanding.QUARANTINED
    if rater.standing == RaterStanding.BLOCKED:
        return RaterTrust(0.0)
    if rater.standing == RaterStanding.TRUSTED or not settings.trust:
        return RaterTrust(1.0, rater.reason if is_quarantined else None)
    weight = rater_trust.rater_weight(rater.counts.agreed, rater.counts.disagreed)
    return RaterTrust(weight, (rater.reason or "quarantined") if is_quarantined else None)


def _find_suspicion(
    rater: RaterRecord, num_rewards: Mapping[str, int], rates: Sequence[float], settings: Settings
) -> str | None:
    """Return why the rater must be quarantined, None if no check fails.

    A burst counts every time. The other checks are skipped once an admin has accepted the rater, which leaves a
    reason on record. Programs are accepted with the API key that they use: they may send much and one-sided feedback,
    but must not contradict the other raters.
    """
    if is_person(rater.name):
        if rater.num_today > settings.max_rater_day:
            return f"{rater.num_today} rewards in a day, more than the limit of {settings.max_rater_day}"
        if (burst := rater_trust.detect_burst(rater.name, num_rewards)) is not None:
            return burst
    if rater.reason is not None:
        return None
    one_sided = rater_trust.detect_one_sided(rater.counts, rates) if is_person(rater.name) else None
    return one_sided or rater_trust.detect_contrary(rater.counts)


async def _quarantine(session: AsyncSession, project_id: str, name: str, reason: str) -> None:
    """Quarantine the rater and the rater's samples that are not in a batch yet."""
    await session.execute(
        update(Rater)
        .where(Rater.project_id == project_id, Rater.name == name)
        .values(standing=RaterStanding.QUARANTINED, reason=reason)
        .execution_options(synchronize_session=False)
    )
    samples = await repository.quarantine_samples(session, project_id, name, reason)
    record_audit(
        session,
        "curate",
        AuditAction.RATER_QUARANTINED,
        name[:128],
        reason,
        project_id=project_id,
        rater=name,
        samples=samples,
    )


async def _count(
    session: AsyncSession,
    project_id: str,
    values: Mapping[str, Sequence[float]],
    new_counts: Mapping[str, RaterCounts],
    day: int,
) -> list[RaterRecord]:
    """Count all raters of a page in one statement, in order of names, so that two workers never wait for each other."""
    rows = [
        {
            "project_id": project_id,
            "name": name,
            "num_up": int(new_counts[name].up),
            "num_down": int(new_counts[name].down),
            "counted_day": day,
            "num_today": len(values[name]),
        }
        for name in sorted(values)
        if is_recurring(name)
    ]
    if not rows:
        return []
    num_today = case((TABLE.c.counted_day == day, TABLE.c.num_today), else_=0)
    upsert = _upsert(
        session, rows, num_up=TABLE.c.num_up, num_down=TABLE.c.num_down, num_today=num_today, counted_day=literal(0)
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
    return [
        RaterRecord(name, standing, reason, RaterCounts(*counts), today)
        for name, standing, reason, *counts, today in counted
    ]


def _upsert(session: AsyncSession, rows: Sequence[dict[str, Any]], **previous: ColumnElement[Any]) -> Any:
    """Return a statement that inserts rows; of an existing row each column of `previous` becomes previous + new."""
    zeros = {
        "num_up": 0,
        "num_down": 0,
        "agreement_weight": 0.0,
        "disagreement_weight": 0.0,
        "counted_day": 0,
        "num_today": 0,
    }
    values = [{"standing": RaterStanding.NORMAL, **zeros, **row, "created_at": now()} for row in rows]
    statement = dialect_insert(session, TABLE).values(values)
    sums = {name: value + statement.excluded[name] for name, value in previous.items()}
    return statement.on_conflict_do_update(index_elements=["project_id", "name"], set_=sums)


async def _read_population(session: AsyncSession, project_id: str) -> tuple[RaterCounts, RaterCounts]:
    """Return the counts of all raters together: of all time, and recent ones that decay.

    They are in the row ALL_RATERS, whose agreement and disagreement weights hold the recent ups and downs.
    """
    row = await session.execute(
        select(Rater.num_up, Rater.num_down, Rater.agreement_weight, Rater.disagreement_weight).where(
            Rater.project_id == project_id, Rater.name == ALL_RATERS
        )
    )
    up, down, recent_up, recent_down = row.one_or_none() or (0, 0, 0.0, 0.0)
    return RaterCounts(up, down), RaterCounts(recent_up, recent_down)


async def _add_to_population(session: AsyncSession, project_id: str, page: RaterCounts) -> None:
    if not page.total:
        return
    decay = rater_trust.decay_factor(page)
    values = {
        "num_up": int(page.up),
        "num_down": int(page.down),
        "agreement_weight": page.up,
        "disagreement_weight": page.down,
    }
    row = {"project_id": project_id, "name": ALL_RATERS, **values}
    decayed = {
        "agreement_weight": TABLE.c.agreement_weight * decay,
        "disagreement_weight": TABLE.c.disagreement_weight * decay,
    }
    await session.execute(_upsert(session, [row], num_up=TABLE.c.num_up, num_down=TABLE.c.num_down, **decayed))
