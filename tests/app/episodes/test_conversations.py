"""Conversations inside of episodes: attempts at one task have the same messages, and stay apart."""

from typing import Any

from app.models import Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine


async def go_on(harness: Harness, scripted: ScriptedEngine, episode: dict[str, Any], **headers: str) -> Turn:
    history = [{"role": "assistant", "content": scripted.reply_text}, {"role": "user", "content": "Higher."}]
    response = await episodes.chat(harness, episode, headers, messages=[*episodes.MESSAGES, *history])
    turn: Turn = await harness.get(Turn, response.json()["id"])
    return turn


async def test_attempts_at_one_task_do_not_continue_each_other(harness: Harness, scripted: ScriptedEngine) -> None:
    one, other = await episodes.create(harness), await episodes.create(harness)
    firsts = {}
    for episode in (one, other):
        reply = (await episodes.chat(harness, episode)).json()
        firsts[episode["id"]] = await harness.get(Turn, reply["id"])
    for episode in (one, other):
        turn, first = await go_on(harness, scripted, episode), firsts[episode["id"]]
        assert (turn.parent_id, turn.conversation_id, turn.prefix_reuse) == (first.id, first.conversation_id, "exact")


async def test_named_conversation_goes_on_from_an_earlier_episode(harness: Harness, scripted: ScriptedEngine) -> None:
    one, other = await episodes.create(harness), await episodes.create(harness)
    named = {"x-conversation-id": "ada"}
    first = (await episodes.chat(harness, one, named)).json()["id"]
    turn = await go_on(harness, scripted, other, **named)
    assert (turn.episode_id, turn.parent_id, turn.conversation_id) == (other["id"], first, "ada")
