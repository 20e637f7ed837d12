"""Assistant's messages with tool calls, as they are on the OpenAI wire."""

import json
from typing import Any

from alignment.environments.tools.base import EpisodeContext, Tool
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.toolbox import CallRecord, Toolbox

EPISODE = EpisodeContext("ep-1")


def assistant(*calls: tuple[str, object]) -> dict[str, Any]:
    """Return a message that calls tools by name. Arguments that are a text are sent as they are."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


async def call_one(
    tool: Tool[Any], arguments: object, limits: ToolLimits | None = None, episode: EpisodeContext = EPISODE
) -> CallRecord:
    """Call a tool once in an episode of its own. Raises InfrastructureFailure."""
    async with Toolbox([tool], limits).open(episode) as tools:
        [message] = await tools.execute(assistant((tool.name, arguments)))
        [record] = tools.records
        assert message == {"role": "tool", "tool_call_id": "call-0", "content": record.result.text}
        return record
