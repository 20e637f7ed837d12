"""Seals audit entries into a hash chain per project, and verifies the chain.

An entry is written without a place in the chain, by any transaction and without a lock of its own; the reconciler
seals committed entries seconds later. If the writers extended the chain themselves, each would keep the chain's lock
until its commit, and because they take it after different other locks, they could deadlock. The chain's order is that
of sealing: a transaction that commits late may have a lower `seq` than entries that are sealed already.

Somebody who may write every table can compute the chain anew. They cannot know which hash was noted elsewhere: see
`known_hash`.
"""

from typing import Literal

from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, dialect_insert
from app.core.run_each import run_each
from app.models import Audit, AuditAction, AuditChain

PAGE_SIZE = 500  # entries of a project that one transaction seals, or that are verified without a pause


class AuditVerification(BaseModel):
    object: Literal["audit.verification"] = "audit.verification"
    ok: bool
    entries: int = Field(description="sealed entries that were found intact, up to the first that was not")
    expired: int = Field(description="entries before these that retention has deleted")
    unsealed: int = Field(description="entries that are not in the chain yet; the reconciler adds them")
    erased: int = Field(description="of `entries`: those whose content was erased with a data subject")
    head: str | None = Field(description="hash of the last of these entries; keep it elsewhere for `known_hash`")
    number: int | None = Field(description="the first entry that does not fit, or the last before missing ones")
    problem: str | None


async def seal_entries(db: Database) -> None:
    """Append the committed entries of every project to its chain, at most PAGE_SIZE of each project."""
    async with db.read() as session:
        projects = list(await session.scalars(select(Audit.project_id).where(Audit.chain_hash.is_(None)).distinct()))

    async def seal(project_id: str) -> None:
        async with db.write() as session:
            await _seal_project(session, project_id)

    await run_each(sorted(projects), seal, "sealing the audit of")


async def _seal_project(session: AsyncSession, project_id: str) -> None:
    """Entries that an erasure has locked are left for the next run, so that neither waits for the other."""
    first = dialect_insert(session, AuditChain).values(project_id=project_id)
    await session.execute(first.on_conflict_do_nothing())
    chain = await session.get_one(AuditChain, project_id, with_for_update=True)
    unsealed = select(Audit).where(Audit.project_id == project_id, Audit.chain_hash.is_(None))
    entries = unsealed.order_by(Audit.seq).limit(PAGE_SIZE).with_for_update(skip_locked=True)
    for entry in await session.scalars(entries):
        entry.chain_number = chain.number = chain.number + 1
        entry.chain_hash = chain.hash = entry.compute_chain_hash(chain.hash)


async def verify_chain(db: Database, project_id: str, known_hash: str | None = None) -> AuditVerification:
    """Compute the project's chain again and report the first entry that does not fit.

    Args:
        known_hash: The hash of an entry that was sealed earlier. The chain must contain it.
    """
    async with db.read() as session:
        chain = await session.get(AuditChain, project_id) or AuditChain(
            project_id=project_id, number=0, hash="", start_number=0, start_hash=""
        )
        count = select(func.count()).where(Audit.project_id == project_id, Audit.chain_hash.is_(None))
        unsealed = await session.scalar(count) or 0
    number, hash, seq, erased = chain.start_number, chain.start_hash, None, 0
    is_known = known_hash in (None, chain.start_hash)
    async with db.read() as session:
        problem = await _find_start_problem(session, chain)
    while problem is None:
        async with db.read() as session:
            query = select(Audit).where(Audit.project_id == project_id, Audit.chain_number > number)
            page = (await session.scalars(query.order_by(Audit.chain_number).limit(PAGE_SIZE))).all()
        for entry in page:
            if (problem := _find_problem(entry, number, hash, chain)) is not None:
                seq = entry.seq
                break
            number, hash, seq = number + 1, entry.chain_hash or "", entry.seq
            erased += entry.erased_sha256 is not None
            is_known = is_known or hash == known_hash
        if not page:
            break
    if problem is None and number < chain.number:
        problem = f"{chain.number - number} entries after it are missing"
    elif problem is None and not is_known:
        problem, seq = "no entry has the hash `known_hash`: the chain was computed anew", None
    return AuditVerification(
        ok=problem is None,
        entries=number - chain.start_number,
        expired=chain.start_number,
        unsealed=unsealed,
        erased=erased,
        head=hash or None,
        number=None if problem is None else seq,
        problem=problem,
    )


async def _find_start_problem(session: AsyncSession, chain: AuditChain) -> str | None:
    """Return what is wrong with the place at which the chain starts, or None. An entry must name it."""
    if chain.start_number == 0:
        return None
    expired = (Audit.project_id == chain.project_id, Audit.action == AuditAction.AUDIT_EXPIRED)
    newest = await session.scalar(select(Audit).where(*expired).order_by(Audit.seq.desc()).limit(1))
    place = {"number": chain.start_number, "hash": chain.start_hash}
    if newest is not None and place.items() <= newest.details.items():
        return None
    return f"entries up to {chain.start_number} are missing, and no entry says that they have expired"


def _find_problem(entry: Audit, number: int, hash: str, chain: AuditChain) -> str | None:
    """Return what is wrong with the entry after the one with this number and hash, or None."""
    if entry.chain_number != number + 1:
        return "an entry before it is missing"
    if entry.chain_hash != entry.compute_chain_hash(hash) or not entry.is_erasure_valid:
        return "it was changed or moved"
    if entry.chain_number == chain.number and entry.chain_hash != chain.hash:
        return "it is not the entry that was sealed last"
    return None
