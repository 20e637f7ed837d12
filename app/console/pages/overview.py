"""Overview: is it serving, is it learning, and what waits for a person?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.console.access import Reader
from app.console.charts import Chart
from app.console.rendering import render_page
from app.models import EngineState, LearningMode
from app.ops.status import read_status
from app.policies.references import parse_reference
from app.policies.views import PolicyView, VersionView, view_versions
from app.training.views import TrainingView, view_training

router = APIRouter()
NUM_VERSIONS = 30  # that the line shows
PolicyQuery = Annotated[str | None, Query(min_length=1, max_length=128)]


class Task(NamedTuple):
    """Something that waits for a person, and the page where it can be done."""

    sentence: str
    path: str


@router.get("/")
async def show_overview(visit: Reader, policy: PolicyQuery = None) -> Response:
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        state = await read_status(session, chosen.project_id)
        training = await view_training(session, chosen, visit.settings)
        versions = (await view_versions(session, chosen, NUM_VERSIONS)).versions
    view = next(view for view in state["policies"] if view.name == chosen.name)
    served = [version for version in versions if version.live_at is not None]
    return await render_page(
        visit,
        "overview.html",
        "Overview",
        policy=chosen,
        policies=names,
        state=state,
        view=view,
        training=training,
        serving=next((version for version in versions if version.name == view.serving), None),
        first=served[0] if served else None,
        chart=approval_chart(versions),
        tasks=list(find_tasks(view, training, state)),
        is_new=len(versions) == 1 and not state["feedback"],
        base_url=str(visit.request.url.replace(path="/v1", query="")),
    )


def approval_chart(versions: Sequence[VersionView]) -> Chart:
    """Return the line of approval by version; versions that nobody voted on are left out."""
    rated = [version for version in versions if version.rated]
    return Chart(
        title="Approval by version",
        label="approval",
        unit="share",
        x=[version.number for version in rated],
        values=[version.approval for version in rated],
        low=[version.approval_low for version in rated],
        high=[version.approval_high for version in rated],
        limits=(0.0, 1.0),
        note="people’s votes, with 95 % intervals",
    )


def find_tasks(policy: PolicyView, training: TrainingView, state: Mapping[str, Any]) -> Iterator[Task]:
    """Yield what waits for a person, the most urgent first."""
    for engine in state["engines"]:
        if engine["state"] == EngineState.DOWN:
            yield Task(f"Engine {engine['name']} is down: {engine['reason'] or 'it sends no heartbeat'}.", "learning")
    if policy.untainted_ancestor is not None:
        sentence = f"{policy.serving} learned from data that was erased; {policy.untainted_ancestor} did not."
        yield Task(sentence, "release")
    if policy.mode == LearningMode.HALTED:
        yield Task(f"Learning is halted: {policy.mode_reason or 'no reason was given'}.", "learning")
    if policy.canary is not None:
        yield Task(f"{policy.canary} is a canary for {policy.canary_share:.0%} of the conversations.", "release")
    if policy.shadow is not None:
        yield Task(f"{policy.shadow} runs in shadow.", "release")
    if count := training.samples.quarantined:
        yield Task(f"{count} rated replies are quarantined, until an admin releases or drops them.", "learning")
    if count := state["batches"].get("quarantined"):
        yield Task(f"{count} of the newest updates failed again and again and are quarantined.", "learning")


def version_number(reference: str) -> int:
    """Example: "assistant@v12" -> 12."""
    return parse_reference(reference).number or 0
