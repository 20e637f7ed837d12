"""Seconds of an update and milliseconds of a release, from operations and bytes, at rates that are assumed."""

from dataclasses import dataclass

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.planning.hardware import GPUS_PER_HOST, Gpu
from alignment.planning.memory import UpdateShape, adapter_parameters

EFFICIENCY = 0.25  # of the GPU's peak that a training step of transformers reaches
# GB/s of each step of a delivery: from the GPU, to the file, hashing on one core, reading, stacking, to the GPU.
COPY_OUT, WRITE, HASH_PER_CORE, READ, STACK, COPY_IN = 50.0, 3.0, 0.5, 5.0, 10.0, 25.0
EXPORT_BYTES = 4  # of an exported parameter: float32


@dataclass(frozen=True)
class Work:
    """What an update computes. `has_critic`: PPO with a critic; `epochs`: passes over the samples."""

    tokens: int
    epochs: int
    has_critic: bool
    has_reference: bool = True


def flops_per_token(model: ModelSpec, work: Work, *, activation_checkpointing: bool) -> float:
    """Return the floating-point operations of an update per token, attention's products left out.

    A pass forward is 2 per parameter that a token meets; so is the way back, which only finds the gradient of the
    activations: the base is frozen. The policy is scored before the update, and so are reference and critic.
    """
    scoring = 1 + work.has_reference + work.has_critic
    training = work.epochs * (3 if activation_checkpointing else 2) * (1 + work.has_critic)
    return 2.0 * model.matmul_parameters * (scoring + training)


def update_seconds(model: ModelSpec, work: Work, shape: UpdateShape, gpus: int, gpu: Gpu) -> float:
    """Return the seconds of an update on `gpus` GPUs: computation, and the gathering of weights that it waits for."""
    flops = work.tokens * flops_per_token(model, work, activation_checkpointing=shape.activation_checkpointing)
    compute = flops / (gpus * gpu.tflops * 1e12 * EFFICIENCY)
    if shape.shards == 1:
        return compute
    passes = 1 + work.has_reference + work.has_critic + 2 * work.epochs * (1 + work.has_critic)
    micro_batches = max(1.0, work.tokens / (gpus * shape.micro_batch_tokens))
    rate = gpu.link_gb_s if shape.shards <= GPUS_PER_HOST else gpu.network_gb_s
    gathered = passes * micro_batches * 2 * model.parameters * (1 - 1 / shape.shards)
    return compute + gathered / (rate * 1e9)


def delivery_ms(spec: AdapterSpec, cores: int) -> float:
    """Return the milliseconds from a trained adapter to one that an engine serves, one step after the other."""
    gigabytes = EXPORT_BYTES * adapter_parameters(spec) / 1e9
    rates = (COPY_OUT, WRITE, HASH_PER_CORE * cores, READ, STACK, COPY_IN)
    return 1000 * gigabytes * sum(1 / rate for rate in rates)
