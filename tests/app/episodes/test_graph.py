"""The graph of an episode's turns: exact continuations, branches, sub-agents and compactions."""

from typing import Any

import pytest
from sqlalchemy import update

from app.episodes import graph
from app.models import Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

Messages = list[dict[str, Any]]
LONG = [
    {"role": "user", "content": "Guess a number between one and one thousand, and explain every single step of it."}
]


async def ask(
    harness: Harness, episode: dict[str, Any], messages: Messages, agent: str | None = None, **headers: str
) -> Messages:
    """Chat, and return the messages with the reply."""
    named = {"x-attune-agent": agent} if agent is not None else {}
    answer = await episodes.chat(harness, episode, named | headers, messages=messages)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return [*messages, {"role": "assistant", "content": message["content"]}]


def say(messages: Messages, text: str) -> Messages:
    return [*messages, {"role": "user", "content": text}]


async def edges(harness: Harness, episode: dict[str, Any]) -> list[tuple[int, int | None, str | None, int]]:
    """Return step, step of the parent, edge and branch of each turn."""
    shown = (await harness.api.get(f"/v1/episodes/{episode['id']}")).json()
    assert shown["has_more_turns"] is False
    step = {turn["id"]: turn["step"] for turn in shown["turns"]}
    return [(turn["step"], step.get(turn["parent_turn_id"]), turn["edge"], turn["branch"]) for turn in shown["turns"]]


async def test_interleaved_agents_are_branches_of_their_own(harness: Harness, scripted: ScriptedEngine) -> None:
    """Planner, worker, planner, worker: consecutive calls belong to different agents (pitfall: merged rows)."""
    episode = await episodes.create(harness)
    plan = await ask(harness, episode, episodes.MESSAGES, "planner")
    work = await ask(harness, episode, LONG, "worker")
    plan = await ask(harness, episode, say(plan, "the worker has begun"), "planner")
    await ask(harness, episode, say(work, "go on"), "worker")
    await ask(harness, episode, say(plan, "done?"), "planner")
    assert await edges(harness, episode) == [
        (1, None, None, 1),
        (2, None, None, 2),
        (3, 1, "exact", 1),
        (4, 2, "exact", 2),
        (5, 3, "exact", 1),
    ]


async def test_second_continuation_of_a_turn_is_a_branch(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    first = await ask(harness, episode, episodes.MESSAGES)
    for text in ("Higher.", "Lower."):
        await ask(harness, episode, say(first, text))
    assert await edges(harness, episode) == [(1, None, None, 1), (2, 1, "exact", 1), (3, 1, "exact", 2)]


async def test_each_attempt_has_its_own_graph(harness: Harness, scripted: ScriptedEngine) -> None:
    one, other = await episodes.create(harness), await episodes.create(harness)
    for episode in (one, other):
        await ask(harness, episode, say(await ask(harness, episode, episodes.MESSAGES), "Higher."))
    assert await edges(harness, one) == await edges(harness, other) == [(1, None, None, 1), (2, 1, "exact", 1)]


async def test_continuation_with_other_tokens_is_told_apart(harness: Harness, scripted: ScriptedEngine) -> None:
    """Other tools change the beginning of the prompt: its messages go on, its tokens do not."""
    episode = await episodes.create(harness)
    first = await ask(harness, episode, episodes.MESSAGES)
    tools = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}]
    await episodes.chat(harness, episode, messages=say(first, "Higher."), tools=tools)
    [_, turn] = await harness.all(Turn)
    [_, edge] = await edges(harness, episode)
    assert edge[:2] == (2, 1) and turn.prefix_reuse == "the tools have changed since the parent turn"
    assert edge[2] == ("exact" if turn.num_history_tokens == await total(harness, turn.parent_id) else "messages")


async def total(harness: Harness, turn_id: str | None) -> int:
    turn = await harness.get(Turn, turn_id)
    return (turn.num_prompt_tokens or 0) + (turn.num_output_tokens or 0)


@pytest.mark.parametrize("shared", [True, False])
async def test_exact_edge_is_what_the_tokens_say(harness: Harness, scripted: ScriptedEngine, shared: bool) -> None:
    """Without the reuse of the parent's tokens, the rendered prompt may still begin with all of them."""
    episode = await episodes.create(harness)
    await ask(harness, episode, say(await ask(harness, episode, episodes.MESSAGES), "Higher."))
    async with harness.db.write() as session:
        lost = {} if shared else {"num_history_tokens": Turn.num_history_tokens - 1}
        await session.execute(
            update(Turn).where(Turn.episode_step == 2).values(prefix_reuse="the engine did not tokenize", **lost)
        )
    assert (await edges(harness, episode))[1] == (2, 1, "exact" if shared else "messages", 1)


async def test_compaction_of_a_named_agent(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    history = await ask(harness, episode, LONG, "worker")
    await ask(harness, episode, say(history, "And now explain that once more, please."), "worker")
    summary = [{"role": "user", "content": "Summary: 7."}]
    again = await ask(harness, episode, summary, "worker")
    await ask(harness, episode, say(again, "go on"), "worker")
    assert await edges(harness, episode) == [
        (1, None, None, 1),
        (2, 1, "exact", 1),
        (3, 2, "compaction", 2),
        (4, 3, "exact", 2),
    ]


async def test_compaction_of_a_named_conversation(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    thread = {"x-conversation-id": "thread-1"}
    await ask(harness, episode, LONG, **thread)
    await ask(harness, episode, [{"role": "user", "content": "Sum."}], **thread)
    await ask(harness, episode, [*LONG, *LONG, *LONG], **thread)
    assert await edges(harness, episode) == [(1, None, None, 1), (2, 1, "compaction", 2), (3, None, None, 3)]


async def test_other_runs_of_an_agent_are_no_compactions(harness: Harness, scripted: ScriptedEngine) -> None:
    """A sub-agent that is called twice, one without a name, and one in another conversation of its client."""
    episode = await episodes.create(harness)
    await ask(harness, episode, LONG, "worker")
    await ask(harness, episode, episodes.MESSAGES, "worker")
    history = await ask(harness, episode, [*LONG, *LONG])
    await ask(harness, episode, say(history, "Higher."))
    await ask(harness, episode, [{"role": "user", "content": "hi"}])
    history = await ask(harness, episode, LONG, "critic", **{"x-conversation-id": "c-1"})
    await ask(harness, episode, say(history, "Why?"), "critic", **{"x-conversation-id": "c-1"})
    await ask(harness, episode, [{"role": "user", "content": "Is 7 right?"}], "critic", **{"x-conversation-id": "c-2"})
    assert [edge for _, _, edge, _ in await edges(harness, episode)] == [
        *(None, None, None, "exact", None),
        *(None, "exact", None),
    ]


async def test_background_task_is_a_root(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    history = await ask(harness, episode, episodes.MESSAGES)
    await ask(harness, episode, say(history, "A title, please."), **{"x-attune-task": "title"})
    await ask(harness, episode, say(history, "Higher."))
    assert await edges(harness, episode) == [(1, None, None, 1), (2, None, None, 2), (3, 1, "exact", 1)]


async def test_long_episodes_are_cut(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "MAX_TURNS", 2)
    episode = await episodes.create(harness)
    for _ in range(3):
        await ask(harness, episode, episodes.MESSAGES)
    shown = (await harness.api.get(f"/v1/episodes/{episode['id']}")).json()
    assert ([turn["step"] for turn in shown["turns"]], shown["has_more_turns"]) == ([1, 2], True)
