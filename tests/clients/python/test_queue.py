"""The offline queue: what is stored is delivered, once, and what is refused is set aside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attune_client import Attune, FeedbackQueue, NotDelivered, QueueFull, Unauthorized, build

from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response

AWAY = Attune("http://127.0.0.1:9", "sk-attune-x")


async def test_votes_survive_an_outage_and_a_restart_of_the_client(
    client: Attune, api: FaultyApi, harness: Harness, tmp_path: Path
) -> None:
    turn = await harness.turn()
    with AWAY.queue(tmp_path / "votes.db", background=False) as queue:
        ids = [queue.up(turn.id, source=f"user-{number}") for number in range(30)]
        assert queue.submit(build.up(turn.id, id="mine")) == queue.submit(build.up(turn.id, id="mine")) == "mine"
        with pytest.raises(ValueError, match="other feedback with the id 'mine'"):
            queue.down(turn.id, id="mine")
        with pytest.raises(NotDelivered, match="31 pieces") as waiting:
            queue.flush(timeout=0)
        assert waiting.value.pending == queue.pending == 31
        queue._closed.set()  # the process ends without `close`
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        api.faults = ["lose_response", error_response(503)]
        queue.flush()
        assert queue.pending == 0 and not queue.refused()
    rows = await harness.all(Feedback)
    assert sorted(row.idempotency_key for row in rows) == sorted([*ids, "mine"])


async def test_background_thread_delivers_in_order(client: Attune, harness: Harness, tmp_path: Path) -> None:
    turn = await harness.turn()
    with client.queue(tmp_path / "votes.db") as queue:
        for value in (1.0, -1.0, 0.5):
            queue.score(turn.id, value, source="ada")
    assert [row.value for row in await harness.all(Feedback)] == [1.0, -1.0, 0.5]
    [effective] = [row for row in client.feedback.find(turn.id)["data"] if row["effective"]]
    assert effective["value"] == 0.5


async def test_changes_of_a_key_are_delivered_in_order(client: Attune, harness: Harness, tmp_path: Path) -> None:
    turn = await harness.turn()
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        queue.up(turn.id, key="f-1")
        queue.down(turn.id, key="f-1")
        assert queue.pending == 2
        queue.flush()
        assert not queue.refused()
    [effective] = [row for row in client.feedback.find(turn.id)["data"] if row["effective"]]
    assert effective["value"] == -1.0


async def test_withdrawals_are_delivered_in_their_place(
    client: Attune, api: FaultyApi, harness: Harness, tmp_path: Path
) -> None:
    """The vote before a withdrawal is delivered first, and one after it counts, over a restart and lost responses."""
    turn = await harness.turn()
    with AWAY.queue(tmp_path / "votes.db", background=False) as queue:
        for key in ("taken back", "voted again"):
            queue.up(turn.id, key=key, source=key)
            queue.withdraw_key(key)
        queue.up(turn.id, key="voted again", source="voted again")
        unknown = queue.withdraw_key("unknown", sent_at=5)
        assert queue.withdraw_key("unknown", sent_at=5) == unknown and queue.pending == 6
        queue._closed.set()  # the process ends without `close`
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        api.faults = ["lose_response", error_response(503), "lose_response", "lose_response"]
        queue.flush()
        assert queue.pending == 0 and [(each.id, each.status) for each in queue.refused()] == [(unknown, 404)]
    [effective] = [row for row in client.feedback.find(turn.id)["data"] if row["effective"]]
    assert effective["source"]["id"] == "voted again"


async def test_refused_feedback_is_set_aside(client: Attune, harness: Harness, tmp_path: Path) -> None:
    """An item that is refused affects no other, also if the server refuses the whole batch for its sake."""
    turn = await harness.turn()
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        first = queue.up(turn.id)
        unknown = queue.up("chatcmpl-unknown")
        unsendable = queue.comment(turn.id, "a NUL \x00 character")
        last = queue.comment(turn.id, "good")
        queue.flush()
        refused = queue.refused()
        assert [(each.id, each.status) for each in refused] == [(unknown, 404), (unsendable, 400)]
        assert "no completion" in refused[0].error["message"] and refused[0].body["value"] is True
        queue.clear_refused()
        assert not queue.refused()
        with pytest.raises(ValueError, match="JSON"):
            queue.score(turn.id, float("nan"))
        with pytest.raises(ValueError, match="surrogates not allowed"):
            queue.comment(turn.id, "half of an emoji \ud83d")
        assert queue.pending == 0
    assert [row.idempotency_key for row in await harness.all(Feedback)] == [first, last]


async def test_text_that_an_earlier_release_stored_and_cannot_be_sent_is_set_aside(
    client: Attune, harness: Harness, tmp_path: Path
) -> None:
    turn = await harness.turn()
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        body = json.dumps({"completion_id": turn.id, "kind": "comment", "value": "half \ud83d", "id": "half"})
        queue._database.execute("INSERT INTO pending (id, body) VALUES ('half', ?)", (body,))
        queue.up(turn.id, id="good")
        queue.flush()
        [refused] = queue.refused()
        assert (refused.id, refused.status, refused.error["code"]) == ("half", 400, "invalid_json")
    assert [row.idempotency_key for row in await harness.all(Feedback)] == ["good"]


async def test_withdrawn_feedback_is_logged(
    client: Attune, harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = await harness.turn()
    withdrawn = client.feedback.up(turn.id, id="withdrawn", source="ada")
    client.feedback.withdraw(withdrawn["id"])
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        queue.up(turn.id, id="withdrawn", source="ada")
        queue.up(turn.id, id="new", source="ada")
        queue.flush()
        assert queue.pending == 0 and not queue.refused()
    assert "1 pieces of feedback were withdrawn before and do not count: ['withdrawn']" in caplog.text


async def test_queue_is_bounded_and_keeps_what_a_wrong_key_cannot_deliver(
    url: str, harness: Harness, tmp_path: Path
) -> None:
    turn = await harness.turn()
    with Attune(url, "sk-attune-wrong").queue(tmp_path / "votes.db", max_items=2, background=False) as queue:
        queue.up(turn.id)
        queue.down(turn.id)
        files = list(tmp_path.glob("votes.db*"))
        assert files and {path.stat().st_mode & 0o777 for path in files} == {0o600}
        with pytest.raises(QueueFull, match="holds 2 pieces"):
            queue.up(turn.id)
        with pytest.raises(NotDelivered) as failure:
            queue.flush()
        assert isinstance(failure.value.__cause__, Unauthorized) and queue.pending == 2


async def test_votes_survive_kill_9_of_the_client(client: Attune, harness: Harness, tmp_path: Path) -> None:
    """Every vote whose id the application has seen is delivered, whether it was sent before the kill or not."""
    turn = await harness.turn()
    program = f"""
import itertools
from attune_client import Attune
queue = Attune({client._connection.base_url!r}, {harness.key!r}).queue({str(tmp_path / "votes.db")!r})
for number in itertools.count():
    print(queue.up({turn.id!r}, source=f"user-{{number}}"), flush=True)
"""
    path = str(Path(__file__).parents[3] / "clients" / "python")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path}
    )
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(60)]
    process.kill()
    seen += process.stdout.read().split()
    process.wait()
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        queue.flush()
    keys = [row.idempotency_key for row in await harness.all(Feedback)]
    assert set(seen) <= set(keys) and len(set(keys)) == len(keys) <= len(seen) + 1


def test_queue_retries_the_rest_of_a_batch(tmp_path: Path) -> None:
    """A server that takes only a part of a batch is asked again for the rest."""

    class HalfServer:
        def __init__(self) -> None:
            self.received: list[str] = []

        def batch(self, bodies):  # type: ignore[no-untyped-def]
            results = []
            for index, body in enumerate(bodies):
                status = 201 if index == 0 else 503
                if status == 201:
                    self.received.append(body["id"])
                results.append({"index": index, "status": status})
            return results

        def withdraw_key(self, key, *, sent_at=None):  # type: ignore[no-untyped-def]
            raise AssertionError("nothing is withdrawn")

    server = HalfServer()
    with FeedbackQueue(tmp_path / "votes.db", server, background=False) as queue:
        ids = [queue.up("chatcmpl-1") for _ in range(2)]
        queue.flush()
    assert server.received == ids
