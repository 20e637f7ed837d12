"""Whether a base model fits on this machine, as the planner sees it, before `attune up` starts anything."""

import os
import subprocess
from pathlib import Path

from alignment.artifacts.specs import AdapterSpec
from alignment.planning.hardware import GIB, Gpu
from alignment.planning.memory import UpdateShape, update_memory
from alignment.planning.plan import DEFAULT_CONTEXT, USABLE, PlanRequest, make_plan
from alignment.planning.speed import Work
from app.core.settings import Settings
from app.core.settings.derived import lora_config
from app.policies.model_description import describe_by_program

SMALL = 1 / 8  # of the memory: weights below this share fit without a question


def require_fit(settings: Settings) -> None:
    """Raise ValueError with the planner's sentence if engine and trainer do not fit on this machine.

    Not for full weights, and not for a model that is not in a folder yet. Only a model that is large for the machine
    is described, which takes seconds.
    """
    folder, lora = Path(settings.model), lora_config(settings)
    if lora is None or not (folder / "config.json").exists():
        return
    gpus = [] if settings.trainer.device == "cpu" and settings.engine.device == "cpu" else gpu_memories()
    memory = min(gpus) if gpus else machine_memory()
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL * memory:
        return
    model = describe_by_program(folder)
    spec = AdapterSpec.from_model(model, lora)
    trainer = settings.trainer
    if gpus:
        gpu = Gpu("GPU of this machine", memory / GIB, tflops=1, link_gb_s=1)
        context = settings.engine.context_length or DEFAULT_CONTEXT
        request = PlanRequest(gpu, len(gpus), context, Work(1, 1, False), slots=settings.engine.max_loras_per_batch)
        plan = make_plan(model, spec, request)
        if plan.trainer is None:
            raise ValueError(f"{settings.model} does not fit: {plan.problems[0]}")
        return
    shape = UpdateShape(
        1, trainer.micro_batch_tokens, trainer.activation_checkpointing, trainer.logits_chunk, settings.dtype
    )
    update = update_memory(model, spec, shape)
    needed = trainer.ranks * sum(update.values()) + update["weights"]  # the engine holds the weights too
    if needed > USABLE * memory:
        raise ValueError(
            f"{settings.model} does not fit: engine and trainer need {needed / GIB:.0f} GiB of memory, and this "
            f"machine has {memory / GIB:.0f}: take a smaller model, or set ATTUNE_DTYPE=bfloat16, "
            "ATTUNE_TRAINER__ACTIVATION_CHECKPOINTING=true or fewer ATTUNE_TRAINER__MICRO_BATCH_TOKENS"
        )


def machine_memory() -> float:
    """Return the memory of this machine in bytes."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def gpu_memories() -> list[float]:
    """Return the memory in bytes of each GPU that nvidia-smi knows; none where it is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return [float(line) * 2**20 for line in output.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
