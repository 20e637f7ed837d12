"""Plan a completion: conversation, policy version, engine, sampling parameters and turn rows, before the engine runs.

Sampling parameters have limits, and some of them exclude a turn from training.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from sqlalchemy import exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.chat import tasks
from app.chat.conversations import (
    CONVERSATION_ID_KEY,
    GENERATED_ID,
    ParentTurn,
    conversation_hash,
    find_end_user,
    find_parent,
    reuse_parent_tokens,
)
from app.chat.episode_limits import OpenEpisode, find_traced, require_open
from app.chat.episode_tags import EpisodeTag, require_no_names
from app.chat.histories import WHOLE_PROMPT, History
from app.chat.identity_headers import add_identity
from app.chat.new_turn import NewTurn
from app.chat.sampling_override import NO_OVERRIDE, Override, override_sampling
from app.chat.schemas import SEED_LIMIT, ChatRequest
from app.chat.trace_ids import add_trace_id
from app.chat.turn_writer import EngineWeights, TurnStart
from app.chat.wire_details import NO_DETAILS, WireDetails
from app.core.database import Database, now
from app.core.errors import BadRequest
from app.core.http import Services
from app.core.settings import Settings
from app.deployments.version_router import RequestIdentity, RoutedEngine, VersionRouter
from app.inference.engine import BASE_WEIGHTS, EngineClient
from app.inference.output_length import limit_to_room
from app.inference.pool import EnginePool
from app.inference.request import ChatCall, Sampling
from app.models import EpisodeSampling, Origin, Sample, Turn, new_id, to_completion_id
from app.projects.auth import Caller
from app.projects.service import NO_CONSENT, withholds_consent

RETRY_SECONDS = 1800.0  # OpenAI's clients time out after ten minutes and try three times
MIN_TEMPERATURE = 1e-5  # SGLang decodes greedily below 1e-6, and the trainer divides by the temperature


@dataclass(frozen=True)
class RequestContext:
    """A chat request with what its headers add.

    `task`: the front end's background task that it is; None for a chat. `episode`: None for a chat outside of one.
    """

    request: ChatRequest
    sha256: str
    conversation_id: str | None
    num_retries: int
    task: str | None
    episode: OpenEpisode | None = None

    @classmethod
    def from_request(
        cls,
        request: ChatRequest,
        headers: Mapping[str, str],
        continued_id: str | None = None,
        episode: OpenEpisode | None = None,
    ) -> "RequestContext":
        """Raises BadRequest for a conversation id that cannot be stored. `continued_id`: if the client names none."""
        conversation_id = request.metadata.get(CONVERSATION_ID_KEY) or headers.get("x-conversation-id") or continued_id
        if conversation_id is not None and (len(conversation_id) > 255 or "\x00" in conversation_id):
            raise BadRequest("A conversation's id holds at most 255 characters.", param="x-conversation-id")
        body = orjson.dumps(request.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
        count = headers.get("x-stainless-retry-count", "0")
        num_retries = int(count) if count.isdecimal() and len(count) < 4 else 0
        task = tasks.find_task(request, headers)
        return cls(request, hashlib.sha256(body).hexdigest(), conversation_id, num_retries, task, episode)


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


async def plan_completion(
    services: Services,
    caller: Caller,
    request: ChatRequest,
    headers: Mapping[str, str],
    request_id: str,
    details: WireDetails,
    tag: EpisodeTag,
) -> Plan:
    """Decide which version answers, on which engine, and prepare the engine calls and the turn rows.

    The completion gets the id of the request with another prefix, so that either leads to it.
    Raises NotFound for an unknown model or episode, BadRequest for a request beyond the limits, Conflict for an episode
    that has ended, Unavailable without an engine.
    """
    router, settings, db = services.get(VersionRouter), services.get(Settings), services.get(Database)
    request = add_identity(request, headers)
    episode = None
    if tag.episode_id is not None:
        episode = await require_open(db, caller.project_id, tag.episode_id, tag.param)
    target = await router.resolve(caller.project_id, request.model)
    if episode is None and tag.trace is not None:
        episode = await find_traced(db, caller.project_id, target.model.policy_id, tag.trace.trace_id)
    if episode is None:
        require_no_names(tag)
    elif episode.policy_id != target.model.policy_id:
        message = (
            f"The episode '{episode.episode_id}' is of another policy than '{request.model}'; name its own policy."
        )
        raise BadRequest(message, param="model", code="episode_policy")
    sampling = to_sampling(request, settings, details)  # first: what follows takes longer for a longer prompt
    context = RequestContext.from_request(request, headers, details.conversation_id, episode)
    override = NO_OVERRIDE
    if episode is not None and episode.sampling == EpisodeSampling.POLICY and context.task is None:
        sampling, override = override_sampling(sampling)
    messages = [message.to_template_message() for message in request.messages]
    parent, retried_turns = await _load_history(db, caller, context, messages)
    end_user = await _find_end_user(db, caller, context)
    sampled_turn_id = next((row.id for row in retried_turns if row.has_sample), None)
    conversation_id = context.conversation_id or (parent.conversation_id if parent else None) or new_id(GENERATED_ID)
    identity = RequestIdentity(
        caller.key_id,
        conversation_id,
        end_user,
        previous_version_id=parent.version_id if parent else None,
        previous_policy_id=parent.policy_id if parent else None,
        episode_version_id=episode.own_version_id if episode else None,
        max_staleness=episode.max_staleness if episode else None,
        is_pinned_by_episode=episode is not None and episode.is_pinned,
    )
    route = await router.select_policy_and_version(caller.project_id, target, identity)
    model = route.model
    swaps_weights = settings.trainer.adaptation == "full"
    engine, spare_engine = _choose_engines(services.get(EnginePool), route.engines, conversation_hash(messages))
    call = ChatCall(
        rid=to_completion_id(request_id),
        messages=messages,
        sampling=sampling,
        adapter=model.adapter,
        tools=request.engine_tools(),
        tool_choice=request.engine_tool_choice(),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=request.engine_response_format(),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        include_usage=request.include_usage,
        names_stop_text=details.names_stop_text,
        extra_key=model.weights or model.base_model,
        weights=(model.weights or BASE_WEIGHTS) if swaps_weights else None,
    )
    reuse_outcome = None
    if parent is not None:
        prompt_ids, reuse_outcome = await reuse_parent_tokens(engine.client, call, messages, parent, model.policy_id)
        call = replace(call, prompt_ids=prompt_ids)
    if request.max_output_tokens is None or details.clamps_max_tokens:
        call = await limit_to_room(engine.client, call)
    exclusion_reason = _exclusion_reason(caller, context, sampling, sampled_turn_id)
    calls = (call, *(_additional_choice(call, index) for index in range(1, request.n)))
    joined_id = conversation_id if context.task is None else None
    request_params = {**request.recorded_params(), **details.recorded_params, **override.recorded_params}
    if context.task is not None:
        request_params[tasks.TASK_KEY] = context.task
    history = parent.history if parent is not None and settings.database.share_histories else None
    beginning = history.begin(messages) if history else WHOLE_PROMPT
    first_turn = NewTurn(
        id=call.rid,
        completion_id=call.rid,
        choice_index=0,
        project_id=caller.project_id,
        key_id=caller.key_id,
        policy_id=model.policy_id,
        version_id=model.version_id,
        route_reason=route.route_reason,
        origin=Origin.CHAT if context.task is None else Origin.TASK,
        engine=engine.name,
        stream=request.stream,
        own_messages=messages,
        history_id=beginning.history_id,
        num_history_messages=beginning.num_messages,
        sampling=call.sampling.body(),
        request_params=request_params,
        conversation_id=joined_id,
        parent_id=parent.id if parent else None,
        episode_id=episode.episode_id if episode else None,
        agent=tag.agent,
        state_key=tag.state_key,
        trace_id=tag.trace.trace_id if tag.trace else None,
        span_id=tag.trace.span_id if tag.trace else None,
        prefix_reuse=reuse_outcome,
        end_user=end_user,
        request_sha256=context.sha256,
        request_metadata=request.metadata,
        exclusion_reason=exclusion_reason,
    )
    turns = _plan_choices(first_turn, calls, shares_histories=settings.database.share_histories)
    pairs = add_trace_id(request.metadata) if settings.langfuse.intake else request.metadata
    metadata = [
        {"turn_id": call.rid, "project_id": caller.project_id, "key": key, "value": value}
        for key, value in pairs.items()
    ]
    weights = EngineWeights(engine.name, model.weights, model.name) if swaps_weights else None
    replaced_turn_ids = () if sampled_turn_id else tuple(row.id for row in retried_turns)
    return Plan(
        label=model.name,
        created=int(time.time()),
        engine=engine,
        spare_engine=None if swaps_weights else spare_engine,  # the turn is recorded for one engine's weights
        calls=calls,
        conversation_id=joined_id,
        turn_start=TurnStart(turns, metadata, replaced_turn_ids, weights),
        length_range=settings.observability.length_range if context.task is None else None,
        history=history,
        override=override,
    )


def _choose_engines(
    pool: EnginePool, engines: tuple[RoutedEngine, ...], hash: int
) -> tuple[PlannedEngine, PlannedEngine | None]:
    """Return the conversation's engine, whose cache has its prefix, and the next one, if there is one."""
    candidates = [engines[(hash + at) % len(engines)] for at in range(2)]
    first, second = [PlannedEngine(engine.name, pool.get(engine)) for engine in candidates]
    return first, second if len(engines) > 1 else None


def to_sampling(request: ChatRequest, settings: Settings, details: WireDetails = NO_DETAILS) -> Sampling:
    """Return the engine's sampling parameters. Raises BadRequest when the request exceeds a limit of the settings."""
    if request.n > settings.limits.max_choices:
        raise BadRequest(f"'n' may be at most {settings.limits.max_choices}.", param="n", code="invalid_value")
    max_tokens = request.max_output_tokens
    cap = settings.limits.max_output_tokens
    if max_tokens is not None and details.clamps_max_tokens:
        max_tokens = min(max_tokens, cap // request.n)
    if max_tokens is not None and max_tokens * request.n > cap:
        param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        error = f"One request may ask for at most {cap} tokens over all choices."
        raise BadRequest(error, param=param, code="invalid_value")
    sizes = request.prompt_chars
    limit = settings.limits.max_prompt_chars
    if (length := sum(sizes.values())) > limit:
        longest = max(sizes, key=sizes.__getitem__)
        error = f"Messages, tools and response format hold {length} characters; at most {limit} are "
        raise BadRequest(f"{error}allowed. Shorten '{longest}'.", param=longest, code="context_length_exceeded")
    return Sampling(
        max_tokens=max_tokens or min(settings.server.default_max_tokens, cap // request.n),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=details.top_k or -1,
        stop=request.stop_strings,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias or None,
    )


async def _load_history(
    db: Database, caller: Caller, context: RequestContext, messages: list[dict[str, Any]]
) -> tuple[ParentTurn | None, Sequence[Any]]:
    """Return the parent turn, and the turns that this request may be a retry of. A task has no parent."""
    has_history = context.task is None and (
        context.conversation_id is not None or any(message["role"] == "assistant" for message in messages)
    )
    if not has_history and not context.num_retries:
        return None, ()  # a first turn needs no query

    def read(connection: Connection) -> tuple[ParentTurn | None, Sequence[Any]]:
        parent = None
        if has_history:
            episode_id = context.episode.episode_id if context.episode else None
            named = (context.request.end_user, context.conversation_id, episode_id)
            parent = find_parent(connection, messages, caller, *named)
        return parent, _find_retried_turns(connection, caller, context) if context.num_retries else ()

    return await db.run_read(read)


async def _find_end_user(db: Database, caller: Caller, context: RequestContext) -> str | None:
    """Return the end user of the request; if a task names none, that of the conversation that it names.

    A task's prompt quotes its conversation, so the erasure of a person must find it by their name.
    """
    end_user, conversation_id = context.request.end_user, context.conversation_id
    if context.task is None or end_user is not None or conversation_id is None:
        return end_user
    return await db.run_read(lambda connection: find_end_user(connection, caller, conversation_id))


def _find_retried_turns(connection: Connection, caller: Caller, context: RequestContext) -> Sequence[Any]:
    """Return the newest turns with the same body and API key: those that an automatic retry repeats.

    At most as many completions as the client says it has tried, and no turn that has a child: its reply had arrived.
    """
    is_named = context.conversation_id is not None and context.task is None
    scope = [Turn.conversation_id == context.conversation_id] if is_named else []
    if context.episode is not None:
        scope.append(Turn.episode_id == context.episode.episode_id)
    child = aliased(Turn)
    return connection.execute(
        select(Turn.id, exists().where(Sample.turn_id == Turn.id).label("has_sample"))
        .where(
            Turn.key_id == caller.key_id,
            Turn.request_sha256 == context.sha256,
            Turn.created_at > now() - RETRY_SECONDS,
            Turn.deleted_at.is_(None),
            ~exists().where(child.parent_id == Turn.id),
            *scope,
        )
        .order_by(Turn.created_at.desc(), Turn.id.desc())
        .limit(context.num_retries * context.request.n)
    ).all()


def _plan_choices(first: NewTurn, calls: Sequence[ChatCall], *, shares_histories: bool) -> list[NewTurn]:
    """Return the turns of all choices. The others may refer to the first one's prompt, which is theirs."""
    other = first
    if shares_histories:
        other = replace(first, history_id=first.id, num_history_messages=len(first.own_messages))
    others = enumerate(calls[1:], start=1)
    return [
        first,
        *(replace(other, id=call.rid, choice_index=index, sampling=call.sampling.body()) for index, call in others),
    ]


def _additional_choice(first: ChatCall, index: int) -> ChatCall:
    """Return the call of another choice. Its seed differs, else all choices would be equal."""
    seed = None if first.sampling.seed is None else next_seed(first.sampling.seed, index)
    return replace(first, rid=new_id("chatcmpl"), sampling=replace(first.sampling, seed=seed))


def next_seed(seed: int, index: int) -> int:
    """Return the seed of another choice; the first one follows the last one."""
    return (seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def _exclusion_reason(
    caller: Caller, context: RequestContext, sampling: Sampling, sampled_turn_id: str | None
) -> str | None:
    """Return why these turns must not be trained on, as far as the request tells, or None.

    The engine's log-probs account for the temperature only: any other change of the distribution makes them differ
    from the probabilities that the tokens were sampled with.
    """
    if withholds_consent(context.request.metadata) or not caller.train:
        return NO_CONSENT
    if context.task is not None:
        return tasks.exclusion_reason(context.task)
    if sampled_turn_id is not None:
        return f"its client repeated the request after {sampled_turn_id}, which is already a sample"
    if sampling.temperature < MIN_TEMPERATURE:
        return "greedy decoding: the reply was not sampled"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "top-p or top-k truncated the sampling distribution"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties changed the sampling distribution"
    return "a logit bias changed the sampling distribution" if sampling.logit_bias else None
