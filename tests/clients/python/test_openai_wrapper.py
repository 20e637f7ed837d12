"""`wrap`: every kind of reply of OpenAI's clients takes feedback."""

from typing import Any

import openai
from attune_client import completion_id, wrap

from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "When are you open?"}]


async def test_replies_of_the_client(url: str, harness: Harness) -> None:
    with wrap(openai.OpenAI(base_url=f"{url}/v1", api_key=harness.key)) as client:
        completion = client.chat.completions.create(model="shop", messages=MESSAGES)
        stream = client.chat.completions.create(model="shop", messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == completion.choices[0].message.content
        with client.chat.completions.stream(model="shop", messages=MESSAGES) as helper:
            for _ in helper:
                pass
        raw = client.chat.completions.with_raw_response.create(model="shop", messages=MESSAGES)
        response = client.responses.create(model="shop", input="When are you open?")
        response_stream = client.responses.create(model="shop", input="When are you open?", stream=True)
        last = list(response_stream)[-1]
        replies: list[Any] = [completion, stream, helper, raw, response, response_stream]
        assert helper.get_final_completion().id == completion_id(helper)
        assert completion_id(response_stream)[9:] == last.response.id[5:]  # type: ignore[union-attr]
        for reply in replies:
            assert client.feedback.up(reply, source="ada")["value"] == 1.0
    assert len({row.turn_id for row in await harness.all(Feedback)}) == len(replies)


async def test_replies_of_the_asynchronous_client(url: str, harness: Harness) -> None:
    async with wrap(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=harness.key)) as client:
        completion = await client.chat.completions.create(model="shop", messages=MESSAGES)
        stream = await client.chat.completions.create(model="shop", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert completion_id(chunks[0]) == completion_id(stream)
        for reply in (completion, stream):
            assert (await client.feedback.down(reply))["value"] == -1.0
    assert len({row.turn_id for row in await harness.all(Feedback)}) == 2


async def test_comparison_of_two_replies(url: str, harness: Harness, scripted: ScriptedEngine) -> None:
    client = wrap(openai.OpenAI(base_url=f"{url}/v1", api_key=harness.key))
    one = client.chat.completions.create(model="shop", messages=MESSAGES)
    scripted.reply_text = "No idea."
    two = client.chat.completions.create(model="shop", messages=MESSAGES)
    assert client.feedback.compare(one, two)["raw_value"] == [one.id, two.id]
