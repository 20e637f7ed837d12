"""Votes of user interfaces: changed, taken back, late, and on replies of other models; by a client and by a queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attune_client import AsyncAttune, Attune, FeedbackQueue
from attune_client.votes import MAX_LENGTH, Receiver, receiver_of, send_vote, source_id

from app.models import Feedback, new_id
from tests.support.deployment import Harness


@pytest.fixture(params=["client", "feedback", "queue"])
def receiver(request: pytest.FixtureRequest, client: Attune, tmp_path: Path) -> Iterator[Receiver]:
    if request.param == "queue":
        with client.queue(tmp_path / "votes.db", background=False) as queue:
            yield queue
    else:
        yield client if request.param == "client" else client.feedback


def deliver(receiver: Receiver) -> None:
    if isinstance(receiver, FeedbackQueue):
        receiver.flush()


async def test_vote_is_changed_and_taken_back(receiver: Receiver, client: Attune, harness: Harness) -> None:
    turn = await harness.turn()
    source = source_id("gradio", "ada")
    for value in (True, False, 4, "too long", None):
        send_vote(receiver, turn.id, value, key=f"{source}:{turn.id}", source=source)
    deliver(receiver)
    page = client.feedback.find(turn.id)["data"]
    votes = [(row["kind"], row["value"], row["effective"]) for row in page if row["kind"] != "withdrawal"]
    assert votes == [
        ("binary", 1.0, False),
        ("binary", -1.0, False),
        ("rating", 0.5, False),
        ("categorical", None, False),
    ]
    assert {row["source"]["id"] for row in page if row["kind"] != "withdrawal"} == {"gradio:ada"}
    send_vote(receiver, turn.id, True, key=f"{source}:{turn.id}", source=source)
    deliver(receiver)
    [effective] = [row for row in client.feedback.find(turn.id)["data"] if row["effective"]]
    assert (effective["kind"], effective["value"]) == ("binary", 1.0)


async def test_votes_on_other_replies_and_repeated_withdrawals_raise_nothing(
    receiver: Receiver, harness: Harness
) -> None:
    send_vote(receiver, "chatcmpl-of-another-model", True, key="gradio:ada:1")
    send_vote(receiver, "chatcmpl-of-another-model", None, key="gradio:ada:1")
    deliver(receiver)
    if isinstance(receiver, FeedbackQueue):
        assert receiver.pending == 0 and [each.status for each in receiver.refused()] == [404, 404]
    assert not await harness.all(Feedback)


async def test_vote_that_was_overtaken_by_a_later_one_raises_nothing(
    client: Attune, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = await harness.turn()
    send_vote(client, turn.id, False, key="k")
    monkeypatch.setattr("attune_client.votes.time.time", lambda: 1.0)
    send_vote(client, turn.id, True, key="k")
    send_vote(client, turn.id, None, key="k")
    [row] = await harness.all(Feedback)
    assert row.value == -1.0


async def test_names_of_any_length_are_accepted(client: Attune, harness: Harness) -> None:
    turn = await harness.turn()
    sources = [source_id("gradio", "ä" * 400 + end) for end in ("a", "b")]
    assert len(set(sources)) == 2 and {len(source) for source in sources} == {MAX_LENGTH}
    for source in sources:
        send_vote(client, turn.id, True, key=f"{source}:{turn.id}", source=source)
    assert [row.source_id for row in await harness.all(Feedback)] == sources


def test_asynchronous_client_is_refused() -> None:
    other = AsyncAttune("http://127.0.0.1:9", "sk-attune-x")
    for wrong in (other, other.feedback, None):
        with pytest.raises(TypeError, match="pass Attune"):
            receiver_of(wrong)  # type: ignore[arg-type]


def test_vote_fits_into_the_button_of_a_messenger() -> None:
    """Telegram's `callback_data` holds 64 bytes, Discord's `custom_id` 100 characters, Slack's `value` 2,000."""
    assert len(f"attune:down:{new_id('chatcmpl')}".encode()) <= 64
