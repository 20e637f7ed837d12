"""A server with SGLang's API and a script instead of a model: for fast tests and for injected faults.

Its log-probs are a fixed function of adapter, prefix and token. Scoring a captured reply therefore gives the captured
log-probs again, and only with the adapter that generated it.
"""

import argparse
import asyncio
import re
import socket
import threading
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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


class ConnectionDropped(Exception):
    """The connection is dropped."""


def logprob(adapter: str | None, prefix: Sequence[int], token: int) -> float:
    return to_logprob(hash_ids([*prefix, token], zlib.crc32(repr(adapter).encode())))


def hash_ids(ids: Sequence[int], so_far: int) -> int:
    """Return the hash of a sequence that grows by `ids`: the cost of a token is independent of the reply's length."""
    return zlib.crc32(array("q", ids).tobytes(), so_far)


def to_logprob(number: int) -> float:
    return -0.01 - 5 * number / 2**32


@dataclass
class ScriptedEngine:
    """An ASGI application; a changed field takes effect with the next request."""

    api_key: str | None = None
    admin_key: str | None = None
    reply_text: str = "We are open from nine to six."
    reply_to: Callable[[dict[str, Any]], str] | None = None  # the text by the body of the request, instead of it
    tool_call: tuple[str, str] | None = None  # a function's name and its arguments; generated instead of the text
    num_tool_calls: int = 1  # number of these tool calls in one reply
    text_before_call: bool = False  # the text is generated before the tool call
    answers_results: bool = False  # the tool call is generated only with tools, and before the first result of one
    finish_reason: str | None = None  # of a reply that reaches its end, instead of "stop" or "tool_calls"
    matched_stop: str | int = END_OF_TURN  # what it reports to have ended a reply
    context_length: int | None = None  # the tokens of a prompt and its reply, if it says so
    takes_late_system: bool = True  # its chat template takes a system message behind other messages
    refuse_status: int | None = None  # status of the response to every request
    hang: bool = False  # every request waits forever
    stuck: bool = False  # the server responds, but generates no token
    seconds_per_token: float = 0.0
    is_blocked: Callable[["Reply"], bool] = lambda reply: False  # a blocked reply generates no further token
    accept_seconds: float = 0.0  # seconds until it knows a request that it has received
    drop_after_tokens: int | None = None  # the connection is dropped after so many tokens
    error_after_tokens: tuple[int, int] | None = None  # a stream ends after so many tokens by an error with this status
    nan_at: int | None = None  # index of the token whose log-prob is NaN
    omit_last_logprob: bool = False  # the last log-prob is missing
    reported_prompt_ids: list[int] | None = None  # prompt ids that it reports instead of the real ones
    load_fails: bool = False
    tensors_field: str = "serialized_named_tensors"  # its release's field for an adapter's tensors
    payloads: list[dict[str, Any]] = field(default_factory=list)  # adapters that were sent in a request
    load_hangs: bool = False  # a load ends when this is reset, also without a waiting client
    weights: str = "default"  # the version of its full weights
    paused: bool = False
    update_hangs: bool = False  # a weight update takes until this is reset
    failed_updates: set[str] = field(default_factory=set)  # versions whose weights fail to load
    corrupted_updates: set[str] = field(default_factory=set)  # versions whose weights are loaded wrongly
    weight_events: list[str] = field(default_factory=list)  # pauses, updates and resumptions, in order
    adapters: dict[str, str] = field(default_factory=dict)
    record_requests: bool = True  # keep `requests`; off for long measurements
    requests: list[dict[str, Any]] = field(default_factory=list)  # the body of every chat and score request, in order
    num_tokenize_requests: int = 0
    aborted: set[str] = field(default_factory=set)  # the id of every abort request
    running: dict[str, "Reply"] = field(default_factory=dict)  # running replies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def __post_init__(self) -> None:
        self._app = Starlette(
            routes=[
                Route("/ready", self._health),
                Route("/health_generate", self._health_generate),
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
                Route("/v1/loads", self._loads),
            ]
        )

    async def _check_request(self, request: Request, key: str | None) -> Response | None:
        if self.hang:
            await asyncio.Event().wait()
        if self.refuse_status is not None:
            return error_response(self.refuse_status, "the script says no")
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def _health(self, request: Request) -> Response:
        return await self._check_request(request, None) or Response(status_code=503 if self.paused else 200)

    async def _health_generate(self, request: Request) -> Response:
        if self.stuck:
            await asyncio.Event().wait()
        return await self._health(request)

    async def _models(self, request: Request) -> Response:
        models: list[dict[str, Any]] = [{"id": BASE, "object": "model", "parent": None}]
        if self.context_length is not None:
            models[0]["max_model_len"] = self.context_length
        models += [
            {"id": name, "object": "model", "root": path, "parent": BASE} for name, path in self.adapters.items()
        ]
        return await self._check_request(request, self.api_key) or JSONResponse({"object": "list", "data": models})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        while self.load_hangs:
            await asyncio.sleep(0.01)
        if self.load_fails or body["lora_name"] in self.adapters:
            message = f"{body['lora_name']} cannot be loaded, or is already loaded"
            return JSONResponse({"success": False, "error_message": message}, 400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    async def _load_payload(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        if self.tensors_field not in body:
            return error_response(400, f"Object missing required field `{self.tensors_field}`")
        if self.load_fails or body["lora_name"] in self.adapters:
            return JSONResponse({"success": False, "error_message": "it is already loaded"}, 400)
        self.payloads.append(body)
        self.adapters[body["lora_name"]] = "__tensor__"
        return JSONResponse({"success": True})

    async def _unload(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        known = self.adapters.pop(body["lora_name"], None)
        return JSONResponse({"success": known is not None}, 200 if known is not None else 400)

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        self.aborted.add(body["rid"])
        if (
            reply := self.running.get(body["rid"])
        ) is not None:  # like SGLang, it ignores an abort of an unknown request
            reply.is_aborted = True
        return Response()

    async def _pause(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        self.paused = True
        self.weight_events.append(f"pause {body['mode']}")
        return JSONResponse({"status": "ok"})

    async def _continue(self, request: Request) -> Response:
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        self.paused = False
        self.weight_events.append("continue")
        return JSONResponse({"status": "ok"})

    async def _update(self, request: Request) -> Response:
        """Load weights. As with SGLang, a failed update leaves no usable weights."""
        body = await request.json()
        if refusal := await self._check_request(request, self.admin_key):
            return refusal
        assert self.paused and not body["abort_all_requests"]
        while self.update_hangs:
            await asyncio.sleep(0.005)
        name = body["weight_version"]
        fails = name in self.failed_updates
        self.weights = "nothing" if fails else f"mangled {name}" if name in self.corrupted_updates else name
        self.weight_events.append(self.weights)
        return JSONResponse({"success": not fails, "message": "as the script says"}, 400 if fails else 200)

    async def _wait_while_paused(self) -> None:
        while self.paused:
            await asyncio.sleep(0.005)

    async def _loads(self, request: Request) -> Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return await self._check_request(request, self.api_key) or JSONResponse({"loads": [load]})

    async def _running(self, request: Request) -> Response:
        """Return the number of running replies. Not an SGLang route: for tests with the engine in another process."""
        return JSONResponse({"running": len(self.running)})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.num_tokenize_requests += 1
        if refusal := await self._check_request(request, self.api_key) or self._late_system_error(body["messages"]):
            return refusal
        ids = render_prompt(body["messages"], add_generation_prompt=body.get("add_generation_prompt", True))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": 4096})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if refusal := await self._check_request(request, self.api_key):
            return refusal
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        if unknown := self._unknown_adapter_error(*names):
            return unknown
        await self._wait_while_paused()
        results = []
        for name, ids in zip(names, body["input_ids"], strict=True):
            scored = [
                [logprob(name or self.generating_weights, ids[:at], ids[at]) if at else None, ids[at], None]
                for at in range(len(ids))
            ]
            results.append({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": scored}})
        return JSONResponse(results)

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if self.record_requests:
            self.requests.append(body)
        if refusal := (
            await self._check_request(request, self.api_key)
            or self._unknown_adapter_error(body.get("lora_path"))
            or self._late_system_error(body["messages"])
        ):
            return refusal
        await asyncio.sleep(self.accept_seconds)
        await self._wait_while_paused()
        reply = Reply(self, body)
        if body["stream"]:
            return StreamingResponse(reply.events(), media_type="text/event-stream")
        async for _ in reply.tokens():
            pass
        return Response(orjson.dumps(reply.body_json()), media_type="application/json")

    @property
    def generating_weights(self) -> str | None:
        """The weights that generate when no adapter is named."""
        return None if self.weights == "default" else self.weights

    def _unknown_adapter_error(self, *names: str | None) -> Response | None:
        if all(name is None or name in self.adapters for name in names):
            return None
        return error_response(400, f"Got LoRA adapter that has never been loaded: {names}")

    def _late_system_error(self, messages: Sequence[dict[str, Any]]) -> Response | None:
        if self.takes_late_system or all(message["role"] != "system" for message in messages[1:]):
            return None
        return error_response(400, "System message must be at the beginning.")


ROLES = {"system": 300, "user": 301, "assistant": 302, "tool": 303}


def render_prompt(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
    """Return the byte tokens of a chat template. They differ from the tokens that a reply is sampled in."""
    ids: list[int] = []
    for message in messages:
        text = (message.get("content") or "").encode() + orjson.dumps(message.get("tool_calls") or "")
        ids += [ROLES[message["role"]], *(3 + byte for byte in text), END_OF_TURN, 13]
    return [*ids, ROLES["assistant"]] if add_generation_prompt else ids


def error_response(status: int, message: str) -> Response:
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse(body, status)


class Reply:
    def __init__(self, engine: ScriptedEngine, body: dict[str, Any]) -> None:
        self.engine, self.body = engine, body
        self.prompt_ids = engine.reported_prompt_ids or body.get("input_ids") or render_prompt(body["messages"])
        self.text: list[str] = []
        self.output_ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.finish_reason = "stop"
        self.is_aborted = False
        self.spans: list[dict[str, Any]] = []

    async def tokens(self) -> AsyncIterator[tuple[str, float | None]]:
        self.engine.running[self.body["rid"]] = self
        try:
            async for item in self._tokens():
                yield item
        finally:
            self.engine.running.pop(self.body["rid"], None)

    async def _tokens(self) -> AsyncIterator[tuple[str, float | None]]:
        has_text = self.tool_call is None or self.engine.text_before_call
        reply_text = self.engine.reply_to(self.body) if self.engine.reply_to else self.engine.reply_text
        words = re.findall(r"\s*\S+", reply_text) if has_text else []
        script = [(word, 3 + zlib.crc32(word.encode()) % 50_000) for word in words] + [("", END_OF_TURN)]
        begun = self.body.get("lora_path") or self.engine.generating_weights
        hash_so_far = hash_ids(self.prompt_ids, zlib.crc32(repr(begun).encode()))
        for at, (word, token) in enumerate(script):
            if self.is_aborted:
                self.finish_reason = "abort"
                return
            if at == self.body["max_tokens"]:
                self.finish_reason = "length"
                return
            if at == self.engine.drop_after_tokens:
                raise ConnectionDropped
            await asyncio.sleep(self.engine.seconds_per_token)
            while self.engine.is_blocked(self) and not self.is_aborted:
                await asyncio.sleep(0.01)
            if self.is_aborted:
                self.finish_reason = "abort"
                return
            await self.engine._wait_while_paused()
            if not self.spans or self.spans[-1]["version"] != self.engine.weights:
                self.spans.append({"version": self.engine.weights, "start": at, "end": at})
            self.spans[-1]["end"] = at + 1
            hash_so_far = hash_ids([token], hash_so_far)
            value = to_logprob(hash_so_far)
            self.text.append(word)
            self.output_ids.append(token)
            self.logprobs.append(None if at == self.engine.nan_at else value)
            yield word, self.logprobs[-1]
        self.finish_reason = self.engine.finish_reason or ("tool_calls" if self.tool_call else "stop")

    @property
    def tool_call(self) -> tuple[str, str] | None:
        has_result = any(message["role"] == "tool" for message in self.body["messages"])
        is_text = self.engine.answers_results and (has_result or not self.body.get("tools"))
        return None if is_text else self.engine.tool_call

    def _sent_logprobs(self) -> list[float | None]:
        return self.logprobs[:-1] if self.engine.omit_last_logprob else self.logprobs

    def body_json(self) -> dict[str, Any]:
        pairs = list(zip(self._sent_logprobs(), self.output_ids, strict=False))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self.text), "tool_calls": self._tool_calls()},
            "logprobs": {"content": [logprob_entry(value) for value, _ in pairs]},
            "finish_reason": self.finish_reason,
            "matched_stop": self.engine.matched_stop,
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
            if self.engine.error_after_tokens is not None and count == self.engine.error_after_tokens[0]:
                yield encode_event({"error": {"message": "no", "code": self.engine.error_after_tokens[1]}})
                return
            count += 1
            is_omitted = self.engine.omit_last_logprob and count == 1
            yield self._chunk({"content": word} if word else {}, logprobs=[] if is_omitted else [logprob_entry(value)])
        for call in self._tool_calls() or ():
            yield self._chunk({"tool_calls": [call]})
        yield self._chunk({}, finish_reason=self.finish_reason)
        ids = {"input_ids": self.prompt_ids, "output_ids": [self.output_ids]}
        yield encode_event(self._frame("chat.completion.chunk") | {"choices": [], "sglext": ids})
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield encode_event(self._frame("chat.completion.chunk") | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _tool_calls(self) -> list[dict[str, Any]] | None:
        if self.tool_call is None:
            return None
        name, arguments = self.tool_call
        function = {"name": name, "arguments": arguments}
        return [
            {"id": f"call_{at + 1}", "index": at, "type": "function", "function": function}
            for at in range(self.engine.num_tool_calls)
        ]

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: list[Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish_reason,
            "matched_stop": None if finish_reason is None else self.engine.matched_stop,
        }
        frame = self._frame("chat.completion.chunk")
        if (self.body.get("stream_options") or {}).get("continuous_usage_stats") and "role" not in delta:
            frame["usage"] = self._usage()
        return encode_event(frame | {"choices": [choice]})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.body["rid"], "object": kind, "created": int(time.time()), "model": self.body["model"]}

    def _usage(self) -> dict[str, int]:
        usage = {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.output_ids)}
        return usage | {"total_tokens": sum(usage.values())}


def logprob_entry(value: float | None) -> dict[str, Any]:
    return {"token": "", "bytes": [], "logprob": value, "top_logprobs": []}


def encode_event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


@contextmanager
def serve(app: Any, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """Serve an ASGI application on a free local port and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="critical", lifespan=lifespan, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server has not started")
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        server.force_exit = lifespan == "off"  # otherwise the lifespan's shutdown would not run
        thread.join()


def main() -> None:
    """Run the engine as its own process: `python -m tests.support.scripted_engine --port 8710`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--say", default=ScriptedEngine.reply_text)
    args = parser.parse_args()
    engine = ScriptedEngine(reply_text=args.say, seconds_per_token=args.pace, record_requests=False)
    uvicorn.run(engine, host="127.0.0.1", port=args.port, log_level="critical", lifespan="off", access_log=False)


if __name__ == "__main__":
    main()
