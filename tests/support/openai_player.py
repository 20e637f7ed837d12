"""A function with a loop of its own, for a process of another interpreter."""

from collections.abc import Iterator
from types import SimpleNamespace

from openai import AsyncOpenAI


def tasks(split: str, seed: int) -> Iterator[dict[str, object]]:
    """Yield three tasks."""
    return ({"id": f"{split}-{number}", "data": {"number": number}} for number in range(3))


async def play(task: SimpleNamespace, agent: SimpleNamespace, num_chats: int = 2) -> dict[str, object]:
    """Chat a few times, and reward the first reply."""
    messages: list[dict[str, str]] = []
    ids: list[str] = []
    async with AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
        for number in range(num_chats):
            messages.append({"role": "user", "content": f"Message {number} of {task.id}."})
            completion = await client.chat.completions.create(model=agent.model, messages=messages)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": completion.choices[0].message.content or ""})
            ids.append(completion.id)
    return {"reward": 0.5, "step_rewards": [{"completion_id": ids[0], "reward": 0.25}], "metrics": {"chats": len(ids)}}
