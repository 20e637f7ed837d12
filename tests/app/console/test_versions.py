"""The pages of versions: figures, the tree, one version, and older pages."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from app.console.charts import Chart
from app.console.lineage_tree import COLUMN, LANE, MARGIN, lay_out
from app.models import VersionState
from tests.support.console import sign_in
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version, publish
from tests.support.updates import rate, reject


def version(number: int, parent: int | None, state: str = "superseded") -> Any:
    return SimpleNamespace(number=number, parent=parent, state=state)


def lanes(*versions: Any, serving: int) -> list[int]:
    return [(node.y - MARGIN) // LANE for node in lay_out(versions, serving).nodes]


def test_line_to_the_serving_version_is_straight_and_branches_leave_it() -> None:
    versions = [version(0, None), version(1, 0), version(2, 1, "rejected"), version(3, 1), version(4, 3, "live")]
    assert lanes(*versions, serving=4) == [0, 0, 1, 0, 0]
    tree = lay_out(versions, 4)
    assert [node.x for node in tree.nodes] == [MARGIN + COLUMN * column for column in range(5)]
    assert tree.nodes[0].edge == "" and tree.nodes[1].edge == f"M{MARGIN} {MARGIN} H{MARGIN + COLUMN}"
    assert tree.nodes[2].description == "v2, rejected, trained from v1"


def test_branch_goes_on_in_its_lane_and_the_lane_is_used_again() -> None:
    branch = [version(2, 1, "rolled_back"), version(3, 2, "rolled_back")]
    versions = [
        version(0, None),
        version(1, 0),
        *branch,
        version(4, 1),
        version(5, 4),
        version(6, 5, "rejected"),
        version(7, 5),
    ]
    assert lanes(*versions, serving=7) == [0, 0, 1, 1, 0, 0, 1, 0]


def test_canary_continues_the_line_and_a_missing_parent_is_no_error() -> None:
    assert lanes(version(8, 7), version(9, 8, "live"), version(10, 9, "canary"), serving=9) == [0, 0, 0]


def test_chart_and_table_hold_the_same_numbers() -> None:
    chart = Chart("Approval", "approval", "share", [1, 2], [0.5, None], [0.3, None], [0.7, None])
    assert chart.data()["values"] == [0.5, None]
    assert [(row.x, row.value, row.interval) for row in chart.rows()] == [(1, "50 %", "30 % to 70 %")]


async def test_versions_are_listed_with_figures_and_reasons(harness: Harness) -> None:
    await rate(harness, "++-")
    await publish(harness)
    await reject(harness, await harness.version(VersionState.TRAINED), "its KL is too high")
    text = await (await sign_in(harness, "viewer")).text("versions")
    assert "67 % 21–94" in text, "Wilson's interval"
    assert "rejected its KL is too high" in text and "v2 ← v1" in text


async def test_first_version_is_explained(harness: Harness) -> None:
    text = await (await sign_in(harness)).text("versions")
    assert "v0 is the base model. v1 comes after the first votes" in text


async def test_page_of_a_version_says_what_it_learned_from(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.vote(turn.id, "up", source={"id": "ann"})
    await create_version(harness, turn)
    page = (await (await sign_in(harness, "operator")).get("versions/1")).text
    assert "HUMAN/ann" in page and f"/console/find?id={turn.id}" in page
    viewer = (await (await sign_in(harness, "viewer")).get("versions/1")).text
    assert "HUMAN/ann" in viewer and "/console/find" not in viewer
    assert (await (await sign_in(harness)).get("versions/7")).status_code == 404


async def test_older_versions_are_on_the_next_page(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.pages.versions.PAGE_SIZE", 2)
    for _ in range(3):
        await publish(harness)
    client = await sign_in(harness)
    page = (await client.get("versions")).text
    assert re.findall(r'<th scope="row" class="nowrap"><a href="/console/versions/(\d)', page) == ["3", "2"]
    older = (await client.get("versions?before=2")).text
    assert re.findall(r'<th scope="row" class="nowrap"><a href="/console/versions/(\d)', older) == ["1", "0"]
