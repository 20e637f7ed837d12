"""Plan a completion: conversation, policy version, engine, sampling parameters and turns, before the engine runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.chat import tasks
from app.chat.conversations import GENERATED_ID, ParentTurn, conversation_hash, reuse_parent_tokens
from app.chat.episode_limits import OpenEpisode, find_traced, require_open
from app.chat.episode_tags import EpisodeTag, find_tag, require_no_names
from app.chat.histories import WHOLE_PROMPT, History, Messages
from app.chat.identity_headers import add_identity
from app.chat.new_turn import NewTurn
from app.chat.request_context import RequestContext, find_named_user, load_history
from app.chat.request_origin import RequestOrigin
from app.chat.sampling import exclusion_reason, next_seed, to_sampling
from app.chat.sampling_override import NO_OVERRIDE, Override, override_sampling
from app.chat.schemas import ChatRequest
from app.chat.trace_ids import add_trace_id
from app.chat.turn_writer import EngineWeights, TurnStart
from app.chat.wire_details import WireDetails
from app.core.database import Database
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.deployments.routes import ResolvedModel, Route, RoutedEngine
from app.deployments.version_router import RequestIdentity, VersionRouter
from app.engines.adaptation import adaptation_of
from app.inference.engine import EngineClient
from app.inference.output_length import limit_to_room
from app.inference.pool import EnginePool
from app.inference.request import BELOW_CHATS, ChatCall, Sampling
from app.models import EpisodeSampling, Origin, ServiceTier, new_id, to_completion_id
from app.projects.auth import Caller


@dataclass(frozen=True)
class PlannedEngine:
    name: str
    client: EngineClient


@dataclass(frozen=True)
class Plan:
    """Everything that the service needs to run a completion.

    `calls` holds one engine call for each choice; its `rid` is the turn's id, and the first one is the completion's id.
    """

    label: str
    created: int
    engine: PlannedEngine
    spare_engine: PlannedEngine | None  # another one that has loaded the version
    calls: tuple[ChatCall, ...]
    conversation_id: str | None  # None: a task, which is no part of a conversation
    turn_start: TurnStart
    length_range: tuple[int, int] | None = None
    history: History | None = None
    override: Override = NO_OVERRIDE
    service_tier: ServiceTier | None = None  # None: nobody has asked for one

    @property
    def id(self) -> str:
        return self.calls[0].rid

    @property
    def system_fingerprint(self) -> str:
        """What a reply depends on beside its request. It says that a seed is a hint: the engine samples without it."""
        return f"{self.label};{self.engine.name};seed=hint"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-completion-id": self.id, "x-policy-version": self.label, **self.override.headers}
        id = self.conversation_id
        if id is not None and id.isascii() and id.isprintable():
            headers["x-conversation-id"] = id
        return headers


@dataclass(frozen=True)
class Background:
    """What a request continues or repeats, and who it is from.

    Attributes:
        parent: The turn that it continues; None for a first turn and for a task.
        sampled_turn_id: A turn that it repeats and that is already a sample.
        replaced_turn_ids: The turns that it repeats, if none of them is a sample.
    """

    parent: ParentTurn | None
    conversation_id: str
    end_user: str | None
    sampled_turn_id: str | None
    replaced_turn_ids: tuple[str, ...]


class ChatPlanner:
    """Plans completions: which version answers, on which engine, what the engine is sent, and what is recorded."""

    def __init__(self, db: Database, router: VersionRouter, engines: EnginePool, settings: Settings) -> None:
        self._db = db
        self._router = router
        self._engines = engines
        self._settings = settings
        self._adaptation = adaptation_of(settings)

    async def plan(self, caller: Caller, request: ChatRequest, origin: RequestOrigin, details: WireDetails) -> Plan:
        """Return the plan of a completion. Its id is that of the request with another prefix: either leads to it.

        Raises NotFound for an unknown model or episode, BadRequest for a request beyond the limits, Conflict for an
        episode that has ended, Unavailable without an engine.
        """
        tag = find_tag(caller, origin, request.metadata)
        request = add_identity(request, origin.headers)
        named_route, episode = await self._resolve(caller, request.model, tag)
        sampling = to_sampling(request, self._settings, details)  # first: the rest takes longer for a longer prompt
        context = RequestContext.from_request(request, origin.headers, details.conversation_id, episode)
        override = NO_OVERRIDE
        if episode is not None and episode.sampling == EpisodeSampling.POLICY and context.task is None:
            sampling, override = override_sampling(sampling)
        messages = [message.to_template_message() for message in request.messages]
        background = await self._load_background(caller, context, messages)
        route = await self._select_route(caller, named_route, context, background)
        engine, spare_engine = self._choose_engines(route.engines, conversation_hash(messages))
        tier = _service_tier(request, episode)
        call = self._prepare_call(origin.request_id, request, messages, sampling, details, route.model)
        call = replace(call, priority=BELOW_CHATS if tier == ServiceTier.FLEX else None)
        call, prefix_reuse = await _reuse_parent(engine.client, call, background.parent, route.model.policy_id)
        if request.max_output_tokens is None or details.clamps_max_tokens:
            call = await limit_to_room(engine.client, call)
        calls = (call, *(_additional_choice(call, index) for index in range(1, request.n)))
        history = background.parent.history if background.parent and self._settings.database.share_histories else None
        beginning = history.begin(messages) if history else WHOLE_PROMPT
        joined_id = background.conversation_id if context.task is None else None
        first_turn = NewTurn(
            id=call.rid,
            completion_id=call.rid,
            choice_index=0,
            project_id=caller.project_id,
            key_id=caller.key_id,
            policy_id=route.model.policy_id,
            version_id=route.model.version_id,
            route_reason=route.route_reason,
            origin=Origin.CHAT if context.task is None else Origin.TASK,
            engine=engine.name,
            stream=request.stream,
            own_messages=messages,
            history_id=beginning.history_id,
            num_history_messages=beginning.num_messages,
            sampling=call.sampling.body(),
            request_params=_recorded_params(context, details, override, tier),
            conversation_id=joined_id,
            parent_id=background.parent.id if background.parent else None,
            episode_id=episode.episode_id if episode else None,
            agent=tag.agent,
            state_key=tag.state_key,
            trace_id=tag.trace.trace_id if tag.trace else None,
            span_id=tag.trace.span_id if tag.trace else None,
            prefix_reuse=prefix_reuse,
            end_user=background.end_user,
            request_sha256=context.sha256,
            request_metadata=request.metadata,
            exclusion_reason=exclusion_reason(caller, context, sampling, background.sampled_turn_id),
        )
        turn_start = self._start_turns(first_turn, calls, route.model, background.replaced_turn_ids)
        return Plan(
            label=route.model.name,
            created=int(time.time()),
            engine=engine,
            # With full weights the turn is recorded for one engine's weights.
            spare_engine=spare_engine if turn_start.required_weights is None else None,
            calls=calls,
            conversation_id=joined_id,
            turn_start=turn_start,
            length_range=self._settings.observability.length_range if context.task is None else None,
            history=history,
            override=override,
            service_tier=tier,
        )

    async def _resolve(self, caller: Caller, model: str, tag: EpisodeTag) -> tuple[Route, OpenEpisode | None]:
        """Return the route of the model that the request names, and its open episode, if it belongs to one."""
        episode = None
        if tag.episode_id is not None:
            episode = await require_open(self._db, caller.project_id, tag.episode_id, tag.param)
        route = await self._router.resolve(caller.project_id, model)
        if episode is None and tag.trace is not None:
            episode = await find_traced(self._db, caller.project_id, route.model.policy_id, tag.trace.trace_id)
        if episode is None:
            require_no_names(tag)
        elif episode.policy_id != route.model.policy_id:
            message = f"The episode '{episode.episode_id}' is of another policy than '{model}'; name its own policy."
            raise BadRequest(message, param="model", code="episode_policy")
        return route, episode

    async def _load_background(self, caller: Caller, context: RequestContext, messages: Messages) -> Background:
        """Return what the request continues or repeats, and who it is from."""
        parent, retried_turns = await load_history(self._db, caller, context, messages)
        continued_id = parent.conversation_id if parent else None
        conversation_id = context.conversation_id or continued_id or new_id(GENERATED_ID)
        sampled_turn_id = next((row.id for row in retried_turns if row.has_sample), None)
        return Background(
            parent,
            conversation_id,
            end_user=await find_named_user(self._db, caller, context),
            sampled_turn_id=sampled_turn_id,
            replaced_turn_ids=() if sampled_turn_id else tuple(row.id for row in retried_turns),
        )

    async def _select_route(
        self, caller: Caller, route: Route, context: RequestContext, background: Background
    ) -> Route:
        """Return the route of the version that answers: pins, shares, the conversation and the episode decide."""
        parent, episode = background.parent, context.episode
        identity = RequestIdentity(
            caller.key_id,
            background.conversation_id,
            background.end_user,
            previous_version_id=parent.version_id if parent else None,
            previous_policy_id=parent.policy_id if parent else None,
            episode_version_id=episode.own_version_id if episode else None,
            max_staleness=episode.max_staleness if episode else None,
            is_pinned_by_episode=episode is not None and episode.is_pinned,
        )
        return await self._router.select_policy_and_version(caller.project_id, route, identity)

    def _choose_engines(
        self, engines: tuple[RoutedEngine, ...], hash: int
    ) -> tuple[PlannedEngine, PlannedEngine | None]:
        """Return the conversation's engine, whose cache has its prefix, and the next one, if there is one."""
        candidates = [engines[(hash + at) % len(engines)] for at in range(2)]
        first, second = [PlannedEngine(engine.name, self._engines.get(engine)) for engine in candidates]
        return first, second if len(engines) > 1 else None

    def _prepare_call(
        self,
        request_id: str,
        request: ChatRequest,
        messages: Messages,
        sampling: Sampling,
        details: WireDetails,
        model: ResolvedModel,
    ) -> ChatCall:
        """Return the engine call of the first choice."""
        return ChatCall(
            rid=to_completion_id(request_id),
            messages=messages,
            sampling=sampling,
            target=self._adaptation.target(model, model.base_model, model.name),
            tools=request.engine_tools(),
            tool_choice=request.engine_tool_choice(),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            response_format=request.engine_response_format(),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            include_usage=request.include_usage,
            names_stop_text=details.names_stop_text,
        )

    def _start_turns(
        self, first: NewTurn, calls: Sequence[ChatCall], model: ResolvedModel, replaced_turn_ids: tuple[str, ...]
    ) -> TurnStart:
        """Return the turns of all choices. The others may refer to the first one's prompt, which is theirs."""
        other = first
        if self._settings.database.share_histories:
            other = replace(first, history_id=first.id, num_history_messages=len(first.own_messages))
        others = enumerate(calls[1:], start=1)
        turns = [
            first,
            *(replace(other, id=call.rid, choice_index=index, sampling=call.sampling.body()) for index, call in others),
        ]
        metadata = first.request_metadata
        pairs = add_trace_id(metadata) if self._settings.langfuse.intake else metadata
        rows = [
            {"turn_id": first.id, "project_id": first.project_id, "key": key, "value": value}
            for key, value in pairs.items()
        ]
        weights = None
        if calls[0].target.weights is not None:
            weights = EngineWeights(first.engine, model.weights, model.name)
        return TurnStart(turns, rows, replaced_turn_ids, weights)


async def _reuse_parent(
    client: EngineClient, call: ChatCall, parent: ParentTurn | None, policy_id: str
) -> tuple[ChatCall, str | None]:
    """Return the call with the parent's tokens at its beginning, if they can be reused, and what became of that."""
    if parent is None:
        return call, None
    prompt_ids, outcome = await reuse_parent_tokens(client, call, call.messages, parent, policy_id)
    return replace(call, prompt_ids=prompt_ids), outcome


def _service_tier(request: ChatRequest, episode: OpenEpisode | None) -> ServiceTier | None:
    """Return the tier that a request is served with: its episode's, or its own. Unknown ones are the default."""
    tier = (episode.service_tier if episode else None) or request.service_tier
    if tier is None:
        return None
    return ServiceTier.FLEX if tier == ServiceTier.FLEX else ServiceTier.DEFAULT


def _recorded_params(
    context: RequestContext, details: WireDetails, override: Override, tier: ServiceTier | None
) -> dict[str, object]:
    """Return the parameters beside messages and sampling that the turn records."""
    params = {**context.request.recorded_params(), **details.recorded_params, **override.recorded_params}
    if context.task is not None:
        params[tasks.TASK_KEY] = context.task
    if tier == ServiceTier.FLEX:
        params["service_tier"] = tier
    return params


def _additional_choice(first: ChatCall, index: int) -> ChatCall:
    """Return the call of another choice. Its seed differs, else all choices would be equal."""
    seed = None if first.sampling.seed is None else next_seed(first.sampling.seed, index)
    return replace(first, rid=new_id("chatcmpl"), sampling=replace(first.sampling, seed=seed))
