"""Learning: why it is, or is not, learning; what became of every vote; and the controls of learning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from app.console.access import Operator, Reader, Visit, form_body
from app.console.pages.overview import PolicyQuery
from app.console.rendering import redirect, render_page
from app.core.http import StrictModel
from app.core.settings import Settings
from app.core.settings.tree import printable, variable_name
from app.feedback.vote_views import ReasonCount, VotesView, view_votes
from app.models import Rater, RaterStanding
from app.raters import service as raters
from app.training import kl_guard
from app.training import service as training_service
from app.training.kl_guard import Control
from app.training.views import TrainingView, view_training, view_updates

router = APIRouter()
PATH = "/console/learning"
NUM_UPDATES = 12
NUM_RATERS = 50
CONTROLS: dict[str, Control] = {"pause": kl_guard.halt, "resume": kl_guard.resume, "trigger": training_service.trigger}
DONE = {
    "pause": "Learning is halted. The update that runs now finishes.",
    "resume": "Learning goes on.",
    "trigger": "The next update begins as soon as two rated replies are ready.",
}


class ControlAct(StrictModel):
    policy: str
    control: Literal["pause", "resume", "trigger"]
    reason: Annotated[str, Field(max_length=2000)]


class RaterAct(StrictModel):
    policy: str
    rater: Annotated[str, Field(max_length=320, pattern=r"^[^/]+/")]
    standing: RaterStanding
    reason: Annotated[str, Field(max_length=1000)]


@dataclass(frozen=True)
class Diagnosis:
    """Whether the policy learns, why, and the setting that would change it, with its value."""

    tone: Literal["good", "warn", "bad"]
    headline: str
    sentence: str
    setting: str | None = None
    variable: str | None = None
    value: object = None


@dataclass(frozen=True)
class Step:
    """A step of the funnel: votes that came so far, and those that end here, by reason."""

    name: str
    count: int
    share: float
    reasons: Sequence[ReasonCount]


def diagnose(training: TrainingView, votes: VotesView, settings: Settings) -> Diagnosis:
    """Say in one sentence why the policy is, or is not, learning. The first of these that holds decides."""
    if training.mode == "halted":
        return Diagnosis("bad", "Learning is halted", training.reason or "An operator has halted it.")
    if votes.total == 0:
        sentence = "No vote has come in yet. Learning begins with feedback: POST /v1/feedback, or label replies here."
        return Diagnosis("warn", "It cannot learn yet", sentence)
    latest = training.updates[0] if training.updates else None
    if latest is not None and latest.state == "open":
        return Diagnosis("good", "It is learning", f"An update with {latest.samples} rated replies is being trained.")
    if latest is not None and latest.state in ("quarantined", "failed", "refused"):
        sentence = f"The latest update is {latest.state}: {latest.reason or 'no reason was recorded'}"
        return Diagnosis("bad", "The latest update failed", sentence)
    if training.updates:
        diagnosis = Diagnosis("good", "It waits for the next batch", training.waiting_for)
    else:
        diagnosis = Diagnosis("warn", "It has not learned yet", training.waiting_for)
    path = training.waiting_setting
    if path is None:
        return diagnosis
    value = printable(path, attrgetter(path)(settings))
    return replace(diagnosis, setting=path, variable=variable_name(path), value=value)


def build_funnel(votes: VotesView) -> list[Step]:
    """Return what became of the votes, from all of them to those that a released version has learned from."""
    unused = [row for row in votes.by_reason if row.state == "not_learned"]
    waiting = [row for row in votes.by_reason if row.state == "waiting"]
    in_update = [row for row in waiting if row.reason in ("training", "release")]
    before_update = [row for row in waiting if row not in in_update]
    usable, taken = votes.total - votes.not_learned, votes.learned + sum(row.count for row in in_update)
    total = votes.total or 1
    return [
        Step("votes", votes.total, 1.0, []),
        Step("can be learned from", usable, usable / total, unused),
        Step("in an update", taken, taken / total, before_update),
        Step("in a released version", votes.learned, votes.learned / total, in_update),
    ]


@router.get("/learning")
async def show_learning(visit: Reader, policy: PolicyQuery = None) -> Response:
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        training = await view_training(session, chosen, visit.settings)
        updates = await view_updates(session, chosen, NUM_UPDATES)
    async with visit.db.read_snapshot() as session:
        votes = await view_votes(session, chosen)
    quarantined: list[Rater] = []
    if visit.may("content"):  # their names are those of people
        async with visit.db.read() as session:
            quarantined = await raters.list_raters(
                session, chosen.project_id, RaterStanding.QUARANTINED, None, NUM_RATERS
            )
    return await render_page(
        visit,
        "learning.html",
        "Learning",
        policy=chosen,
        policies=names,
        training=training,
        votes=votes,
        diagnosis=diagnose(training, votes, visit.settings),
        funnel=build_funnel(votes),
        updates=updates,
        raters=quarantined[:NUM_RATERS],
    )


@router.post("/learning/control")
async def control(visit: Operator, act: Annotated[ControlAct, form_body(ControlAct)]) -> Response:
    """Pause or resume learning, or let two samples be enough for the next update."""
    async with visit.context(act.policy).write() as locked:
        CONTROLS[act.control](locked, actor=visit.caller.key_prefix, reason=act.reason)
    return await _done(visit, act.policy, DONE[act.control])


@router.post("/learning/rater")
async def set_rater(visit: Operator, act: Annotated[RaterAct, form_body(RaterAct)]) -> Response:
    """Release, trust or block a rater."""
    change = (visit.caller.project_id, act.rater, act.standing, act.reason)
    _, count = await visit.db.with_long_timeout.retry_on_deadlock(
        lambda session: raters.set_standing(session, *change, actor=visit.caller.key_prefix)
    )
    return await _done(visit, act.policy, f"{act.rater} is {act.standing}; {count} rated replies changed with it.")


async def _done(visit: Visit, policy: str, notice: str) -> Response:
    return await redirect(visit, f"{PATH}?policy={policy}", notice)
