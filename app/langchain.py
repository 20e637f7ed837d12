"""ChatAttune: LangChain's ChatOpenAI, pointed at Attune, whose replies can be judged: each keeps its completion id.

    model = ChatAttune(model="assistant")       # ATTUNE_URL and ATTUNE_API_KEY name the service
    reply = model.invoke("When are you open?")
    model.feedback(reply, True)

This file belongs to a client: it knows LangChain and nothing of the service's own code. The two variables are read the
way LangChain's own models read theirs.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

try:
    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import ChatGenerationChunk
    from langchain_core.utils import from_env, secret_from_env
    from langchain_openai import ChatOpenAI
    from pydantic import Field, SecretStr
except ImportError as error:
    raise ImportError("app.langchain needs LangChain: pip install 'attune[langchain]'") from error

HERE = "http://127.0.0.1:8700"
KEYLESS = "Attune wants an API key: pass api_key, or set ATTUNE_API_KEY."


def _base_url() -> str:
    return from_env("ATTUNE_URL", default=HERE)().rstrip("/").removesuffix("/v1") + "/v1"


class ChatAttune(ChatOpenAI):
    """`response_metadata["id"]` is the completion id and `["model_name"]` the version that spoke, whether a reply was
    invoked, streamed, or streamed under the hood by LangGraph. `feedback` and `afeedback` judge a reply by it."""

    model_name: str = Field(default="assistant", alias="model")
    openai_api_base: str | None = Field(default_factory=_base_url, alias="base_url")
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None = Field(
        default_factory=secret_from_env("ATTUNE_API_KEY", error_message=KEYLESS), alias="api_key"
    )
    stream_usage: bool | None = True

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": "ATTUNE_API_KEY"}

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        """LangChain keeps only a few fields of the last chunk: the id is not among them."""
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None and made.generation_info and "finish_reason" in made.generation_info and chunk.get("id"):
            made.generation_info["id"] = chunk["id"]
        return made

    def feedback(
        self,
        message: BaseMessage | str,
        value: Any,
        *,
        kind: str = "binary",
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Say what a reply (or the completion with this id) was worth; returns the feedback as it is on record.

        `fields` are the API's own: name, comment, source, metadata. Sent again on trouble, stored once. Give an
        `idempotency_key` where the same judgement may be sent by several processes.
        """
        body, headers = _judgement(message, value, kind, idempotency_key, fields)
        answer = self.root_client.post("/feedback", body=body, cast_to=object, options={"headers": headers})
        return dict(answer)

    async def afeedback(
        self,
        message: BaseMessage | str,
        value: Any,
        *,
        kind: str = "binary",
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """`feedback`, awaited."""
        body, headers = _judgement(message, value, kind, idempotency_key, fields)
        answer = await self.root_async_client.post("/feedback", body=body, cast_to=object, options={"headers": headers})
        return dict(answer)


def completion_id(message: BaseMessage | str) -> str:
    """The id that a reply of ChatAttune is judged by."""
    found = message if isinstance(message, str) else message.response_metadata.get("id")
    if not found:
        raise ValueError("this message has no completion id: only a reply of ChatAttune can be judged")
    return str(found)


def _judgement(
    message: BaseMessage | str, value: Any, kind: str, key: str | None, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    body = {"completion_id": completion_id(message), "kind": kind, "value": value, **fields}
    return body, {"Idempotency-Key": key or uuid4().hex}
