"""A run that is cancelled: what is under way is played to its end, and nothing begins any more."""

from app.models import Episode
from tests.support.deployment import Harness
from tests.support.planned_runs import RUNS, act, claim, expire, finish, join, post, read, start
from workers.reconcile import reconcile


async def cancel(harness: Harness) -> None:
    answer = await harness.api.post(f"{RUNS}/monday/cancel")
    assert answer.status_code == 200, answer.text


async def test_attempts_under_way_are_played_to_their_end(harness: Harness) -> None:
    await join(harness, num_tasks=3, group_size=2)
    attempt = await claim(harness)
    await start(harness, attempt)
    await cancel(harness)
    view = await read(harness)
    assert view["attempts"] == {"waiting": 0, "under_way": 1, "done": 0, "lost": 0, "cancelled": 5}
    assert (await claim(harness))["id"] == attempt["id"], "the claim sent again"
    other = (await post(harness, "claim", owner="two")).json()
    assert (other["attempt"], other["is_complete"]) == (None, False), "it waits, as for any attempt under way"
    assert (await finish(harness, attempt, outcome=1.0))["state"] == "done"
    last = (await post(harness, "claim", owner="two")).json()
    assert (last["attempt"], last["is_complete"]) == (None, True)
    view = await read(harness)
    assert view["is_complete"] and view["mean_outcome"] == 1.0
    assert view["attempts"] == {"waiting": 0, "under_way": 0, "done": 1, "lost": 0, "cancelled": 5}


async def test_tries_that_are_lost_are_not_repeated(harness: Harness) -> None:
    await join(harness, num_tasks=4)
    attempts = [await claim(harness, owner=owner) for owner in ("lost", "given back", "dead", "never begun")]
    for attempt in attempts[:3]:
        await start(harness, attempt)
    await cancel(harness)
    await finish(harness, attempts[0], reason="infrastructure")
    await act(harness, attempts[1], "release")
    for attempt in attempts[2:]:
        await expire(harness, attempt)
    await reconcile(harness.db, harness.settings)
    assert (await post(harness, "claim", owner="one")).json()["attempt"] is None
    view = await read(harness)
    assert view["is_complete"] and view["attempts"]["cancelled"] == 4
    shown = (await harness.api.get(f"{RUNS}/monday/attempts")).json()["data"]
    assert [(row["state"], row["reason"]) for row in shown] == [("cancelled", "run_cancelled")] * 4
    ends = [row.end_reason for row in await harness.all(Episode)]
    assert ends == ["infrastructure", "abandoned", "infrastructure"]


async def test_cancelled_run_is_joined_no_more_and_stays_so(harness: Harness) -> None:
    await join(harness)
    await cancel(harness)
    first = (await read(harness))["cancelled_at"]
    await cancel(harness)
    assert (await read(harness))["cancelled_at"] == first is not None
    refused = await join(harness, num_tasks=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_cancelled")
    assert (await join(harness, name="tuesday")).status_code == 201
    assert (await harness.api.post(f"{RUNS}/wednesday/cancel")).status_code == 404


async def test_attempts_are_listed_in_the_order_of_tasks(harness: Harness) -> None:
    await join(harness, num_tasks=3, group_size=2)
    attempts = [await claim(harness, owner=f"owner-{number}") for number in range(4)]
    await start(harness, attempts[0])
    done = await finish(harness, attempts[0], outcome=1.0)
    await start(harness, attempts[1])
    await finish(harness, attempts[1], reason="infrastructure")
    await expire(harness, attempts[2])
    url = f"{RUNS}/monday/attempts"
    first = (await harness.api.get(url, params={"limit": 3})).json()
    second = (await harness.api.get(url, params={"limit": 3, "after": first["last_id"]})).json()
    rows = [*first["data"], *second["data"]]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert [row["id"] for row in rows] == [attempt["id"] for attempt in attempts]
    assert [(row["state"], row["is_under_way"]) for row in rows] == [
        ("done", False),
        ("open", False),
        ("open", False),
        ("open", True),
    ]
    assert [row["num_failed"] for row in rows] == [0, 1, 0, 0]
    assert rows[0] == done and rows[0]["episode"]["outcome"] == 1.0 and rows[1]["episode"] is None
    newest = (await harness.api.get(url, params={"limit": 1, "order": "desc"})).json()["data"]
    assert [row["id"] for row in newest] == [attempts[3]["id"]]
