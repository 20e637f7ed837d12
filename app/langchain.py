"""ChatAttune: LangChain's ChatOpenAI for Attune. Each reply keeps its completion id, so that feedback can name it.

    model = ChatAttune(model="assistant")       # ATTUNE_URL and ATTUNE_API_KEY name the service
    reply = model.invoke("When are you open?")
    model.feedback(reply, True)

This module is client code: it imports LangChain and nothing of the service. It reads the two variables in the way in
which LangChain's own models read theirs.
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

DEFAULT_URL = "http://127.0.0.1:8700"
NO_KEY = "Attune needs an API key: pass api_key, or set ATTUNE_API_KEY."


def _base_url() -> str:
    return from_env("ATTUNE_URL", default=DEFAULT_URL)().rstrip("/").removesuffix("/v1") + "/v1"


class ChatAttune(ChatOpenAI):
    """A chat model whose replies accept feedback.

    `response_metadata["id"]` is the completion id and `["model_name"]` the version that answered, whether a reply was
    invoked, streamed, or streamed by LangGraph. `feedback` and `afeedback` send feedback on a reply.
    """

    model_name: str = Field(default="assistant", alias="model")
    openai_api_base: str | None = Field(default_factory=_base_url, alias="base_url")
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None = Field(
        default_factory=secret_from_env("ATTUNE_API_KEY", error_message=NO_KEY), alias="api_key"
    )
    stream_usage: bool | None = True

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": "ATTUNE_API_KEY"}

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        """Add the completion id, which LangChain does not copy from the last chunk."""
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        info = converted.generation_info if converted is not None else None
        if info and "finish_reason" in info and chunk.get("id"):
            info["id"] = chunk["id"]
        return converted

    def feedback(
        self,
        message: BaseMessage | str,
        value: Any,
        *,
        kind: str = "binary",
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send feedback on a reply, or on the completion with this id. Returns the feedback as it is stored.

        `fields` are further fields of the API: name, comment, source, metadata. A request that fails is sent again, and
        the feedback is stored once. Pass an `idempotency_key` if several processes may send the same feedback.
        """
        request = _request(message, value, kind, idempotency_key, fields)
        return dict(self.root_client.post("/feedback", **request))

    async def afeedback(
        self,
        message: BaseMessage | str,
        value: Any,
        *,
        kind: str = "binary",
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send feedback; the asynchronous form of `feedback`."""
        request = _request(message, value, kind, idempotency_key, fields)
        return dict(await self.root_async_client.post("/feedback", **request))


def completion_id(message: BaseMessage | str) -> str:
    """Return the completion id of a reply. Raises ValueError for a message without one."""
    id = message if isinstance(message, str) else message.response_metadata.get("id")
    if not id:
        raise ValueError("this message has no completion id: only a reply of ChatAttune takes feedback")
    return str(id)


def _request(
    message: BaseMessage | str, value: Any, kind: str, key: str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the OpenAI client's `post`."""
    body = {"completion_id": completion_id(message), "kind": kind, "value": value, **fields}
    return {"body": body, "cast_to": object, "options": {"headers": {"Idempotency-Key": key or uuid4().hex}}}
