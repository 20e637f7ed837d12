"""Live: the newest replies and what people think of them, as they come."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import HTMLResponse, Response

from app.console.access import ContentReader
from app.console.conversations import to_line
from app.console.pages.conversation import turn_path
from app.console.pages.overview import PolicyQuery
from app.console.rendering import render, render_page
from app.core.errors import NotFound
from app.core.pagination import apply_keyset
from app.models import Feedback, Origin, Policy, RouteReason, Turn, TurnState, Version
from app.policies import repository

router = APIRouter()
PAGE_SIZE = 30
MAX_CHARS = 220  # of a message in the list


@dataclass(frozen=True)
class LiveTurn:
    """A line of the list. `up` and `down` are the numbers of votes on the reply, also replaced ones."""

    turn: Turn
    version: int
    path: str
    question: str
    reply: str
    up: int
    down: int

    @property
    def seconds(self) -> float | None:
        return None if self.turn.finished_at is None else self.turn.finished_at - self.turn.created_at

    @property
    def is_routed(self) -> bool:
        """Whether something else than the deployment chose the version."""
        return self.turn.route_reason != RouteReason.STABLE


# An empty field of the form is no filter.
VersionQuery = Annotated[str, Query(pattern=r"^(v?\d{1,9})?$")]
StateQuery = Annotated[Literal["", "open", "done", "aborted", "failed", "refused"], Query()]


async def read_turns(
    session: AsyncSession, policy: Policy, version: str, state: str, before: str | None
) -> tuple[list[LiveTurn], bool]:
    """Return the newest turns of a policy, the newest first, and whether there are older ones. Raises NotFound."""
    query = select(Turn, Version.number).join(Version, Version.id == Turn.version_id)
    query = query.where(Turn.project_id == policy.project_id, Turn.policy_id == policy.id, Turn.origin == Origin.CHAT)
    if version:
        row = await repository.find_version(session, policy.id, int(version.removeprefix("v")))
        if row is None:
            raise NotFound(f"Policy '{policy.name}' has no version {version}.")
        query = query.where(Turn.version_id == row.id)
    if state:
        query = query.where(Turn.state == state)
    last = None if before is None else await session.get(Turn, before)
    if before is not None and (last is None or last.project_id != policy.project_id):
        raise NotFound(f"There is no reply '{before}'.")
    rows = (
        await session.execute(apply_keyset(query, (Turn.created_at, Turn.id), last, PAGE_SIZE, descending=True))
    ).all()
    return await _view(session, rows[:PAGE_SIZE]), len(rows) > PAGE_SIZE


async def _view(session: AsyncSession, rows: Sequence[Any]) -> list[LiveTurn]:
    up, down = Counter[str | None](), Counter[str | None]()
    query = select(Feedback.turn_id, Feedback.value).where(Feedback.turn_id.in_([turn.id for turn, _ in rows]))
    for turn_id, value in await session.execute(
        query.where(Feedback.value.is_not(None), Feedback.emptied_at.is_(None))
    ):
        up[turn_id] += (value or 0.0) > 0
        down[turn_id] += (value or 0.0) < 0
    return [
        LiveTurn(
            turn,
            number,
            turn_path(turn),
            to_line(turn.own_messages[-1]).text[:MAX_CHARS] if turn.own_messages else "",
            to_line(turn.reply).text[:MAX_CHARS] if turn.reply else "",
            up[turn.id],
            down[turn.id],
        )
        for turn, number in rows
    ]


@router.get("/live")
async def show_live(
    visit: ContentReader,
    policy: PolicyQuery = None,
    version: VersionQuery = "",
    state: StateQuery = "",
    before: Annotated[str | None, Query(max_length=48)] = None,
    paused: bool = False,
) -> Response:
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        turns, has_more = await read_turns(session, chosen, version, state, before)
    return await render_page(
        visit,
        "live.html",
        "Live",
        policy=chosen,
        policies=names,
        turns=turns,
        older=turns[-1].turn.id if has_more else None,
        version=version,
        state=state,
        states=list(TurnState),
        is_running=before is None and not paused,
        is_first=before is None,
    )


@router.get("/live/rows")
async def show_rows(
    visit: ContentReader, policy: PolicyQuery = None, version: VersionQuery = "", state: StateQuery = ""
) -> Response:
    """The lines of the list alone, which the page asks for every few seconds."""
    chosen, _ = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        turns, _ = await read_turns(session, chosen, version, state, None)
    return HTMLResponse(render("live_rows.html", turns=turns))
