"""Every query whose rows become a list has a complete order."""

from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from tests.architecture.query_order import find_unordered_queries

# By module and function, with the reason why their order is not the point.
ANY_ORDER = {
    "app/deployments/pins.py:_get_key": "two keys with the prefix, whichever, are an error",
    "app/deployments/version_router.py:_pinned_version_id": "there is one pin of each kind on the three subjects",
    "app/feedback/settled_votes.py:_find_settled": "the votes are counted, and updated as a set",
    "app/ops/webhook_events.py:create_deliveries": "old deliveries are deleted in pages until none is left",
    "workers/training/assemble.py:_find_stale_versions": "a recursive query stops at the limit, version by version",
    "app/privacy/retention.py:find_turns": "a recursive query stops at the limit, level by level",
}


def test_every_list_of_rows_has_a_complete_order() -> None:
    found = {
        f"{path.relative_to(REPOSITORY).as_posix()}:{finding.function}": f"line {finding.line}, {finding.use}"
        for folder in ("app", "workers", "demo", "tests")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for finding in find_unordered_queries(path)
    }
    assert {place: text for place, text in found.items() if place not in ANY_ORDER} == {}
    assert ANY_ORDER.keys() <= found.keys(), "these are ordered now: remove them from the list"


def planted(tmp_path: Path, body: str, module: str = "") -> list[str]:
    """Return the uses that are found in a function of these lines."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (tmp_path / "planted.py").write_text(f"{module}\nasync def read(session, turn_id):\n{lines}")
    return [finding.use for finding in find_unordered_queries(tmp_path / "planted.py")]


@pytest.mark.parametrize(
    ("body", "use"),
    [
        ("return list(await session.scalars(select(Turn)))", "list()"),
        ("return (await session.scalars(select(Turn).order_by(Turn.created_at))).all()", "returned"),
        ("return [row.id for row in await session.execute(select(Turn.id))]", "comprehension, returned"),
        ("rows = (await session.execute(select(Audit))).all()\nassert [row.action for row in rows] == ['a']", None),
        ("assert list(await session.scalars(select(Audit))) == [1]", "list()"),
        (
            "query = select(Turn)\nquery = query.where(Turn.id != turn_id)\n"
            "return (await session.scalars(query)).first()",
            None,
        ),
        ("for row in await session.scalars(select(Turn)):\n    found.append(row)", "loop"),
        ("ids = set(await session.scalars(select(Turn.id).limit(5)))", "limit"),
        ("return list(await session.scalars(select(Version).order_by(Version.number)))", "list()"),
        (
            "rows = select(Version, Policy.name).join(Policy, Policy.id == Version.policy_id).order_by(Policy.name)\n"
            "return (await session.execute(rows)).all()",
            "returned",
        ),
        (
            "counts = select(Turn.state, func.count()).group_by(Turn.state)\n"
            "return [tuple(row) for row in await session.execute(counts)]",
            "comprehension, returned",
        ),
    ],
)
def test_missing_or_incomplete_order_is_found(tmp_path: Path, body: str, use: str | None) -> None:
    [found] = planted(tmp_path, body)
    assert use is None or found == use


@pytest.mark.parametrize(
    "body",
    [
        "return list(await session.scalars(select(Turn).order_by(Turn.created_at, Turn.id)))",
        "return list(await session.scalars(select(Audit).order_by(Audit.seq.desc())))",
        "return set(await session.scalars(select(Turn.id)))",
        "return sorted(await session.scalars(select(Turn.id)))",
        "return {row.id: row for row in await session.scalars(select(Turn))}",
        "return (await session.scalars(select(Turn))).one()",
        "return len((await session.scalars(select(Turn))).all())",
        "[row] = (await session.scalars(select(Turn))).all()\nreturn row",
        "return (await session.execute(select(func.count()).where(Turn.id == turn_id))).scalar_one()",
        "of_one = (Version.policy_id == turn_id,)\n"
        "return list(await session.scalars(select(Version).where(*of_one).order_by(Version.number)))",
        "query = select(Pin, Version).join(Version, Version.id == Pin.version_id).order_by(Pin.id)\n"
        "return (await session.execute(query)).all()",
        "counts = select(Turn.state, func.count()).group_by(Turn.state).order_by(Turn.state)\n"
        "return [tuple(row) for row in await session.execute(counts)]",
        "query = apply_keyset(select(Turn), (Turn.created_at, Turn.id), None, 10)\n"
        "return (await session.scalars(query)).all()",
    ],
)
def test_complete_order_and_uses_without_order_are_not_found(tmp_path: Path, body: str) -> None:
    assert planted(tmp_path, body) == []


def test_queries_of_the_module_and_of_its_functions_are_followed(tmp_path: Path) -> None:
    body = "return list(await session.scalars(QUERY)), list(await session.scalars(build().limit(1)))"
    module = "QUERY = select(Turn)\ndef build():\n    return select(Turn).where(Turn.state == 'done')\n"
    assert planted(tmp_path, body, module) == ["limit", "list()"]
