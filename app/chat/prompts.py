"""Ask an engine about the prompt of a request without generating: how many tokens it has, what its template takes."""

from app.chat.sampling import to_sampling
from app.chat.schemas import ChatRequest
from app.chat.wire_details import WireDetails
from app.core.errors import Unavailable
from app.core.http import Services
from app.core.settings import Settings
from app.deployments.version_router import RequestIdentity, VersionRouter
from app.inference import system_messages
from app.inference.engine import EngineClient
from app.inference.pool import EnginePool
from app.inference.request import ChatCall
from app.models import new_id
from app.projects.auth import Caller


async def find_engine(services: Services, caller: Caller, model: str) -> EngineClient:
    """Return an engine that answers for a model. Raises NotFound, or Unavailable without an engine."""
    router = services.get(VersionRouter)
    target = await router.resolve(caller.project_id, model)
    identity = RequestIdentity(caller.key_id, conversation_id="")
    route = await router.select_policy_and_version(caller.project_id, target, identity)
    return services.get(EnginePool).get(route.engines[0])


async def takes_late_system(services: Services, caller: Caller, model: str) -> bool:
    """Return whether the model's chat template takes a system message behind other messages. Raises NotFound.

    Without an engine it does: what follows says what is missing, or waits for it.
    """
    try:
        engine = await find_engine(services, caller, model)
    except Unavailable:
        return True
    return await system_messages.takes_late_system(engine)


async def count_prompt_tokens(services: Services, caller: Caller, request: ChatRequest) -> int:
    """Return the number of tokens of the request's prompt, its tools included.

    Raises what `find_engine` raises, and BadRequest for a prompt beyond the limits.
    """
    sampling = to_sampling(request, services.get(Settings), WireDetails(clamps_max_tokens=True))
    client = await find_engine(services, caller, request.model)
    messages = [message.to_template_message() for message in request.messages]
    call = ChatCall(new_id("count"), messages, sampling, tools=request.engine_tools())
    return len(await client.tokenize(call))
