"""ChatAttune: LangChain's ChatOpenAI for Attune. Each reply keeps its completion id, so that feedback can name it.

model = ChatAttune(model="assistant")       # ATTUNE_URL and ATTUNE_API_KEY name the service
reply = model.invoke("When are you open?")
model.feedback(reply, True)
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

try:
    import openai
    from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.utils import from_env, secret_from_env
    from langchain_openai import ChatOpenAI
    from pydantic import Field, SecretStr
except ImportError as error:
    message = "attune_client.langchain needs LangChain: pip install langchain-openai"
    raise ImportError(message) from error

from attune_client.replies import choice_index, completion_id
from attune_client.transport import DEFAULT_URL, NO_KEY


def _base_url() -> str:
    return from_env("ATTUNE_URL", default=DEFAULT_URL)().rstrip("/").removesuffix("/v1") + "/v1"


class ChatAttune(ChatOpenAI):
    """A chat model whose replies accept feedback.

    `response_metadata["id"]` is the completion id and `["model_name"]` the version that answered, whether a reply was
    invoked, streamed, or streamed by LangGraph. With `n` choices each message also has its `["choice_index"]`.
    `feedback` and `afeedback` send feedback on a reply.
    """

    model_name: str = Field(default="assistant", alias="model")
    openai_api_base: str | None = Field(default_factory=_base_url, alias="base_url")
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None = Field(
        default_factory=secret_from_env("ATTUNE_API_KEY", error_message=NO_KEY), alias="api_key"
    )
    stream_usage: bool | None = True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the module that `langchain_core.load.loads` imports; ChatOpenAI's does not have this class."""
        return ["attune_client", "langchain"]

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Name the secret ATTUNE_API_KEY: LangChain takes the name of the base class, OPENAI_API_KEY."""
        serialized = super().to_json()
        if serialized["type"] == "constructor" and "openai_api_key" in serialized["kwargs"]:
            serialized["kwargs"]["openai_api_key"] = {"lc": 1, "type": "secret", "id": ["ATTUNE_API_KEY"]}
        return serialized

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        """Add the completion id and the version to each of several choices: LangChain does so for a single one."""
        result = super()._create_chat_result(response, generation_info)
        if len(result.generations) > 1:
            names = {name: (result.llm_output or {}).get(name) for name in ("id", "model_name")}
            for index, generation in enumerate(result.generations):
                generation.message.response_metadata |= {**names, "choice_index": index}
        return result

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


def _request(
    message: BaseMessage | str, value: Any, kind: str, key: str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the OpenAI client's `post`."""
    body = {"completion_id": completion_id(message), "kind": kind, "value": value, **fields}
    if index := choice_index(message):
        body.setdefault("choice_index", index)
    return {"body": body, "cast_to": object, "options": {"headers": {"Idempotency-Key": key or uuid4().hex}}}
