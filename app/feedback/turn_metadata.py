"""Turns by the caller's own metadata: looked up before the write, so that a broad question delays nobody else."""

from collections.abc import Sequence

from sqlalchemy import Integer, String, and_, column, exists, func, select, values
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.feedback.schemas import Choice
from app.models import Turn, TurnMetadata

Pairs = dict[str, str]
Asked = tuple[int, int, str, str]  # the number of the question, the place of the pair in it, key, value
AT_ONCE = 100  # questions in one statement: of up to 16 pairs each, well below any database's limit on parameters


async def newest(session: AsyncSession, project_id: str, asked: Sequence[Pairs]) -> list[Choice | None]:
    """For each of `asked` the newest turn that has all of its pairs, or None."""
    found: dict[int, Choice] = {}
    for start in range(0, len(asked), AT_ONCE):
        several = enumerate(asked[start : start + AT_ONCE], start)
        rows = [row for number, pairs in several for row in _rows(number, pairs)]
        found |= await _newest(session, project_id, rows)
    return [found.get(number) for number in range(len(asked))]


def _rows(number: int, pairs: Pairs) -> list[Asked]:
    """The longest value leads: it is likelier an id than a label, and the others are checked turn by turn."""
    ordered = sorted(pairs.items(), key=lambda pair: -len(pair[1]))
    return [(number, place, key, value) for place, (key, value) in enumerate(ordered)]


async def _newest(session: AsyncSession, project_id: str, rows: list[Asked]) -> dict[int, Choice]:
    columns = (column("number", Integer), column("place", Integer), column("key", String), column("value", String))
    asked = values(*columns, name="asked").data(rows).cte("asked")
    lead, other = asked.alias("lead"), asked.alias("other")
    has_it = exists().where(
        TurnMetadata.turn_id == Turn.id, TurnMetadata.key == other.c.key, TurnMetadata.value == other.c.value
    )
    lacks_one = exists().where(other.c.number == lead.c.number, other.c.place > 0, ~has_it.correlate(Turn, other))
    first = aliased(TurnMetadata)
    age = func.row_number().over(partition_by=lead.c.number, order_by=(Turn.created_at.desc(), Turn.id.desc()))
    matches = (
        select(lead.c.number, Turn.completion_id, Turn.choice_index, age.label("age"))
        .join_from(
            lead,
            first,
            and_(first.project_id == project_id, first.key == lead.c.key, first.value == lead.c.value),
        )
        .join(Turn, Turn.id == first.turn_id)
        .where(lead.c.place == 0, Turn.deleted_at.is_(None), ~lacks_one.correlate(Turn, lead))
        .subquery()
    )
    newest = select(matches.c.number, matches.c.completion_id, matches.c.choice_index).where(matches.c.age == 1)
    return {
        number: Choice(completion_id=completion_id, choice_index=choice_index)
        for number, completion_id, choice_index in await session.execute(newest)
    }
