"""Bytes of a turn, and the time to read its history and to write it, with and without shared histories.

Chats of ten turns are written side by side, a turn of one kind after a turn of the other. Usage:
    python -m tests.benchmarks.histories [--chats 60] [--databases URL URL]
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, text

from app.chat.conversations import find_parent, prefix_hashes
from app.chat.histories import WHOLE_PROMPT, PromptBeginning, count_common
from app.chat.new_turn import NewTurn
from app.chat.turn_writer import TurnEnd, TurnStart, TurnWriter
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.telemetry import Telemetry
from app.inference.capture import Capture
from app.models import Origin, Policy, Turn, TurnState, Version, new_id
from app.projects.auth import Caller
from app.projects.service import bootstrap

NUM_TURNS = 10
WORDS = ("the", "open", "order", "from", "nine", "shop", "until", "bicycle", "when", "repair", "tyre", "deliver")
COLUMNS = (Turn.own_messages, Turn.own_prompt_ids, Turn.output_ids, Turn.logprobs, Turn.reply, Turn.request_metadata)


def make_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(30, 90)))


class Chat:
    """A chat whose turns are written as the service writes them: parent, start, end."""

    def __init__(self, writer: TurnWriter, db: Database, base: NewTurn, *, n: int, shares: bool) -> None:
        self._writer, self._db, self._base, self._n, self._shares = writer, db, base, n, shares
        self._caller = Caller(base.project_id, base.key_id or "", "sk-test", ("chat",), train=True)
        self._rng = random.Random(7)
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self.seconds: list[float] = []

    async def add_turn(self) -> None:
        self._messages.append({"role": "user", "content": make_text(self._rng)})
        prompt_ids = self._ids + [self._rng.randrange(50_000) for _ in range(60)]
        replies = [{"role": "assistant", "content": make_text(self._rng)} for _ in range(self._n)]
        output_ids = [[self._rng.randrange(50_000) for _ in range(60)] for _ in range(self._n)]
        messages, started = list(self._messages), time.perf_counter()
        parent = None
        if len(messages) > 1:
            parent = await self._db.run_read(lambda one: find_parent(one, messages, self._caller, "ada", None))
            assert parent is not None
        history = parent.history if parent is not None and self._shares else None
        ids = [new_id("chatcmpl") for _ in range(self._n)]
        first = history.begin(messages) if history else WHOLE_PROMPT
        other = PromptBeginning(ids[0], len(messages)) if self._shares else first
        turns = [
            replace(
                self._base,
                id=id,
                completion_id=ids[0],
                choice_index=index,
                own_messages=messages,
                history_id=(other if index else first).history_id,
                num_history_messages=(other if index else first).num_messages,
            )
            for index, id in enumerate(ids)
        ]
        await self._writer.record_start(TurnStart(turns))
        ends = []
        for index, (turn, reply, output) in enumerate(zip(turns, replies, output_ids, strict=True)):
            shared: Sequence[int] = prompt_ids if index and self._shares else history.token_ids if history else ()
            capture = Capture(prompt_ids, output, [-0.5] * 60, reply["content"], [], "stop", [])
            prefix_hash = prefix_hashes([*messages, reply])[-1]
            num_tokens = count_common(shared, prompt_ids)
            ends.append(
                TurnEnd(
                    turn.id,
                    TurnState.DONE,
                    capture,
                    prefix_hash=prefix_hash,
                    history_id=turn.history_id,
                    num_history_tokens=num_tokens,
                )
            )
        await asyncio.gather(*(self._writer.record_end(end) for end in ends))
        self.seconds.append(time.perf_counter() - started)
        self._messages.append(replies[0])
        self._ids = [*prompt_ids, *output_ids[0]]


async def create_base(db: Database) -> NewTurn:
    async with db.write() as session:
        await bootstrap(session, "shop", "model")
    async with db.read() as session:
        policy, version = (await session.scalars(select(Policy))).one(), (await session.scalars(select(Version))).one()
    return NewTurn(
        id="",
        completion_id="",
        choice_index=0,
        project_id=policy.project_id,
        policy_id=policy.id,
        version_id=version.id,
        origin=Origin.CHAT,
        engine="engine-0",
        own_messages=[],
        sampling={"temperature": 1.0},
        key_id="key-1",
        end_user="ada",
    )


async def column_bytes(db: Database) -> dict[str, float]:
    """Return the mean bytes of each large column, as stored."""
    size = func.length if db.embedded else func.pg_column_size
    async with db.read() as session:
        row = (await session.execute(select(*[func.avg(func.coalesce(size(one), 0)) for one in COLUMNS]))).one()
    return {column.key: float(value) for column, value in zip(COLUMNS, row, strict=True)}


async def database_bytes(db: Database) -> int:
    async with db.engine.connect() as connection:
        if db.embedded:
            pages = (
                "SELECT sum(pgsize) FROM dbstat WHERE name IN (SELECT name FROM sqlite_master WHERE tbl_name = 'turns')"
            )
            return int((await connection.execute(text(pages))).scalar_one())
        return int((await connection.execute(text("SELECT pg_total_relation_size('turns')"))).scalar_one())


async def measure(urls: tuple[str, str], n: int, num_chats: int) -> None:
    """Write the same chats to two databases, alternating between them; the first one shares histories."""
    results: list[tuple[str, list[float], int, dict[str, float]]] = []
    dbs = [Database(url) for url in urls]
    writers = [TurnWriter(db, Telemetry()) for db in dbs]
    bases = [await create_base(db) for db in dbs]
    seconds: list[list[float]] = [[], []]
    for _ in range(num_chats):
        chats = [Chat(writers[at], dbs[at], bases[at], n=n, shares=at == 0) for at in (0, 1)]
        for _ in range(NUM_TURNS):
            for chat in chats:
                await chat.add_turn()
        for at in (0, 1):
            seconds[at] += chats[at].seconds
    for at, name in enumerate(("shared", "whole")):
        results.append((name, seconds[at], await database_bytes(dbs[at]), await column_bytes(dbs[at])))
        await dbs[at].close()
    count = num_chats * NUM_TURNS
    for name, times, size, columns in results:
        centiles = statistics.quantiles(times, n=100)
        detail = ", ".join(f"{key} {value:.0f}" for key, value in columns.items())
        print(
            f"{urls[0].split(':')[0]:20} n={n} {name:7} {size / count:8.0f} bytes a completion, "
            f"{statistics.median(times) * 1e3:.2f} / {centiles[98] * 1e3:.2f} ms median / p99; bytes a turn: {detail}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--databases", nargs=2, help="two empty databases; two SQLite files by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, 4):
            urls = arguments.databases or [f"sqlite+aiosqlite:///{Path(folder) / f'{at}-{n}.db'}" for at in (0, 1)]
            for url in urls:
                upgrade(url)
            asyncio.run(measure((urls[0], urls[1]), n, arguments.chats))
            if arguments.databases:
                break  # the databases are no longer empty


if __name__ == "__main__":
    main()
