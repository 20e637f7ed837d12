"""The real Open WebUI with the function of connectors/openwebui, in front of the real engine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.main import create_app
from app.models import Feedback, Turn, TurnMetadata
from tests.clients.conftest import POLICY, Record, Running
from tests.clients.third_party.open_webui_server import OpenWebUI, Reply, run_open_webui
from tests.support.faulty_api import FaultyApi, error_response
from tests.support.scripted_engine import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RECONCILE_SECONDS = 10
TASKS = {"task: title_generation", "task: tags_generation", "task: follow_up_generation"}


@pytest.fixture(scope="module")
def api(attune: Running) -> FaultyApi:
    return FaultyApi(create_app(attune.settings))


@pytest.fixture(scope="module")
def open_webui(attune: Running, api: FaultyApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUI]:
    """Yield Open WebUI, set up as docs/connect/openwebui.md says."""
    home: Path = tmp_path_factory.mktemp("open_webui")
    with serve(api, lifespan="on") as url, run_open_webui(home) as open_webui:
        open_webui.sign_up()
        open_webui.connect(f"{url}/v1", attune.key, POLICY)
        open_webui.install_plugin(f"{url}/v1", attune.key, seconds=RECONCILE_SECONDS)
        yield open_webui


def find_turn(record: Record, reply: Reply) -> Turn:
    """Return the turn with the message's id that is a chat."""
    with Session(record.connection, expire_on_commit=False) as session:
        query = select(Turn).join(TurnMetadata, TurnMetadata.turn_id == Turn.id)
        query = query.where(TurnMetadata.key == "message-id", TurnMetadata.value == reply.message_id)
        [turn] = session.scalars(query.order_by(Turn.created_at, Turn.id)).all()
    return turn


def wait_for(record: Record, condition: Callable[[list[Feedback]], bool], seconds: float = 120.0) -> list[Feedback]:
    """Wait until all feedback, in the order of arrival, is as it should be, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        with Session(record.connection, expire_on_commit=False) as session:
            rows = list(session.scalars(select(Feedback).order_by(Feedback.seq)))
        if condition(rows):
            return rows
        assert time.monotonic() < deadline, [(row.kind, row.raw_value, row.turn_id, row.withdraws) for row in rows]
        time.sleep(0.2)


def wait_for_tasks(record: Record) -> set[str | None]:
    """Return the exclusion reasons of background tasks, as soon as all have come."""
    for _ in range(600):
        with Session(record.connection) as session:
            found = set(session.scalars(select(Turn.exclusion_reason).where(Turn.origin == "task")))
        if found >= TASKS:
            return found
        time.sleep(0.2)
    return found


def test_chats_are_conversations_with_the_ids_of_the_page_and_tasks_are_none(
    open_webui: OpenWebUI, record: Record
) -> None:
    first = open_webui.ask("Hello there", POLICY, tasks=True)
    second = open_webui.ask("And on Sunday?", POLICY, after=first)
    turn, follow_up = find_turn(record, first), find_turn(record, second)
    assert turn.conversation_id == follow_up.conversation_id == first.chat_id
    assert turn.end_user == follow_up.end_user == open_webui.user_id
    assert (follow_up.parent_id, turn.exclusion_reason, follow_up.exclusion_reason) == (turn.id, None, None)
    assert wait_for_tasks(record) == TASKS


def test_vote_is_given_changed_and_deleted(open_webui: OpenWebUI, record: Record) -> None:
    reply = open_webui.ask("When are you open?", POLICY)
    turn = find_turn(record, reply)
    start = len(wait_for(record, lambda rows: True))
    vote = open_webui.vote(reply, 1, POLICY)
    [row] = wait_for(record, lambda rows: len(rows) == start + 1)[start:]
    assert (row.kind, row.value, row.turn_id) == ("binary", 1.0, turn.id)
    assert (row.source_kind, row.source_id) == ("HUMAN", f"openwebui:{open_webui.user_id}")
    details = {"reason": "too_verbose", "comment": "Shorter, please.", "details": {"rating": 3}, "tags": ["hours"]}
    open_webui.change_vote(vote, reply, -1, POLICY, **details)
    row = wait_for(record, lambda rows: len(rows) == start + 2)[-1]
    assert (row.kind, row.comment, row.turn_id) == ("rating", "Shorter, please.", turn.id)
    assert row.request_metadata == {"reason": "too_verbose", "tags": "hours"}
    open_webui.delete_vote(vote)
    last = wait_for(record, lambda rows: len(rows) == start + 3)[-1]
    assert (last.kind, last.withdraws) == ("withdrawal", row.id)


def test_votes_on_a_regenerated_reply_are_also_compared(open_webui: OpenWebUI, record: Record) -> None:
    reply = open_webui.ask("Tell me a story.", POLICY)
    again = open_webui.ask("Tell me a story.", POLICY, instead_of=reply)
    turn, other = find_turn(record, reply), find_turn(record, again)
    start = len(wait_for(record, lambda rows: True))
    open_webui.vote(again, 1, POLICY)
    open_webui.vote(reply, -1, POLICY)
    rows = wait_for(record, lambda rows: len(rows) == start + 3)[start:]
    assert [(row.kind, row.raw_value) for row in rows] == [
        ("binary", True),
        ("binary", False),
        ("comparison", [other.id, turn.id]),
    ]


def test_vote_that_is_pressed_while_the_service_is_down_arrives_later(
    open_webui: OpenWebUI, record: Record, api: FaultyApi
) -> None:
    reply, other = open_webui.ask("Where are you?", POLICY), open_webui.ask("Who are you?", POLICY)
    start = len(wait_for(record, lambda rows: True))
    removed = open_webui.vote(other, 1, POLICY)
    wait_for(record, lambda rows: len(rows) == start + 1)
    api.faults = [error_response(503)] * 2
    open_webui.vote(reply, 1, POLICY)
    open_webui.delete_vote(removed)
    rows = wait_for(record, lambda rows: len(rows) == start + 3)[start:]
    assert sorted(row.kind for row in rows) == ["binary", "binary", "withdrawal"]
    assert not api.faults


def test_vote_on_a_reply_of_another_model_is_forgotten(open_webui: OpenWebUI, record: Record) -> None:
    reply = open_webui.ask("Anybody there?", POLICY)
    start = len(wait_for(record, lambda rows: True))
    foreign = Reply(reply.chat_id, "a-message-of-another-model", reply.parent_id, "")
    open_webui.vote(foreign, 1, "gpt-9")
    open_webui.vote(reply, 1, POLICY)
    [row] = wait_for(record, lambda rows: len(rows) == start + 1)[start:]
    assert row.turn_id == find_turn(record, reply).id
