"""Ask an engine about the prompt of a request without generating: how many tokens it has, what its template takes."""

from app.chat.sampling import to_sampling
from app.chat.schemas import ChatRequest
from app.chat.wire_details import WireDetails
from app.core.errors import Unavailable
from app.core.settings import Settings
from app.deployments.version_router import RequestIdentity, VersionRouter
from app.inference import system_messages
from app.inference.engine import EngineClient
from app.inference.pool import EnginePool
from app.inference.request import ChatCall
from app.models import new_id
from app.projects.auth import Caller


class PromptService:
    """Asks an engine that answers for a model."""

    def __init__(self, router: VersionRouter, engines: EnginePool, settings: Settings) -> None:
        self._router, self._engines, self._settings = router, engines, settings

    async def takes_late_system(self, caller: Caller, model: str) -> bool:
        """Return whether the model's chat template takes a system message behind other messages. Raises NotFound.

        Without an engine it does: what follows says what is missing, or waits for it.
        """
        try:
            engine = await self._find_engine(caller, model)
        except Unavailable:
            return True
        return await system_messages.takes_late_system(engine)

    async def count_tokens(self, caller: Caller, request: ChatRequest) -> int:
        """Return the number of tokens of the request's prompt, its tools included.

        Raises NotFound for its model, Unavailable without an engine, and BadRequest for a prompt beyond the limits.
        """
        sampling = to_sampling(request, self._settings, WireDetails(clamps_max_tokens=True))
        engine = await self._find_engine(caller, request.model)
        messages = [message.to_template_message() for message in request.messages]
        call = ChatCall(new_id("count"), messages, sampling, tools=request.engine_tools())
        return len(await engine.tokenize(call))

    async def _find_engine(self, caller: Caller, model: str) -> EngineClient:
        """Return an engine that answers for a model. Raises NotFound, or Unavailable without an engine."""
        target = await self._router.resolve(caller.project_id, model)
        identity = RequestIdentity(caller.key_id, conversation_id="")
        route = await self._router.select_policy_and_version(caller.project_id, target, identity)
        return self._engines.get(route.engines[0])
