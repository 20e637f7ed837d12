"""A chat turn: opened before the first byte leaves, recorded once when it ends, however it ends."""

import zlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.schemas import ChatRequest
from app.config import Settings
from app.db import Database, now
from app.engine.capture import Capture
from app.engine.request import ChatCall, Sampling
from app.errors import NotFound, Unavailable
from app.models import SERVER_LOST, Turn, TurnState, new_id
from app.policies import service as policies

GREEDY_BELOW = 1e-5  # SGLang takes the likeliest token below 1e-6; the trainer divides by the temperature


@dataclass(frozen=True)
class OpenTurn:
    """A turn that is on record and on its way: whom to ask, and under which name the reply goes out."""

    id: str
    label: str
    engine_url: str
    call: ChatCall
    sampling_flaw: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {"x-completion-id": self.id, "x-policy-version": self.label}


async def open_turn(session: AsyncSession, project_id: str, request: ChatRequest, settings: Settings) -> OpenTurn:
    policy, version = await policies.resolve(session, project_id, request.model)
    engines = await policies.ready_engines(session)
    if not engines:
        raise Unavailable("No engine is ready; try again in a moment.")
    holders = [engine for engine in engines if policies.holds(engine, version)]
    label = policies.label(policy, version)
    if not holders:
        raise NotFound(f"{label} is not loaded.", code="model_not_found", param="model")
    engine = holders[_thread(request) % len(holders)]
    sampling = Sampling(
        max_tokens=request.max_completion_tokens or request.max_tokens or settings.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stops,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )
    messages = [message.plain() for message in request.messages]
    turn_id = new_id("chatcmpl")
    session.add(
        Turn(
            id=turn_id,
            completion_id=turn_id,
            project_id=project_id,
            policy_id=policy.id,
            version_id=version.id,
            engine=engine.name,
            stream=request.stream,
            messages=messages,
            sampling=sampling.body(),
        )
    )
    call = ChatCall(
        rid=turn_id,
        messages=messages,
        sampling=sampling,
        adapter=version.adapter_name,
        tools=[]
        if request.tool_choice == "none"
        else [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        tool_choice=request.tool_choice,
        logprobs=request.logprobs,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        extra_key=policy.base_model,
    )
    return OpenTurn(turn_id, label, engine.url, call, sampling_flaw(sampling))


def _thread(request: ChatRequest) -> int:
    """The same for every turn of a conversation, which so stays with one engine and its prefix cache."""
    opening = next((m for m in request.messages if m.role == "user"), request.messages[0])
    return zlib.crc32(str(opening.content).encode())


def sampling_flaw(sampling: Sampling) -> str | None:
    """The engine's log-probs are those of temperature alone: what bends sampling further was not the policy's own."""
    if sampling.temperature < GREEDY_BELOW:
        return "greedy: nothing was sampled"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "top-p or top-k cut the distribution that was sampled"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties bent the distribution that was sampled"
    return None


def storable(value: Any) -> Any:
    """A byte-level model can say NUL, which PostgreSQL cannot hold as text. The token ids keep what was said."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list) else value


async def record(
    db: Database,
    turn: OpenTurn,
    capture: Capture | None,
    state: TurnState,
    finish_reason: str | None = None,
    flaw: str | None = None,
) -> None:
    """Close the turn with what was seen. `capture` is None when the engine gave nothing."""
    values: dict[str, Any] = {
        "state": state,
        "finish_reason": finish_reason,
        "flaw": flaw or finish_reason,
        "finished_at": now(),
    }
    if capture is not None:
        values |= {
            "prompt_ids": capture.prompt_ids,
            "output_ids": capture.output_ids,
            "logprobs": capture.logprobs,
            "num_prompt_tokens": len(capture.prompt_ids),
            "num_output_tokens": len(capture.output_ids),
            "reply": storable(capture.message),
            "finish_reason": finish_reason or capture.finish_reason,
            "flaw": flaw or finish_reason or capture.flaw or turn.sampling_flaw,
        }
    async with db.write() as session:
        # A reply that outlived the sweep's patience was not lost after all.
        unfinished = or_(Turn.state == TurnState.OPEN, Turn.finish_reason == SERVER_LOST)
        await session.execute(update(Turn).where(Turn.id == turn.id, unfinished).values(**values))
