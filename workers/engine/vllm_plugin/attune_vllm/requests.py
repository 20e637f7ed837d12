"""Changes to how vLLM's server takes requests."""

from http import HTTPStatus
from pathlib import Path
from typing import Any

PROMPT_IDS_FIELD = "attune_prompt_ids"


def accept_prompt_ids() -> None:
    """Let chat requests bring the ids of their prompt, in `vllm_xargs`, in place of what the template renders."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    render = OpenAIServingChat.render_chat_request

    async def render_chat_request(self: Any, request: Any) -> Any:
        ids = (request.vllm_xargs or {}).pop(PROMPT_IDS_FIELD, None)
        result = await render(self, request)
        if ids and isinstance(result, tuple):  # otherwise it is an error
            _, engine_inputs = result
            for engine_input in engine_inputs:
                engine_input["prompt_token_ids"] = list(ids)
                engine_input.pop("prompt", None)
        return result

    OpenAIServingChat.render_chat_request = render_chat_request


def refuse_lost_adapters() -> None:
    """Refuse requests for an adapter whose folder is gone: the engine ends if it must read it again, after an
    eviction."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    check = BaseServing._check_model

    async def check_model(self: Any, request: Any) -> Any:
        adapter = self.models.lora_requests.get(request.model)
        if adapter is not None and not (Path(adapter.lora_path) / "adapter_config.json").exists():
            message = f"The model `{request.model}` does not exist: its folder is gone."
            return self.create_error_response(message, "NotFoundError", HTTPStatus.NOT_FOUND, "model")
        return await check(self, request)

    BaseServing._check_model = check_model
