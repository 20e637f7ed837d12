"""Run under torchrun by test_policy_model_ranks: compute every kind of policy in every role on all ranks."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models import parallel
from alignment.models.base_model import ModelInputs
from alignment.models.policy_model import PolicyModel

CPU = torch.device("cpu")
NUM_ROWS = 5
LOGITS_CHUNK = 1000  # the logits of three tokens: the head runs several times per forward pass
LORA = LoRAConfig(r=4, alpha=8)
# LoRA or full weights, the dtype, and whether activation checkpointing is enabled.
KINDS: list[tuple[LoRAConfig | None, str, bool]] = [
    (LORA, "float32", False),
    (LORA, "float32", True),
    (LORA, "bfloat16", False),
    (None, "float32", False),
    (None, "bfloat16", False),
    (None, "bfloat16", True),
]


def label(lora: LoRAConfig | None, dtype: str, checkpointing: bool) -> str:
    return f"{'lora' if lora else 'full'}-{dtype}-{'recomputed' if checkpointing else 'kept'}"


def draw_inputs(numbers: Iterable[int], num_tokens: int = 12) -> ModelInputs:
    """Return rows that depend on their number only; the number of scored tokens differs from row to row."""
    ids = [torch.randint(1, 256, (num_tokens,), generator=torch.Generator().manual_seed(n)) for n in numbers]
    ids_BT = torch.stack(ids)
    scored = [
        (row, column) for row, n in enumerate(numbers) for column in range(num_tokens - 3 - n % 5, num_tokens - 1)
    ]
    rows_N, columns_N = torch.tensor(scored).T
    temperatures_N = 0.5 + 0.1 * columns_N
    return ModelInputs(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], temperatures_N)


def randomize_roles(policy: PolicyModel) -> None:
    """Load random tensors into every role, the same for any number of ranks."""
    for seed, role in enumerate(policy.roles):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in policy.initial_tensors(role, seed).items()
        }
        policy.load_adapter(tensors, role)


def compute_outputs(policy: PolicyModel, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Return each role's output for this rank's rows, and the full gradients of a loss over all rows."""
    inputs = draw_inputs(range(NUM_ROWS)[rank::num_ranks])
    outputs: dict[str, Tensor] = {}
    for role in policy.roles:
        with torch.no_grad():
            outputs[f"{role}/without_grad"] = policy(inputs, role)
        scores_N = policy(inputs, role)
        outputs[f"{role}/with_grad"] = scores_N.detach()
        if role in ("actor", "critic"):
            (scores_N.sin().sum() * num_ranks).backward()  # FSDP averages over the ranks
    for role in policy.roles:
        for name, tensor in policy.role_parameters(role).items():
            outputs[f"{role}/tensor/{name}"] = parallel.full_tensor(tensor.detach()).clone()
            if tensor.grad is not None:
                outputs[f"{role}/gradient/{name}"] = parallel.full_tensor(tensor.grad).clone()
    return outputs


def main(base_model: str, directory: str) -> None:
    rank, num_ranks = parallel.init_process_group(CPU)
    for lora, dtype, checkpointing in KINDS:
        config = TrainerConfig(
            lora=lora, dtype=dtype, activation_checkpointing=checkpointing, logits_chunk=LOGITS_CHUNK, device="cpu"
        )
        policy = PolicyModel(Path(base_model), config, CPU, critic=True)
        policy.shard()
        randomize_roles(policy)
        outputs = compute_outputs(policy, rank, num_ranks)
        if num_ranks > 1:
            models = [model for model in (policy.base_lm, policy.reference_lm) if model is not None]
            assert all(isinstance(layer, FSDPModule) for model in models for layer in model.layers)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        save_file(outputs, Path(directory) / f"{label(lora, dtype, checkpointing)}-{rank}.safetensors")

        # The second forward pass must use changed weights, although FSDP keeps copies from the first.
        with torch.no_grad():
            inputs = draw_inputs(range(NUM_ROWS))
            policy(inputs)
            policy.load_adapter(policy.initial_tensors("actor", 0))
            torch.testing.assert_close(policy(inputs), policy(inputs, "reference"), rtol=0, atol=0)
    parallel.exit_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
