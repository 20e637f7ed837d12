"""Chat completions by the offline sampler, in place of the service's HTTP: an environment notices no difference.

Prompts are token-exact as in the service: a chat that goes on has the prompt and the reply of the chat before, token by
token. Requests that wait at the same time are sampled together.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import orjson
import torch
from transformers import Qwen2Tokenizer

from alignment.environments.protocols import Message
from alignment.environments.service_http import ServiceAnswer, ServiceTransport
from demo.train import END
from tests.support.offline.sampler import Reply, Sampler

GATHER_SECONDS = 0.01  # requests that come within it of one another are sampled together


class SampledTurn(NamedTuple):
    """One chat completion in token space."""

    completion_id: str
    prompt_ids: tuple[int, ...]
    reply: Reply


@dataclass
class _Chat:
    """The chat of one episode, as its tokens and its number of messages."""

    prompt_ids: tuple[int, ...] = ()
    num_messages: int = 0
    turns: list[SampledTurn] = field(default_factory=list)


class SampledChats(ServiceTransport):
    """Answers chats with replies of at most `max_tokens` tokens. The API key of a chat names its episode."""

    def __init__(self, sampler: Sampler, tokenizer: Qwen2Tokenizer, seed: int, *, max_tokens: int) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._end = int(tokenizer.convert_tokens_to_ids(END))
        self._generator = torch.Generator().manual_seed(seed)
        self._max_tokens = max_tokens
        self._chats: dict[str, _Chat] = {}
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._gathering: asyncio.Task[None] | None = None

    async def request(
        self,
        method: str,
        url: str,
        key: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> ServiceAnswer:
        messages = cast("Mapping[str, Sequence[Message]]", body)["messages"]
        chat = self._chats.setdefault(key, _Chat())
        chat.prompt_ids = self._continue(chat, messages)
        chat.num_messages = len(messages) + 1  # with the reply
        self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather())
        reply = await self._waiting[key]
        turn = SampledTurn(f"{key}-{len(chat.turns)}", chat.prompt_ids, reply)
        chat.turns.append(turn)
        content = self._tokenizer.decode(reply.ids, skip_special_tokens=True)
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        usage = {"completion_tokens": len(reply.ids)}
        return ServiceAnswer(orjson.dumps({"id": turn.completion_id, "choices": [choice], "usage": usage}), False)

    def take_turns(self, key: str) -> list[SampledTurn]:
        """Return the turns of an episode, in their order, and forget it."""
        self._sampler.end_chat(key)
        return self._chats.pop(key, _Chat()).turns

    async def close(self) -> None:
        """It holds nothing open."""

    def _continue(self, chat: _Chat, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt: that of the last turn, its reply, and what is new."""
        new = [dict(message) for message in messages[chat.num_messages :]]
        text = self._tokenizer.apply_chat_template(new, tokenize=False, add_generation_prompt=True)
        if not chat.turns:
            return tuple(self._encode(str(text)))
        reply = chat.turns[-1].reply.ids
        end = () if reply[-1] == self._end else (self._end,)
        return (*chat.prompt_ids, *reply, *end, *self._encode(f"\n{text}"))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def _gather(self) -> None:
        """Sample the replies to all requests that wait, once no further one comes."""
        count = 0
        while len(self._waiting) > count:
            count = len(self._waiting)
            await asyncio.sleep(GATHER_SECONDS)
        waiting, self._waiting = self._waiting, {}
        self._gathering = None
        prompts = [self._chats[key].prompt_ids for key in waiting]
        sampled = self._sampler.sample(prompts, self._generator, chats=list(waiting), max_tokens=self._max_tokens)
        for future, [reply] in zip(waiting.values(), sampled, strict=True):
            future.set_result(reply)
