"""A stock OpenAI client with two environment variables: chats in an episode, which is then ended and learned from."""

from typing import Any

import openai
import pytest

from app.models import Sample, SampleState, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate


async def test_harness_of_an_agent_needs_two_environment_variables(
    harness: Harness, scripted: ScriptedEngine, live_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await episodes.create(harness, task="guess", limits={"max_turns": 4})
    monkeypatch.setenv("OPENAI_BASE_URL", episode["base_url"].replace("http://attune", live_url))
    monkeypatch.setenv("OPENAI_API_KEY", episode["api_key"])
    async with openai.AsyncOpenAI(max_retries=2) as client:
        assert [model.id async for model in client.models.list()][:1] == ["shop"]
        messages: Any = [{"role": "user", "content": "Guess."}]
        scripted.tool_call = ("guess", '{"number": 7}')
        tool: Any = {"name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}
        first = await client.chat.completions.create(
            model="shop", messages=messages, tools=[{"type": "function", "function": tool}]
        )
        [call] = first.choices[0].message.tool_calls or []
        scripted.tool_call = None
        result = {"role": "tool", "tool_call_id": call.id, "content": "right"}
        history: Any = [*messages, first.choices[0].message.model_dump(exclude_none=True), result]
        stream = await client.chat.completions.create(model="shop", messages=history, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == scripted.reply_text
        answer = await client.responses.create(model="shop", input="Are you sure?")
        assert answer.output_text == scripted.reply_text
        side = await client.chat.completions.create(
            model="shop", messages=messages, extra_headers={"x-attune-agent": "critic"}
        )
        with pytest.raises(openai.ConflictError) as refused:
            await client.chat.completions.create(model="shop", messages=messages)
        assert refused.value.code == "episode_max_turns"
    turns = await harness.all(Turn)
    assert [(turn.episode_id, turn.episode_step) for turn in turns] == [(episode["id"], step) for step in range(1, 5)]
    assert (turns[3].id, turns[3].agent) == (side.id, "critic")
    assert turns[1].parent_id == turns[0].id == first.id
    ended = await episodes.end(harness, episode["id"], outcome=1.0)
    assert (ended.json()["end_reason"], ended.json()["num_turns"]) == ("max_turns", 4)
    await curate(harness.db, harness.settings)
    samples = await harness.all(Sample)
    assert {(sample.turn_id, sample.reward, sample.state) for sample in samples} == {
        (turn.id, 1.0, SampleState.OPEN) for turn in turns
    }
