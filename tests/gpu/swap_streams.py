"""Streams of replies from one SGLang, in a process of their own, so that what is measured does not delay them."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httpx2
import torch

PROMPT, TOKENS = 64, 96


@dataclass(frozen=True)
class StreamedReply:
    """One reply of the version with this name, None for the base model.

    `times`: of the request and of each chunk, on `time.perf_counter`. `logprobs` are the engine's, of `ids`.
    """

    version: str | None
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    times: tuple[float, ...]

    @property
    def is_cut(self) -> bool:
        return len(self.ids) != TOKENS


@dataclass
class Streams:
    url: str
    key: str
    vocabulary: int
    version: str | None = None
    stopped: bool = False
    replies: list[StreamedReply] = field(default_factory=list)

    async def stream(self, number: int) -> None:
        order = torch.Generator().manual_seed(number)
        key = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(base_url=self.url, headers=key, timeout=120, trust_env=False) as api:
            while not self.stopped:
                prompt = torch.randint(1, self.vocabulary, (PROMPT,), generator=order).tolist()
                self.replies.append(await self._reply(api, self.version, tuple(prompt)))

    async def _reply(self, api: httpx2.AsyncClient, version: str | None, prompt: tuple[int, ...]) -> StreamedReply:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "return_logprob": True}
        times, last, tokens = [time.perf_counter()], "", []
        with suppress(httpx2.HTTPError):  # the reply is cut
            async with api.stream("POST", "/generate", json=body | {"lora_path": version}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
                        last = line.removeprefix("data: ")
        if last:  # each chunk repeats what came before it
            tokens = json.loads(last).get("meta_info", {}).get("output_token_logprobs", [])
        ids, logprobs = tuple(token[1] for token in tokens), tuple(token[0] for token in tokens)
        return StreamedReply(version, prompt, ids, logprobs, tuple(times))


@dataclass(frozen=True)
class StreamsProcess:
    """The parent's end."""

    connection: Connection

    def switch(self, version: str) -> None:
        """Have the next replies come from this version."""
        self.connection.send(version)

    async def stop(self) -> list[StreamedReply]:
        """Wait until the replies that run have ended, and return all."""
        self.connection.send(None)
        replies: list[StreamedReply] = await asyncio.to_thread(self.connection.recv)
        return replies


@contextmanager
def streams_process(url: str, key: str, vocabulary: int, people: int) -> Iterator[StreamsProcess]:
    """Start streams of `people` users."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, Streams(url, key, vocabulary), people)
    process = multiprocessing.get_context("spawn").Process(target=run, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # it has started
        yield StreamsProcess(ours)
    finally:
        process.terminate()


def run(connection: Connection, streams: Streams, people: int) -> None:
    asyncio.run(serve(connection, streams, people))
    connection.send(streams.replies)


async def serve(connection: Connection, streams: Streams, people: int) -> None:
    def take_command() -> None:
        streams.version = connection.recv()
        streams.stopped = streams.version is None

    asyncio.get_running_loop().add_reader(connection.fileno(), take_command)
    connection.send(None)
    await asyncio.gather(*(streams.stream(number) for number in range(people)))
