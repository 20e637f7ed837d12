"""Choose how an update and the engines are laid out on GPUs, and say why, or what does not fit and what to change."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.planning.hardware import GIB, GPUS_PER_HOST, Gpu
from alignment.planning.memory import (
    UpdateShape,
    engine_reserve,
    kv_bytes_per_token,
    slot_bytes,
    update_memory,
    update_peak,
)
from alignment.planning.speed import Work, delivery_ms, update_seconds

USABLE = 0.9  # of a GPU's memory
DEFAULT_CONTEXT = 4096  # where no longest prompt and reply is set
MICRO_BATCH_TOKENS = (32768, 16384, 8192, 4096, 2048)
ENOUGH_TOKENS = 16384  # a micro-batch beyond this makes a GPU no faster
MIN_REPLIES = 8  # at once, of the whole context, that an engine must have room for
DELIVERY_BUDGET_MS = 300.0


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned. `context`: the longest prompt and reply, in tokens."""

    gpu: Gpu
    gpus: int
    context: int
    work: Work
    slots: int = 8  # adapters at once in an engine
    cores: int = 8


@dataclass(frozen=True)
class TrainerPlan:
    """The trainer's layout: `gpus` = `replicas` × `shape.shards`."""

    gpus: int
    shape: UpdateShape
    memory: dict[str, float]
    peak: float
    seconds: float

    @property
    def replicas(self) -> int:
        return self.gpus // self.shape.shards


@dataclass(frozen=True)
class EnginePlan:
    """One engine on `tp` GPUs. `mem_fraction_static` is SGLang's setting: weights, adapters and KV cache."""

    tp: int
    memory: dict[str, float]
    kv_tokens: int
    mem_fraction_static: float


@dataclass(frozen=True)
class Plan:
    """What was chosen, with its reasons, or the problems: what does not fit, and what to change."""

    request: PlanRequest
    model: ModelSpec
    trainer: TrainerPlan | None
    engine: EnginePlan | None
    shares_gpu: bool
    delivery_ms: float
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the plan without the model's layers. Bytes and seconds, as computed."""
        request = self.request
        fields: dict[str, object] = {
            "model": {"architecture": self.model.architecture, "parameters": self.model.parameters},
            "gpu": asdict(request.gpu),
            "gpus": request.gpus,
            "context": request.context,
            "work": asdict(request.work),
            "trainer": None if self.trainer is None else asdict(self.trainer) | {"replicas": self.trainer.replicas},
            "engine": None if self.engine is None else asdict(self.engine),
        }
        rest = {"shares_gpu": self.shares_gpu, "delivery_ms": self.delivery_ms}
        return fields | rest | {"reasons": self.reasons, "problems": self.problems}


def make_plan(model: ModelSpec, spec: AdapterSpec, request: PlanRequest) -> Plan:
    """Plan one engine and the trainer: on one GPU together, on several apart."""
    shares_gpu = request.gpus == 1
    engine = choose_engine(model, spec, request)
    plan = Plan(request, model, None, engine, shares_gpu, delivery_ms(spec, request.cores))
    if engine is None:
        plan.problems.append(_engine_problem(model, spec, request))
        return plan
    used = sum(engine.memory.values()) - _spare_kv(model, engine, request) if shares_gpu else 0.0
    trainer_gpus = 1 if shares_gpu else request.gpus - engine.tp
    trainer = choose_trainer(model, spec, request, trainer_gpus, request.gpu.memory * USABLE - used)
    if trainer is None:
        plan.problems.append(_trainer_problem(model, spec, request, trainer_gpus, used))
        return plan
    if shares_gpu:
        engine = _share_with_trainer(model, engine, request, trainer.peak)
    plan = Plan(request, model, trainer, engine, shares_gpu, plan.delivery_ms)
    plan.reasons.extend(_reasons(model, spec, plan))
    plan.problems.extend(_shortfalls(plan))
    return plan


def choose_engine(model: ModelSpec, spec: AdapterSpec, request: PlanRequest) -> EnginePlan | None:
    """Return an engine on the fewest GPUs that have room for MIN_REPLIES replies; None if no number has."""
    for tp in _engine_degrees(model, request):
        memory = _engine_parts(model, spec, request, tp)
        room = request.gpu.memory * USABLE - sum(memory.values())
        tokens = int(room / kv_bytes_per_token(model, tp))
        if tokens >= _min_kv_tokens(request):
            memory["KV cache"] = tokens * kv_bytes_per_token(model, tp)
            return EnginePlan(tp, memory, tokens, _static_share(memory, request.gpu))
    return None


def choose_trainer(
    model: ModelSpec, spec: AdapterSpec, request: PlanRequest, gpus: int, available: float
) -> TrainerPlan | None:
    """Return the layout with the fewest shards that fits into `available` bytes a GPU; None if there is none.

    With few shards there is little to gather. Within one number of shards, without activation checkpointing if a
    micro-batch of ENOUGH_TOKENS fits so, else with it and the largest micro-batch that fits.
    """
    smallest = max(MICRO_BATCH_TOKENS[-1], request.context)
    sizes = [size for size in MICRO_BATCH_TOKENS if smallest <= size <= max(ENOUGH_TOKENS, smallest)] or [smallest]
    adapters = 1 + request.work.has_critic
    for shards in _degrees(gpus):
        for checkpointing, candidates in ((False, sizes[:1]), (True, sizes)):
            for tokens in candidates:
                shape = UpdateShape(shards, tokens, checkpointing, adapters=adapters)
                memory = update_memory(model, spec, shape)
                if (peak := update_peak(memory)) <= available:
                    seconds = update_seconds(model, request.work, shape, gpus, request.gpu)
                    return TrainerPlan(gpus, shape, memory, peak, seconds)
    return None


def _engine_degrees(model: ModelSpec, request: PlanRequest) -> list[int]:
    """Return the numbers of GPUs that an engine can span: powers of two that divide the heads and leave a GPU to the
    trainer, if there are several."""
    limit = min(GPUS_PER_HOST, request.gpus - 1 if request.gpus > 1 else 1)
    return [degree for degree in (1, 2, 4, 8) if degree <= limit and model.num_attention_heads % degree == 0]


def _degrees(limit: int) -> Iterator[int]:
    """Yield the divisors of `limit` that are powers of two, and `limit` itself."""
    degree = 1
    while degree < limit:
        if limit % degree == 0:
            yield degree
        degree *= 2
    yield limit


def _engine_parts(model: ModelSpec, spec: AdapterSpec, request: PlanRequest, tp: int) -> dict[str, float]:
    return {
        "weights": 2 * model.parameters / tp,
        "adapters": request.slots * slot_bytes(model, spec, tp),
        "reserve": 2 * GIB if request.gpus == 1 else engine_reserve(tp, request.gpu.memory),
    }


def _min_kv_tokens(request: PlanRequest) -> int:
    return MIN_REPLIES * request.context


def _spare_kv(model: ModelSpec, engine: EnginePlan, request: PlanRequest) -> float:
    return (engine.kv_tokens - _min_kv_tokens(request)) * kv_bytes_per_token(model, engine.tp)


def _share_with_trainer(model: ModelSpec, engine: EnginePlan, request: PlanRequest, trainer_peak: float) -> EnginePlan:
    """Return the engine with the KV cache that a trainer on the same GPU leaves."""
    fixed = {name: size for name, size in engine.memory.items() if name != "KV cache"}
    room = request.gpu.memory * USABLE - trainer_peak - sum(fixed.values())
    tokens = int(room / kv_bytes_per_token(model, engine.tp))
    memory = fixed | {"KV cache": tokens * kv_bytes_per_token(model, engine.tp)}
    return EnginePlan(engine.tp, memory, tokens, _static_share(memory, request.gpu))


def _static_share(memory: dict[str, float], gpu: Gpu) -> float:
    return round(sum(size for name, size in memory.items() if name != "reserve") / gpu.memory, 3)


def _engine_problem(model: ModelSpec, spec: AdapterSpec, request: PlanRequest) -> str:
    tp = _engine_degrees(model, request)[-1]
    parts = _engine_parts(model, spec, request, tp)
    need = sum(parts.values()) + _min_kv_tokens(request) * kv_bytes_per_token(model, tp)
    return (
        f"the engine needs {need / GIB:.0f} GiB on each of {tp} {request.gpu.name}, which has "
        f"{request.gpu.memory * USABLE / GIB:.0f} GiB to use: take more or larger GPUs, a shorter --context "
        f"(now {request.context}), or a smaller model"
    )


def _trainer_problem(model: ModelSpec, spec: AdapterSpec, request: PlanRequest, gpus: int, used: float) -> str:
    smallest = max(MICRO_BATCH_TOKENS[-1], request.context)
    shape = UpdateShape(gpus, smallest, True, adapters=1 + request.work.has_critic)
    need = update_peak(update_memory(model, spec, shape))
    have = request.gpu.memory * USABLE - used
    neighbour = f" beside the engine, which takes {used / GIB:.0f} GiB" if used else ""
    return (
        f"an update needs {need / GIB:.0f} GiB on each of {gpus} {request.gpu.name}, which has "
        f"{max(0.0, have) / GIB:.0f} GiB to use{neighbour}, even with activation checkpointing and {smallest} tokens "
        "at a time: take more or larger "
        f"GPUs, a shorter --context (now {request.context}), or a smaller model"
    )


def _reasons(model: ModelSpec, spec: AdapterSpec, plan: Plan) -> Iterator[str]:
    request, trainer, engine = plan.request, plan.trainer, plan.engine
    assert trainer is not None and engine is not None
    shape, available = trainer.shape, request.gpu.memory * USABLE / GIB
    if plan.shares_gpu:
        yield f"engine and trainer share the GPU: mem_fraction_static = {engine.mem_fraction_static} leaves the rest"
    else:
        yield f"{engine.tp} for the engine, the fewest with room for {MIN_REPLIES} replies of {request.context} tokens"
    if shape.shards == 1:
        yield "each of the trainer's GPUs holds all weights: nothing is gathered, and gradients are added once a step"
    else:
        whole = update_memory(model, spec, UpdateShape(1, shape.micro_batch_tokens, True, adapters=shape.adapters))
        yield (
            f"{shape.shards} GPUs share one copy of the weights, the fewest that fit: with one for each an "
            f"update would need {update_peak(whole) / GIB:.0f} of {available:.0f} GiB"
        )
    if shape.activation_checkpointing:
        yield "activations are computed again in the backward pass: stored, those of a micro-batch do not fit"
    else:
        yield f"activations of {shape.micro_batch_tokens} tokens fit, so none is computed twice"


def _shortfalls(plan: Plan) -> Iterator[str]:
    """Yield what fits but misses its aim: an update a minute, and delivery within the budget."""
    trainer = plan.trainer
    assert trainer is not None
    if trainer.seconds > 60:
        needed = -(-trainer.seconds * trainer.gpus // 60)
        yield (
            f"an update of a minute's {plan.request.work.tokens} tokens takes {trainer.seconds:.0f} s: about "
            f"{needed:.0f} GPUs for the trainer would keep up, or fewer epochs (ATTUNE_ALGORITHM__EPOCHS)"
        )
    if plan.delivery_ms > DELIVERY_BUDGET_MS:
        yield (
            f"a version is delivered in about {plan.delivery_ms:.0f} ms, above {DELIVERY_BUDGET_MS:.0f}: a lower rank "
            "(ATTUNE_TRAINER__LORA__R) makes its file smaller"
        )
