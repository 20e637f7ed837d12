"""Whether an engine's chat template takes a system message behind other messages. Some refuse it."""

import time
from weakref import WeakKeyDictionary

from app.inference.engine import EngineClient
from app.inference.request import ChatCall, Sampling
from app.inference.transport import EngineRefused, EngineUnavailable

PROBE = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
PROBE_AGAIN_SECONDS = 60.0  # an engine that was started again at the same address may have another template
_answers: WeakKeyDictionary[EngineClient, tuple[float, bool]] = WeakKeyDictionary()  # when it was read, and its value


async def takes_late_system(client: EngineClient) -> bool:
    """Return whether the template renders a system message behind a user's. An engine that does not answer does."""
    known = _answers.get(client)
    if known is not None and time.monotonic() - known[0] < PROBE_AGAIN_SECONDS:
        return known[1]
    try:
        await client.tokenize(ChatCall("probe", PROBE, Sampling(1)))
        answer = True
    except EngineRefused:
        answer = False
    except EngineUnavailable:
        return True
    _answers[client] = time.monotonic(), answer
    return answer
