"""Rewards → trust in their raters. Counts raters and quarantines bursts and improbable patterns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import case, literal
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterCounts, RaterSignal
from alignment.tolerance import sign
from app.core.database import database_time, dialect_insert
from app.core.settings import Settings
from app.models import AuditAction, Rater, RaterStanding, record_audit
from app.raters import service
from app.raters.names import is_person, is_recurring
from app.raters.service import ALL_RATERS

DAY_SECONDS = 86_400


class RaterTrust(NamedTuple):
    """`weight` from 0 to 1; `quarantine_reason`: why samples with this rater's feedback wait for an admin, or None."""

    weight: float = 1.0
    quarantine_reason: str | None = None


async def update_trust(
    session: AsyncSession, project_id: str, values: Mapping[str, Sequence[float]], settings: Settings
) -> dict[str, RaterTrust]:
    """Count the new rewards of each rater (`values`), and return how far each rater is trusted from now on.

    An admin sets a rater's standing; the checks here quarantine a rater until an admin decides. Without
    `settings.trust` no check runs, but the standings that admins set still hold.
    """
    page_counts = {
        name: RaterCounts(sum(sign(value) > 0 for value in rewards), sum(sign(value) < 0 for value in rewards))
        for name, rewards in values.items()
    }
    num_rewards = {name: len(rewards) for name, rewards in values.items() if is_person(name)}
    all_time, recent = await _read_population(session, project_id)
    trust: dict[str, RaterTrust] = {}
    for rater in await _count(session, project_id, page_counts, values):
        if settings.raters.trust and rater.standing == RaterStanding.NORMAL:
            new = page_counts[rater.name]
            previous = RaterCounts(rater.num_up - new.up, rater.num_down - new.down)
            rates = rater_trust.others_positive_rates(all_time, recent, previous)
            if (suspicion := _find_suspicion(rater, num_rewards, rates, settings)) is not None:
                await _quarantine(session, rater, suspicion)
        trust[rater.name] = _trust_of(rater, settings)
    excluded = {name for name, one in trust.items() if one.quarantine_reason is not None or one.weight == 0.0}
    excluded |= {name for name in values if not is_person(name)}
    await _add_to_population(session, project_id, rater_trust.sum_page_counts(page_counts, excluded))
    return {name: trust.get(name, newcomer_trust(settings)) for name in values}


async def record_agreement(session: AsyncSession, project_id: str, turns: Sequence[Sequence[RaterSignal]]) -> None:
    """Compare the signals about each turn, and add the agreement to the records of their raters."""
    gains: dict[str, tuple[float, float]] = {}
    for turn in turns:
        for name, (agreed, disagreed) in rater_trust.count_agreement(turn).items():
            previous = gains.get(name, (0.0, 0.0))
            gains[name] = (previous[0] + agreed, previous[1] + disagreed)
    rows = [
        {"project_id": project_id, "name": name, "agreement_weight": agreed, "disagreement_weight": disagreed}
        for name, (agreed, disagreed) in sorted(gains.items())
        if is_recurring(name)
    ]
    if rows:  # one statement for all, which need not be built anew for each number of raters
        statement = dialect_insert(session, Rater.__table__)
        sums = {
            name: Rater.__table__.c[name] + statement.excluded[name]
            for name in ("agreement_weight", "disagreement_weight")
        }
        upsert = statement.on_conflict_do_update(index_elements=["project_id", "name"], set_=sums)
        await (await session.connection()).execute(upsert, rows)


def cluster_key(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str | None:
    """Return a key that turns with nearly the same tokens share, None for an empty reply."""
    return rater_trust.minhash_signature(prompt_ids, output_ids) if output_ids else None


def newcomer_trust(settings: Settings) -> RaterTrust:
    """Return the trust in a rater without a record."""
    return RaterTrust(rater_trust.rater_weight(0.0, 0.0) if settings.raters.trust else 1.0)


def _trust_of(rater: Rater, settings: Settings) -> RaterTrust:
    is_quarantined = rater.standing == RaterStanding.QUARANTINED
    if rater.standing == RaterStanding.BLOCKED:
        return RaterTrust(0.0)
    if rater.standing == RaterStanding.TRUSTED or not settings.raters.trust:
        return RaterTrust(1.0, rater.reason if is_quarantined else None)
    weight = rater_trust.rater_weight(rater.agreement_weight, rater.disagreement_weight)
    return RaterTrust(weight, (rater.reason or "quarantined") if is_quarantined else None)


def _find_suspicion(
    rater: Rater, num_rewards: Mapping[str, int], rates: Sequence[float], settings: Settings
) -> str | None:
    """Return why the rater must be quarantined, None if no check fails.

    A burst counts every time. The other checks are skipped once an admin has accepted the rater, which leaves a
    reason on record. Programs are accepted with the API key that they use: they may send much and one-sided feedback,
    but must not contradict the other raters.
    """
    counts = RaterCounts(rater.num_up, rater.num_down, rater.agreement_weight, rater.disagreement_weight)
    one_sided = None
    if is_person(rater.name):
        if rater.num_today > settings.raters.max_rater_day:
            return f"{rater.num_today} rewards in a day, more than the limit of {settings.raters.max_rater_day}"
        if (burst := rater_trust.detect_burst(rater.name, num_rewards)) is not None:
            return burst
        one_sided = rater_trust.detect_one_sided(counts, rates)
    return None if rater.reason is not None else one_sided or rater_trust.detect_contrary(counts)


async def _quarantine(session: AsyncSession, rater: Rater, reason: str) -> None:
    """Quarantine the rater and the rater's samples that are not in a batch yet."""
    rater.standing, rater.reason = RaterStanding.QUARANTINED, reason
    project_id, name = rater.project_id, rater.name
    samples = await service.quarantine_samples(session, project_id, name, reason)
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
    session: AsyncSession, project_id: str, counts: Mapping[str, RaterCounts], values: Mapping[str, Sequence[float]]
) -> list[Rater]:
    """Count all raters of a page in one statement, in order of names, so that two workers never wait for each other."""
    day = int(await database_time(session)) // DAY_SECONDS
    rows = [
        {
            "project_id": project_id,
            "name": name,
            "num_up": int(counts[name].up),
            "num_down": int(counts[name].down),
            "counted_day": day,
            "num_today": len(values[name]),
        }
        for name in sorted(counts)
        if is_recurring(name)
    ]
    if not rows:
        return []
    num_today = case((Rater.counted_day == day, Rater.num_today), else_=0)
    previous = {"num_up": Rater.num_up, "num_down": Rater.num_down, "num_today": num_today, "counted_day": literal(0)}
    upsert = _upsert(session, rows, **previous).returning(Rater)
    return list(await session.scalars(upsert, execution_options={"populate_existing": True}))


def _upsert(session: AsyncSession, rows: Sequence[dict[str, object]], **previous: Any) -> Any:
    """Return a statement that inserts rows; of an existing row each column of `previous` becomes previous + new."""
    statement = dialect_insert(session, Rater).values(rows)
    sums = {name: value + statement.excluded[name] for name, value in previous.items()}
    return statement.on_conflict_do_update(index_elements=["project_id", "name"], set_=sums)


async def _read_population(session: AsyncSession, project_id: str) -> tuple[RaterCounts, RaterCounts]:
    """Return the counts of all raters together: of all time, and recent ones that decay.

    They are in the row ALL_RATERS, whose agreement and disagreement weights hold the recent ups and downs.
    """
    row = await session.get(Rater, (project_id, ALL_RATERS), populate_existing=True)
    if row is None:
        return RaterCounts(0, 0), RaterCounts(0, 0)
    return RaterCounts(row.num_up, row.num_down), RaterCounts(row.agreement_weight, row.disagreement_weight)


async def _add_to_population(session: AsyncSession, project_id: str, page: RaterCounts) -> None:
    if not page.total:
        return
    decay = rater_trust.decay_factor(page)
    row = {"project_id": project_id, "name": ALL_RATERS, "num_up": int(page.up), "num_down": int(page.down)}
    row |= {"agreement_weight": page.up, "disagreement_weight": page.down}
    previous = {
        "num_up": Rater.num_up,
        "num_down": Rater.num_down,
        "agreement_weight": Rater.agreement_weight * decay,
        "disagreement_weight": Rater.disagreement_weight * decay,
    }
    await session.execute(_upsert(session, [row], **previous))
