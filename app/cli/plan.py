"""`attune plan`: what an update and the engines need on given GPUs, from a model's config.json alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.trainer import LoRAConfig
from alignment.planning.hardware import GIB, GPUS, find_gpu
from alignment.planning.plan import DEFAULT_CONTEXT, Plan, PlanRequest, make_plan
from alignment.planning.speed import Work
from app.cli.options import Json
from app.cli.output import print_object
from app.core.settings import Settings
from app.core.settings.derived import trainer_config
from app.core.settings.loading import load_settings
from app.policies.model_description import describe_by_program

DEFAULT_TOKENS = 150_000  # a few hundred short turns, prompts included


def plan(
    model: Annotated[
        str | None, typer.Option(help="a folder with a config.json, or that file; default: ATTUNE_MODEL")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs for engine and trainer together")] = 1,
    gpu: Annotated[str, typer.Option(help=", ".join(GPUS))] = "H100-80",
    tokens_per_minute: Annotated[
        int, typer.Option(min=1, help="tokens of a minute's turns with their prompts, which one update learns from")
    ] = DEFAULT_TOKENS,
    context: Annotated[
        int | None,
        typer.Option(min=1, help=f"longest prompt and reply; default: as in [engine], or {DEFAULT_CONTEXT}"),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="of the adapters; default: ATTUNE_TRAINER__LORA__R")] = None,
    json: Json = False,
) -> None:
    """Plan the memory and the time of updates and engines. The exit status is 1 if something does not fit."""
    settings = load_settings().settings
    description = describe_by_program(config_path(model or settings.model))
    lora = settings.trainer.lora if rank is None else LoRAConfig(r=rank, alpha=2 * rank)
    spec = AdapterSpec.from_model(description, lora)
    result = make_plan(description, spec, request_of(settings, description, gpu, gpus, tokens_per_minute, context))
    print_object(result.to_json(), json, lambda _: "\n".join(render(result, spec)))
    if result.trainer is None:
        raise typer.Exit(1)


def config_path(model: str) -> Path:
    """Return the path of a model's folder or config.json. Raises ValueError if there is none."""
    path = Path(model)
    if path.is_file() or (path / "config.json").is_file():
        return path
    raise ValueError(f"{model} is neither a folder with a config.json nor such a file: download the file first")


def request_of(
    settings: Settings, model: ModelSpec, gpu: str, gpus: int, tokens: int, context: int | None
) -> PlanRequest:
    """Return the request with what the settings say of algorithm, context and adapter slots."""
    algorithm = trainer_config(settings).algorithm
    has_critic = isinstance(algorithm, PPOConfig) and algorithm.has_critic
    longest = context or settings.engine.context_length or DEFAULT_CONTEXT
    if model.max_position_embeddings is not None:
        longest = min(longest, model.max_position_embeddings)
    work = Work(tokens, algorithm.epochs, has_critic)
    return PlanRequest(find_gpu(gpu), gpus, longest, work, slots=settings.engine.max_loras_per_batch)


def render(plan: Plan, spec: AdapterSpec) -> Iterator[str]:
    """Yield the lines of a plan."""
    model, request = plan.model, plan.request
    experts = f", {model.num_experts} experts of which a token meets {model.experts_per_token}" if model.experts else ""
    yield (
        f"{model.architecture}: {model.parameters / 1e9:.2f} B parameters{experts}; adapters of rank {spec.rank} on "
        f"{', '.join(sorted(spec.target_modules))}"
    )
    yield f"{request.gpus} × {request.gpu.name}, context {request.context}, {request.work.tokens} tokens an update"
    if plan.trainer is not None:
        shape = plan.trainer.shape
        yield ""
        yield (
            f"trainer: {plan.trainer.gpus} GPU(s), {shape.shards} to a copy of the weights; "
            f"{shape.micro_batch_tokens} tokens at a time, activation checkpointing "
            f"{'on' if shape.activation_checkpointing else 'off'}"
        )
        yield from _memory(plan.trainer.memory, plan.trainer.peak, "with fragmentation and CUDA")
        yield f"  an update takes about {plan.trainer.seconds:.1f} s"
    if plan.engine is not None:
        yield ""
        yield (
            f"engine: tp_size = {plan.engine.tp}, mem_fraction_static = {plan.engine.mem_fraction_static}, "
            f"{request.slots} adapters, {plan.engine.kv_tokens} tokens in the KV cache"
        )
        yield from _memory(plan.engine.memory, sum(plan.engine.memory.values()), "together")
        yield f"  a version is delivered in about {plan.delivery_ms:.0f} ms"
    for title, lines in (("why", plan.reasons), ("what to change", plan.problems)):
        if lines:
            yield ""
            yield f"{title}:"
            yield from (f"- {line}" for line in lines)


def _memory(parts: dict[str, float], total: float, label: str) -> Iterator[str]:
    for name, size in parts.items():
        if size:
            yield f"  {size / GIB:8.2f} GiB  {name}"
    yield f"  {total / GIB:8.2f} GiB  {label}, on each GPU"
