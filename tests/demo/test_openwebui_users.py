"""The simulated users of `make bench-openwebui`, on a stand-in for the page that remembers the thumbs."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from tests.benchmarks import openwebui_users
from tests.benchmarks.openwebui import find_wrong
from tests.benchmarks.openwebui_users import JudgedReply, OpenWebUIUsers, UserActions, count_approved
from tests.clients.third_party.open_webui_server import OpenWebUI, Reply

REPLY = Reply("chat", "message", "question", "")


@dataclass
class Page:
    """Remembers the thumb under the reply."""

    thumbs: list[int | None] = field(default_factory=list)

    def vote(self, reply: Reply, rating: int, model: str) -> str:
        self.thumbs.append(rating)
        return "vote"

    def change_vote(self, id: str, reply: Reply, rating: int, model: str) -> None:
        self.thumbs.append(rating)

    def delete_vote(self, id: str) -> None:
        self.thumbs.append(None)


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> OpenWebUIUsers:
    tokenizer: Any = type("NoTokenizer", (), {"from_pretrained": lambda *paths, **options: None})
    monkeypatch.setattr(openwebui_users, "AutoTokenizer", tokenizer)
    return OpenWebUIUsers(cast(OpenWebUI, Page()), "assistant", "", seed=0, think_seconds=1.0)


@pytest.mark.parametrize(
    ("mistaken", "changed", "removed", "thumbs"),
    [(0, 0, 0, [1]), (1, 0, 0, [-1]), (0, 1, 0, [-1, 1]), (1, 1, 0, [-1, 1]), (0, 0, 1, [1, None])],
)
def test_what_remains_is_the_last_thumb(
    users: OpenWebUIUsers, monkeypatch: pytest.MonkeyPatch, mistaken: int, changed: int, removed: int, thumbs: list[Any]
) -> None:
    for name, share in (("MISTAKEN", mistaken), ("CHANGED", changed), ("REMOVED", removed)):
        monkeypatch.setattr(openwebui_users, name, share)
    page = Page()
    remains = users._press(Random(0), cast(OpenWebUI, page), REPLY, 1)
    assert page.thumbs == thumbs
    assert remains == thumbs[-1]
    counted = {"pressed": 1, "changed": changed, "removed": removed}
    assert {event: users.actions.events[event] for event in counted} == counted


def test_approval_is_counted_by_version_in_the_order_of_the_replies() -> None:
    judged = [
        JudgedReply("c", 3.0, True, 1),
        JudgedReply("a", 1.0, False, -1),
        JudgedReply("b", 2.0, True, None),
        JudgedReply("of another model", 0.0, True, 1),
    ]
    versions = {"a": "assistant@v0", "b": "assistant@v0", "c": "assistant@v1"}
    assert list(count_approved(versions, judged)) == [("assistant@v0", 2, 1), ("assistant@v1", 1, 1)]


def test_thumb_that_is_missing_outdated_twice_or_left_over_is_found() -> None:
    judged = [JudgedReply(id, 0.0, True, vote) for id, vote in (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", None))]
    votes = {"a": [1.0], "c": [-1.0], "d": [1.0, 1.0], "e": [1.0], "f": [1.0]}
    assert find_wrong(UserActions(judged), votes) == ["b", "c", "d", "e", "f"]
    assert find_wrong(UserActions(judged[:1]), {"a": [1.0]}) == []
    assert find_wrong(UserActions(judged[:1], unknown={"x"}), {"a": [1.0], "x": [-1.0]}) == []
