"""Turns store what their prompts add to an earlier turn, and are read back whole, also when that turn is erased."""

import asyncio
from itertools import pairwise
from typing import Any

import orjson
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat import histories, repository
from app.core.database import Database
from app.models import Turn
from tests.app.chat.test_conversations import HELLO, Messages, ask, follow
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, render_prompt
from tests.support.settings import change_in_place

ROOT = "/v1/chat/completions"


async def talk(harness: Harness, num_turns: int, **fields: Any) -> tuple[list[Turn], list[Messages]]:
    """Hold a chat; return the first choice of each completion, and their prompts."""
    turns = [await ask(harness, HELLO, **fields)]
    prompts: list[Messages] = [HELLO]
    for number in range(1, num_turns):
        prompts.append(follow(prompts[-1], turns[-1], f"question {number}"))
        turns.append(await ask(harness, prompts[-1], **fields))
    return turns, prompts


async def read_all(harness: Harness) -> dict[str, tuple[Messages, list[int]]]:
    async with harness.db.read() as session:
        ids = list(await session.scalars(select(Turn.id).where(Turn.deleted_at.is_(None))))
        messages, tokens = await histories.read_messages(session, ids), await histories.read_prompt_ids(session, ids)
    return {id: (messages[id], tokens[id]) for id in ids}


async def stored_text(harness: Harness) -> str:
    rows = await harness.all(Turn)
    return "".join(orjson.dumps([row.own_messages, row.reply]).decode() for row in rows)


@pytest.mark.parametrize("n", [1, 3])
async def test_each_message_is_stored_once_and_prompts_are_read_whole(
    harness: Harness, scripted: ScriptedEngine, n: int
) -> None:
    turns, prompts = await talk(harness, 4, n=n)
    text = await stored_text(harness)
    for number in range(1, 4):
        assert text.count(f"question {number}") == 1
    rows = await harness.all(Turn)
    assert len(rows) == 4 * n and sum(len(row.own_messages) for row in rows) == 4
    prompt_of = {turn.id: prompt for turn, prompt in zip(turns, prompts, strict=True)}
    stored = await read_all(harness)
    for row in rows:
        messages, tokens = stored[row.id]
        assert messages == prompt_of[row.completion_id] and len(tokens) == row.num_prompt_tokens
        assert row.num_messages == len(messages)
        if row.choice_index:
            assert row.own_prompt_ids == [] and tokens == stored[row.completion_id][1]
    for before, turn in pairwise(turns):
        whole = [*stored[before.id][1], *(before.output_ids or ())]
        assert stored[turn.id][1][: len(whole)] == whole
        assert turn.num_history_tokens == len(whole), "only what follows the reply before is stored"


async def test_an_edited_history_is_stored_from_the_first_difference(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    headers = {"x-conversation-id": "ticket-7"}
    first = await ask(harness, [{"role": "system", "content": "be brief"}, *HELLO], headers)
    edited = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "goodbye"}]
    second = await ask(harness, edited, headers)
    assert (second.history_id, second.num_history_messages) == (first.id, 1)
    assert await harness.messages(second.id) == edited
    assert await harness.prompt_ids(second.id) == render_prompt(edited)


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_erasing_a_turn_keeps_the_prompts_of_the_others(
    harness: Harness, scripted: ScriptedEngine, which: int
) -> None:
    turns, _ = await talk(harness, 4, n=2)
    before = await read_all(harness)
    assert (await harness.api.delete(f"{ROOT}/{turns[which].id}")).status_code == 200
    after = await read_all(harness)
    assert after == {id: prompt for id, prompt in before.items() if id in after} and len(after) == 6
    erased = [row for row in await harness.all(Turn) if row.deleted_at is not None]
    assert len(erased) == 2
    for row in erased:
        assert (row.own_messages, row.own_prompt_ids, row.history_id) == ([], None, None)
        assert (row.num_history_messages, row.num_history_tokens) == (0, 0)


async def test_an_erased_person_leaves_no_text_and_others_keep_theirs(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    """Two people in one conversation: what the second one's prompt holds stays, what only the first one sent goes."""
    headers = {"x-conversation-id": "shared"}
    first = await ask(harness, [{"role": "user", "content": "I am Ada"}], headers, user="ada")
    second_prompt = follow([{"role": "user", "content": "I am Ada"}], first, "and I am Bob")
    second = await ask(harness, second_prompt, headers, user="bob")
    third_prompt = follow(second_prompt, second, "my card is 4711")
    third = await ask(harness, third_prompt, headers, user="ada")
    assert (second.history_id, third.history_id) == (first.id, first.id)
    assert (await harness.api.delete("/v1/subjects/ada")).status_code == 200
    assert await harness.messages(second.id) == second_prompt
    assert "4711" not in await stored_text(harness)
    assert (await harness.api.delete("/v1/subjects/bob")).status_code == 200
    text = await stored_text(harness)
    assert not [word for word in ("Ada", "Bob", "4711") if word in text]


async def test_exports_hold_whole_prompts(harness: Harness, scripted: ScriptedEngine) -> None:
    turns, prompts = await talk(harness, 3, user="ada")
    listed = (await harness.api.get(f"{ROOT}/{turns[2].id}/messages")).json()["data"]
    assert [row["content"] for row in listed] == [message["content"] for message in prompts[2]]
    export = (await harness.api.get("/v1/subjects/ada/export")).text
    lines = [orjson.loads(line) for line in export.splitlines()]
    rows = [line for line in lines if line["object"] == "turn"]
    stored = await read_all(harness)
    assert {row["id"]: (row["messages"], row["prompt_ids"]) for row in rows} == stored


async def test_turns_of_before_are_read_and_continued(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_in_place(harness.settings, {"share_histories": False})
    turns, prompts = await talk(harness, 2, n=2)
    assert {row.history_id for row in await harness.all(Turn)} == {None}
    change_in_place(harness.settings, {"share_histories": True})
    third = await ask(harness, follow(prompts[1], turns[1]), n=2)
    choices = {row.id for row in await harness.all(Turn) if row.completion_id == turns[1].id}  # their texts are equal
    assert third.history_id in choices and len(third.own_messages) == 1
    assert await harness.messages(third.id) == follow(prompts[1], turns[1])


async def test_concurrent_turns_and_erasures_lose_no_prompt(
    harness: Harness, scripted: ScriptedEngine, db: Database
) -> None:
    """Turns that continue one turn while it is erased store their whole prompts, or are completed by the erasure."""
    for number in range(6):
        first = await ask(harness, [{"role": "user", "content": f"hello {number}"}])
        prompt = follow([{"role": "user", "content": f"hello {number}"}], first)
        asks = asyncio.gather(*(ask(harness, prompt, n=2) for _ in range(4)))
        replies, deleted = await asyncio.gather(asks, harness.api.delete(f"{ROOT}/{first.id}"))
        assert deleted.status_code == 200
        stored = await read_all(harness)
        for turn in replies:
            rows = [row for row in await harness.all(Turn) if row.completion_id == turn.id]
            for row in rows:
                messages, tokens = stored[row.id]
                assert messages == prompt and len(tokens) == row.num_prompt_tokens
        erased = {row.id for row in await harness.all(Turn) if row.deleted_at is not None}
        assert not [row for row in await harness.all(Turn) if row.history_id in erased]


async def test_a_history_that_is_being_erased_is_not_waited_for(
    harness: Harness, scripted: ScriptedEngine, db: Database
) -> None:
    if db.embedded:
        pytest.skip("SQLite has one writer")
    first = await ask(harness, HELLO)
    prompt = follow(HELLO, first)
    async with db.write() as session:
        turns = list(await session.scalars(select(Turn).where(Turn.id == first.id)))
        await repository.erase(session, turns)
        async with asyncio.timeout(5):
            second = await ask(harness, prompt)
    assert second.history_id is None and await harness.messages(second.id) == prompt


async def test_an_erasure_waits_for_a_turn_that_is_being_written(harness: Harness, db: Database) -> None:
    """Otherwise it would not see the turn, whose prompt would lose its beginning."""
    if db.embedded:
        pytest.skip("SQLite has one writer")
    first = await harness.get(Turn, (await harness.turn()).id)
    async with db.write() as session:
        connection = await session.connection()
        assert await connection.run_sync(histories.lock_histories, [first.id]) == {first.id}
        erasure = asyncio.create_task(harness.api.delete(f"{ROOT}/{first.id}"))
        await asyncio.sleep(0.3)
        assert not erasure.done()
        second = await add_child(session, first)
    assert (await erasure).status_code == 200
    row = await harness.get(Turn, second)
    assert (row.history_id, row.own_messages) == (None, [*first.own_messages, {"role": "user", "content": "more"}])


async def add_child(session: AsyncSession, first: Turn) -> str:
    columns = {column.key: getattr(first, column.key) for column in Turn.__table__.columns}
    added = {"history_id": first.id, "num_history_messages": 1, "own_messages": [{"role": "user", "content": "more"}]}
    child = Turn(**columns | added | {"id": "chatcmpl-child", "completion_id": "chatcmpl-child"})
    session.add(child)
    await session.flush()
    return child.id


async def test_a_long_chat_is_read_in_one_query(harness: Harness) -> None:
    """A chain of 1,500 turns: no recursion in Python, and as many messages as the last prompt has."""
    last = await harness.get(Turn, (await harness.turn()).id)
    rows = [
        {
            **{column.key: getattr(last, column.key) for column in Turn.__table__.columns},
            **{"id": f"chatcmpl-{at:04}", "completion_id": f"chatcmpl-{at:04}"},
            **{"history_id": f"chatcmpl-{at - 1:04}" if at else None, "num_history_messages": 2 * at},
            **{"own_messages": [{"role": "user", "content": str(at)}]},
            **{"num_history_tokens": 3 * at, "own_prompt_ids": [at], "output_ids": [-at, -at]},
        }
        for at in range(1500)
    ]
    async with harness.db.write() as session:
        session.add_all([Turn(**row) for row in rows])
    messages, tokens = await harness.messages("chatcmpl-1499"), await harness.prompt_ids("chatcmpl-1499")
    assert len(messages) == 2 * 1499 + 1 and messages[2::2] == [row["own_messages"][0] for row in rows[1:]]
    assert tokens[:7] == [0, 0, 0, 1, -1, -1, 2] and len(tokens) == 3 * 1499 + 1
    async with harness.db.write() as session:
        await session.execute(update(Turn).where(Turn.id == "chatcmpl-0700").values(num_history_messages=1))
        assert await session.scalar(select(func.count()).select_from(Turn)) == 1501
    assert len(await harness.messages("chatcmpl-0700")) == 2, "a part of the history"
