"""A small program with SGLang's shapes and a script in place of a model: for fast tests, and for faults on demand.

Its log-probs are a fixed function of adapter, prefix and token, so that scoring a captured reply gives the captured
numbers again, and only under the adapter that spoke.
"""

import argparse
import asyncio
import re
import socket
import threading
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BASE = "scripted-base"
END_OF_TURN = 2


class Dies(Exception):
    """The connection breaks off."""


def logprob(adapter: str | None, prefix: Sequence[int], token: int) -> float:
    return shade(digest([*prefix, token], zlib.crc32(repr(adapter).encode())))


def digest(ids: Sequence[int], so_far: int) -> int:
    """Of a sequence, grown piece by piece: a long reply costs no more a token than a short one."""
    return zlib.crc32(array("q", ids).tobytes(), so_far)


def shade(number: int) -> float:
    return -0.01 - 5 * number / 2**32


@dataclass
class ScriptedEngine:
    """Set a switch, and the next request meets it."""

    api_key: str | None = None
    admin_key: str | None = None
    say: str = "We are open from nine to six."
    tool_call: tuple[str, str] | None = None  # a function's name and its arguments: said in place of words
    calls: int = 1  # how often that tool is called in one reply
    refuse: int | None = None  # every request gets this status
    hang: bool = False  # every request waits for ever
    stuck: bool = False  # the front answers, but no token comes
    pace: float = 0.0  # seconds a token
    held: Callable[["Reply"], bool] = lambda reply: False  # of a reply that is held no further token comes
    deaf: float = 0.0  # seconds until it knows of a question that it has been sent
    die_after: int | None = None  # the connection breaks after so many tokens
    nan_at: int | None = None  # this token's log-prob is not a number
    lose_logprob: bool = False  # the last log-prob never comes
    wrong_prompt: list[int] | None = None  # it says that it saw these ids
    load_fails: bool = False
    tensors: str = "serialized_named_tensors"  # what its release calls an adapter's tensors within the call
    payloads: list[dict[str, Any]] = field(default_factory=list)  # adapters that came within the call
    load_hangs: bool = False  # a load comes to its end when this is over, whether somebody still waits or not
    weights: str = "default"  # whose full weights it has
    paused: bool = False
    slow: bool = False  # weights are being loaded for as long as this says
    update_fails: set[str] = field(default_factory=set)  # versions whose weights it cannot load
    mangles: set[str] = field(default_factory=set)  # and those that it loads wrongly
    told: list[str] = field(default_factory=list)  # what was done to its weights, in order
    adapters: dict[str, str] = field(default_factory=dict)
    remember: bool = True  # keep what is heard: off for long measurements
    heard: list[dict[str, Any]] = field(default_factory=list)  # every chat and score body, in order
    tokenized: int = 0  # how often it was asked to tokenise
    aborted: set[str] = field(default_factory=set)  # every id that somebody asked to abort
    running: dict[str, "Reply"] = field(default_factory=dict)  # replies being made: what keeps the engine busy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def __post_init__(self) -> None:
        self._app = Starlette(
            routes=[
                Route("/ready", self._health),
                Route("/health_generate", self._token),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/tokenize", self._tokenize, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/load_lora_adapter", self._load, methods=["POST"]),
                Route("/load_lora_adapter_from_tensors", self._load_payload, methods=["POST"]),
                Route("/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/pause_generation", self._pause, methods=["POST"]),
                Route("/continue_generation", self._continue, methods=["POST"]),
                Route("/update_weights_from_disk", self._update, methods=["POST"]),
                Route("/running", self._running),
            ]
        )

    async def _meet(self, request: Request, key: str | None) -> Response | None:
        if self.hang:
            await asyncio.Event().wait()
        if self.refuse is not None:
            return trouble(self.refuse, "the script says no")
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def _health(self, request: Request) -> Response:
        return await self._meet(request, None) or Response(status_code=503 if self.paused else 200)

    async def _token(self, request: Request) -> Response:
        if self.stuck:
            await asyncio.Event().wait()
        return await self._health(request)

    async def _models(self, request: Request) -> Response:
        held = [{"id": BASE, "object": "model", "parent": None}]
        held += [{"id": name, "object": "model", "root": path, "parent": BASE} for name, path in self.adapters.items()]
        return await self._meet(request, self.api_key) or JSONResponse({"object": "list", "data": held})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        while self.load_hangs:
            await asyncio.sleep(0.01)
        if self.load_fails or body["lora_name"] in self.adapters:
            told = f"{body['lora_name']} cannot be loaded, or is already loaded"
            return JSONResponse({"success": False, "error_message": told}, 400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    async def _load_payload(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        if self.tensors not in body:
            return trouble(400, f"Object missing required field `{self.tensors}`")
        if self.load_fails or body["lora_name"] in self.adapters:
            return JSONResponse({"success": False, "error_message": "it is already loaded"}, 400)
        self.payloads.append(body)
        self.adapters[body["lora_name"]] = "__tensor__"
        return JSONResponse({"success": True})

    async def _unload(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        known = self.adapters.pop(body["lora_name"], None)
        return JSONResponse({"success": known is not None}, 200 if known is not None else 400)

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        self.aborted.add(body["rid"])
        if (reply := self.running.get(body["rid"])) is not None:  # like SGLang, it forgets an abort that came too early
            reply.cut = True
        return Response()

    async def _pause(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        self.paused = True
        self.told.append(f"pause {body['mode']}")
        return JSONResponse({"status": "ok"})

    async def _continue(self, request: Request) -> Response:
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        self.paused = False
        self.told.append("continue")
        return JSONResponse({"status": "ok"})

    async def _update(self, request: Request) -> Response:
        """As SGLang does, a failure costs it what it had."""
        body = await request.json()
        if refusal := await self._meet(request, self.admin_key):
            return refusal
        assert self.paused and not body["abort_all_requests"]
        while self.slow:
            await asyncio.sleep(0.005)
        name = body["weight_version"]
        fails = name in self.update_fails
        self.weights = "nothing" if fails else f"mangled {name}" if name in self.mangles else name
        self.told.append(self.weights)
        return JSONResponse({"success": not fails, "message": "as the script says"}, 400 if fails else 200)

    async def _awake(self) -> None:
        while self.paused:
            await asyncio.sleep(0.005)

    async def _running(self, request: Request) -> Response:
        """Not SGLang's: for tests and benchmarks whose engine is a process of its own."""
        return JSONResponse({"running": len(self.running)})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.tokenized += 1
        if refusal := await self._meet(request, self.api_key):
            return refusal
        ids = rendered(body["messages"], open_reply=body.get("add_generation_prompt", True))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": 4096})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.heard.append(body)
        if refusal := await self._meet(request, self.api_key):
            return refusal
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        if unknown := self._unknown(*names):
            return unknown
        await self._awake()
        answers = []
        for name, ids in zip(names, body["input_ids"], strict=True):
            scored = [
                [logprob(name or self.speaker, ids[:at], ids[at]) if at else None, ids[at], None]
                for at in range(len(ids))
            ]
            answers.append({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": scored}})
        return JSONResponse(answers)

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if self.remember:
            self.heard.append(body)
        if refusal := await self._meet(request, self.api_key) or self._unknown(body.get("lora_path")):
            return refusal
        await asyncio.sleep(self.deaf)
        await self._awake()
        reply = Reply(self, body)
        if body["stream"]:
            return StreamingResponse(reply.events(), media_type="text/event-stream")
        async for _ in reply.tokens():
            pass
        return Response(orjson.dumps(reply.whole()), media_type="application/json")

    @property
    def speaker(self) -> str | None:
        """Who speaks when no adapter is named."""
        return None if self.weights == "default" else self.weights

    def _unknown(self, *names: str | None) -> Response | None:
        if all(name is None or name in self.adapters for name in names):
            return None
        return trouble(400, f"Got LoRA adapter that has never been loaded: {names}")


ROLES = {"system": 300, "user": 301, "assistant": 302, "tool": 303}


def rendered(messages: Sequence[dict[str, Any]], *, open_reply: bool = True) -> list[int]:
    """A template of bytes: a reply is spelled otherwise here than in the words it was sampled in."""
    ids: list[int] = []
    for message in messages:
        said = (message.get("content") or "").encode() + orjson.dumps(message.get("tool_calls") or "")
        ids += [ROLES[message["role"]], *(3 + byte for byte in said), END_OF_TURN, 13]
    return [*ids, ROLES["assistant"]] if open_reply else ids


def trouble(status: int, message: str) -> Response:
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse(body, status)


class Reply:
    def __init__(self, engine: ScriptedEngine, body: dict[str, Any]) -> None:
        self.engine, self.body = engine, body
        self.prompt_ids = engine.wrong_prompt or body.get("input_ids") or rendered(body["messages"])
        self.text: list[str] = []
        self.output_ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.finish_reason = "stop"
        self.cut = False
        self.spans: list[dict[str, Any]] = []

    async def tokens(self) -> AsyncIterator[tuple[str, float | None]]:
        self.engine.running[self.body["rid"]] = self
        try:
            async for said in self._tokens():
                yield said
        finally:
            self.engine.running.pop(self.body["rid"], None)

    async def _tokens(self) -> AsyncIterator[tuple[str, float | None]]:
        words = [] if self.engine.tool_call else re.findall(r"\s*\S+", self.engine.say)
        script = [(word, 3 + zlib.crc32(word.encode()) % 50_000) for word in words] + [("", END_OF_TURN)]
        begun = self.body.get("lora_path") or self.engine.speaker
        seen = digest(self.prompt_ids, zlib.crc32(repr(begun).encode()))
        for at, (word, token) in enumerate(script):
            if self.cut:
                self.finish_reason = "abort"
                return
            if at == self.body["max_tokens"]:
                self.finish_reason = "length"
                return
            if at == self.engine.die_after:
                raise Dies
            await asyncio.sleep(self.engine.pace)
            while self.engine.held(self) and not self.cut:
                await asyncio.sleep(0.01)
            if self.cut:
                self.finish_reason = "abort"
                return
            await self.engine._awake()
            if not self.spans or self.spans[-1]["version"] != self.engine.weights:
                self.spans.append({"version": self.engine.weights, "start": at, "end": at})
            self.spans[-1]["end"] = at + 1
            seen = digest([token], seen)
            value = shade(seen)
            self.text.append(word)
            self.output_ids.append(token)
            self.logprobs.append(None if at == self.engine.nan_at else value)
            yield word, self.logprobs[-1]
        if self.engine.tool_call:
            self.finish_reason = "tool_calls"

    def _kept(self) -> list[float | None]:
        return self.logprobs[:-1] if self.engine.lose_logprob else self.logprobs

    def whole(self) -> dict[str, Any]:
        pairs = list(zip(self._kept(), self.output_ids, strict=False))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self.text), "tool_calls": self._tool_calls()},
            "logprobs": {"content": [shown(value) for value, _ in pairs]},
            "finish_reason": self.finish_reason,
            "matched_stop": END_OF_TURN,
            "prompt_token_ids": self.prompt_ids,
            "response_token_ids": self.output_ids,
            "meta_info": {
                "output_token_logprobs": [[value, token, None] for value, token in pairs],
                "weight_versions": self.spans,
            },
        }
        return self._frame("chat.completion") | {"choices": [choice], "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})
        count = 0
        async for word, value in self.tokens():
            count += 1
            lost = self.engine.lose_logprob and count == 1
            yield self._chunk({"content": word} if word else {}, logprobs=[] if lost else [shown(value)])
        for call in self._tool_calls() or ():
            yield self._chunk({"tool_calls": [call]})
        yield self._chunk({}, finish_reason=self.finish_reason)
        ids = {"input_ids": self.prompt_ids, "output_ids": [self.output_ids]}
        yield event(self._frame("chat.completion.chunk") | {"choices": [], "sglext": ids})
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield event(self._frame("chat.completion.chunk") | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _tool_calls(self) -> list[dict[str, Any]] | None:
        if self.engine.tool_call is None:
            return None
        name, arguments = self.engine.tool_call
        function = {"name": name, "arguments": arguments}
        return [
            {"id": f"call_{at + 1}", "index": at, "type": "function", "function": function}
            for at in range(self.engine.calls)
        ]

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: list[Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish_reason,
            "matched_stop": None,
        }
        return event(self._frame("chat.completion.chunk") | {"choices": [choice]})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.body["rid"], "object": kind, "created": int(time.time()), "model": self.body["model"]}

    def _usage(self) -> dict[str, int]:
        said = {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.output_ids)}
        return said | {"total_tokens": sum(said.values())}


def shown(value: float | None) -> dict[str, Any]:
    return {"token": "", "bytes": [], "logprob": value, "top_logprobs": []}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


@contextmanager
def serving(app: Any, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """Its URL, while it serves on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        config = uvicorn.Config(app, log_level="critical", lifespan=lifespan, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        server.should_exit = True
        server.force_exit = lifespan == "off"  # else what the app holds open is never closed
        thread.join()


def main() -> None:
    """`python -m tests.support.scripted_engine --port 8710`: as a process of its own, so that it shares no event loop."""
    given = argparse.ArgumentParser()
    given.add_argument("--port", type=int, required=True)
    given.add_argument("--pace", type=float, default=0.0)
    given.add_argument("--say", default=ScriptedEngine.say)
    asked = given.parse_args()
    engine = ScriptedEngine(say=asked.say, pace=asked.pace, remember=False)
    uvicorn.run(engine, host="127.0.0.1", port=asked.port, log_level="critical", lifespan="off", access_log=False)


if __name__ == "__main__":
    main()
