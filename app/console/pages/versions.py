"""Versions: how they differ, where each came from, and whether newer is better."""

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from app.console.access import Reader
from app.console.charts import Chart
from app.console.lineage_tree import lay_out
from app.console.pages.overview import PolicyQuery, approval_chart, version_number
from app.console.rendering import render_page
from app.models import Batch
from app.policies.references import format_reference
from app.policies.version_comparison import compare_versions
from app.policies.views import VersionView, view_policy, view_version, view_versions
from app.privacy.lineage_views import view_lineage

router = APIRouter()
PAGE_SIZE = 40
MAX_LINEAGE = 50  # votes that the page of a version lists
PARENT_KL, BASE_KL = "guard/kl", "reference_kl"
Number = Annotated[int, Path(ge=0, le=999_999_999)]
NumberQuery = Annotated[int, Query(ge=0, le=999_999_999)]


@router.get("/versions")
async def show_versions(
    visit: Reader,
    policy: PolicyQuery = None,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Response:
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        versions, has_more = await view_versions(session, chosen, PAGE_SIZE, before)
        view = await view_policy(session, chosen)
    return await render_page(
        visit,
        "versions.html",
        "Versions",
        policy=chosen,
        policies=names,
        view=view,
        versions=versions[::-1],
        charts=draw_charts(versions),
        tree=lay_out(versions, version_number(view.serving)),
        older=versions[0].number if has_more else None,
        is_newest=before is None,
        parent_kl=PARENT_KL,
        base_kl=BASE_KL,
    )


def draw_charts(versions: Sequence[VersionView]) -> list[Chart]:
    """Return the lines that have a number for some version."""

    def line(title: str, label: str, value: Callable[[VersionView], float | None], note: str) -> Chart:
        values = [value(version) for version in versions]
        return Chart(title, label, "number", [version.number for version in versions], values, note=note)

    charts = [
        approval_chart(versions),
        line("Length of a reply", "tokens", lambda version: version.mean_length or None, "mean, in tokens"),
        line("Distance from the parent", "KL", lambda version: version.metrics.get(PARENT_KL), "KL in nats per token"),
        line(
            "Distance from the base model", "KL", lambda version: version.metrics.get(BASE_KL), "KL in nats per token"
        ),
    ]
    return [chart for chart in charts if any(value is not None for value in chart.values)]


@router.get("/versions/compare")
async def compare(visit: Reader, a: NumberQuery, b: NumberQuery, policy: PolicyQuery = None) -> Response:
    """Two versions side by side: votes, rewards by source, tokens, and whether a difference is shown."""
    chosen, names = await visit.choose_policy(policy)
    references = [format_reference(chosen.name, number) for number in (a, b)]
    async with visit.db.read_snapshot() as session:
        compared = await compare_versions(session, chosen.project_id, references)
    sources = sorted({source for version in compared.data for source in version.rewards})
    return await render_page(
        visit, "comparison.html", "Versions", policy=chosen, policies=names, compared=compared, sources=sources
    )


@router.get("/versions/{number}")
async def show_version(visit: Reader, number: Number, policy: PolicyQuery = None) -> Response:
    """One version: how it was made, what it measured, and the votes that it learned from."""
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        version = await view_version(session, chosen, number)
        learned = await view_lineage(session, chosen, number, visit.settings, MAX_LINEAGE)
        batch = None if learned.batch is None else await session.get(Batch, learned.batch)
    return await render_page(
        visit,
        "version.html",
        "Versions",
        policy=chosen,
        policies=names,
        version=version,
        learned=learned,
        batch=batch,
    )
