"""Simulated users of a real Open WebUI: each person has an account, asks, and presses thumbs under the replies."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from random import Random

import httpx2
from transformers import AutoTokenizer

from demo.dialogues import HELD_OUT, SimulatedUser
from demo.shop import Question
from demo.user_preferences import judge
from tests.clients.third_party.open_webui_server import OpenWebUI, Reply

log = logging.getLogger("attune.openwebui")
UNRATED = 0.1  # share of the replies
MISTAKEN, CHANGED, REMOVED = 0.01, 0.05, 0.03  # shares of the votes


@dataclass(frozen=True)
class JudgedReply:
    """A reply that a user has read. `vote`: the thumb that remains under it, if any."""

    message_id: str
    at: float
    is_approved: bool
    vote: int | None


@dataclass
class UserActions:
    """What the users did.

    Attributes:
        judged: The replies that they have read, with the thumb that remains.
        unknown: Ids of the replies whose thumb is not known, since the chat ended while it was pressed.
        events: How many thumbs they pressed, changed and removed, and how many chats ended early.
    """

    judged: list[JudgedReply] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    events: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def copy_judged(self) -> list[JudgedReply]:
        with self.lock:
            return list(self.judged)

    def add(self, event: str) -> None:
        with self.lock:
            self.events[event] += 1


class OpenWebUIUsers:
    """Concurrent people, one thread each. A person asks a few questions in one chat, and then another one comes."""

    def __init__(self, admin: OpenWebUI, model: str, tokenizer_path: str, seed: int, think_seconds: float) -> None:
        self.actions = UserActions()
        self._admin, self._model, self._seed, self._think_seconds = admin, model, seed, think_seconds
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        self._people = count(HELD_OUT * (seed + 2))
        self._stopping = threading.Event()

    def start(self, number: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in range(number)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """Let every person finish the current reply."""
        self._stopping.set()

    def _run(self, number: int) -> None:
        random = Random(f"open webui {self._seed} {number}")
        while not self._stopping.is_set():
            with self.actions.lock:
                person = next(self._people)
            try:
                self._chat(random, person)
            except (AssertionError, httpx2.HTTPError) as error:
                log.warning("a chat ended early: %s", error)
                self.actions.add("ended early")
                self._stopping.wait(1.0)

    def _chat(self, random: Random, seed: int) -> None:
        with closing(self._admin.add_user(f"person-{seed}")) as page:
            last: Reply | None = None
            for question in SimulatedUser(seed).questions():
                last = page.ask(question.text, self._model, after=last, tasks=last is None)
                self._judge(random, page, question, last)
                if self._stopping.wait(random.expovariate(1 / self._think_seconds)):
                    return

    def _judge(self, random: Random, page: OpenWebUI, question: Question, reply: Reply) -> None:
        at = time.time()
        num_tokens = len(self._tokenizer.encode(reply.content, add_special_tokens=False)) + 1  # with the end
        is_approved = judge(question, reply.content, num_tokens).approved
        vote = None
        if random.random() >= UNRATED:
            try:
                vote = self._press(random, page, reply, 1 if is_approved else -1)
            except (AssertionError, httpx2.HTTPError):
                with self.actions.lock:
                    self.actions.unknown.add(reply.message_id)
                raise
        with self.actions.lock:
            self.actions.judged.append(JudgedReply(reply.message_id, at, is_approved, vote))

    def _press(self, random: Random, page: OpenWebUI, reply: Reply, meant: int) -> int | None:
        """Press the thumb, now and then the wrong one, change it, or take it back. Return what remains."""
        is_mistake, chance = random.random() < MISTAKEN, random.random()
        rating = -meant if is_mistake or chance < CHANGED else meant
        id = page.vote(reply, rating, self._model)
        self.actions.add("pressed")
        if chance < CHANGED:
            page.change_vote(id, reply, meant, self._model)
            self.actions.add("changed")
            return meant
        if chance < CHANGED + REMOVED:
            page.delete_vote(id)
            self.actions.add("removed")
            return None
        return rating


def count_approved(versions: Mapping[str, str], judged: Sequence[JudgedReply]) -> Iterator[tuple[str, int, int]]:
    """Yield (version, replies, approved replies) in the order in which users first saw the versions.

    `versions`: the version of each reply, by the message's id.
    """
    found: dict[str, list[bool]] = {}
    for one in sorted(judged, key=lambda reply: reply.at):
        if one.message_id in versions:
            found.setdefault(versions[one.message_id], []).append(one.is_approved)
    for version, verdicts in found.items():
        yield version, len(verdicts), sum(verdicts)
