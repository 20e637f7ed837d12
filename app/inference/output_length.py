"""How long a reply may be if nobody has asked for that many tokens: as long as there is room behind its prompt."""

from contextlib import suppress
from dataclasses import replace

import orjson

from app.core.errors import BadRequest
from app.inference.engine import EngineClient
from app.inference.request import ChatCall
from app.inference.transport import EngineRefused, EngineUnavailable

# What a chat template adds, estimated high: a prompt that is shorter than this estimate needs no exact count.
TEMPLATE_TOKENS = 1024
MESSAGE_TOKENS = 64
# SGLang refuses a prompt that leaves less room than this, and a streamed one only after its status 200.
MIN_ROOM = 7


async def limit_to_room(client: EngineClient, call: ChatCall) -> ChatCall:
    """Return the call with at most as many output tokens as fit behind its prompt.

    Raises BadRequest if none fits. What the engine does not tell, it decides itself.
    """
    with suppress(EngineUnavailable, EngineRefused):
        context = await client.context_length()
        if context is None or (num_prompt := await _count_prompt(client, call, context)) is None:
            return call
        room = context - num_prompt
        if room < MIN_ROOM:
            error = f"The prompt has {num_prompt} tokens, which leaves no room for a reply: the model's context length"
            raise BadRequest(f"{error} is {context} tokens.", param="messages", code="context_length_exceeded")
        return replace(call, sampling=replace(call.sampling, max_tokens=min(call.sampling.max_tokens, room)))
    return call


async def _count_prompt(client: EngineClient, call: ChatCall, context: int) -> int | None:
    """Return the number of prompt tokens; None if they certainly leave room for the reply."""
    if call.prompt_ids is not None:
        return len(call.prompt_ids)
    # No tokenizer makes more tokens than there are bytes.
    most = len(orjson.dumps([list(call.messages), list(call.tools)]))
    most += TEMPLATE_TOKENS + MESSAGE_TOKENS * len(call.messages)
    return None if most + call.sampling.max_tokens <= context else len(await client.tokenize(call))
