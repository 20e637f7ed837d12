"""Run under torchrun by test_policy_ranks: every kind of policy under every hat, on as many ranks as there are."""

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
from alignment.models.policy_model import PolicyModel, Rows

CPU = torch.device("cpu")
NUM_ROWS = 5
LOGITS_CHUNK = 1000  # three tokens' logits: the head is in use more than once a forward
LORA = LoRAConfig(rank=4, alpha=8)
# Adapters or full weights, in which type, and whether layers are computed again on the way back.
KINDS: list[tuple[LoRAConfig | None, str, bool]] = [
    (LORA, "float32", False),
    (LORA, "float32", True),
    (LORA, "bfloat16", False),
    (None, "float32", False),
    (None, "bfloat16", False),
    (None, "bfloat16", True),
]


def label(lora: LoRAConfig | None, dtype: str, again: bool) -> str:
    return f"{'lora' if lora else 'full'}-{dtype}-{'recomputed' if again else 'kept'}"


def draw_rows(numbers: Iterable[int], num_tokens: int = 12) -> Rows:
    """Row `number` is the same whatever stands beside it; its last tokens are wanted, one more from row to row."""
    ids = [torch.randint(1, 256, (num_tokens,), generator=torch.Generator().manual_seed(n)) for n in numbers]
    ids_BT = torch.stack(ids)
    wanted = [
        (row, column) for row, n in enumerate(numbers) for column in range(num_tokens - 3 - n % 5, num_tokens - 1)
    ]
    rows_N, columns_N = torch.tensor(wanted).T
    temperatures_N = 0.5 + 0.1 * columns_N
    return Rows(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], temperatures_N)


def dress(policy: PolicyModel) -> None:
    """Give every hat weights of its own, the same for any number of ranks."""
    for seed, hat in enumerate(policy.hats):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in policy.fresh(hat, seed).items()
        }
        policy.wear(tensors, hat)


def describe(policy: PolicyModel, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """What each hat says of this rank's rows, and the gradients of a loss over all rows, whole."""
    rows = draw_rows(range(NUM_ROWS)[rank::num_ranks])
    figures: dict[str, Tensor] = {}
    for hat in policy.hats:
        with torch.no_grad():
            figures[f"{hat}/scored"] = policy(rows, hat)
        said_N = policy(rows, hat)
        figures[f"{hat}/said"] = said_N.detach()
        if hat in ("actor", "critic"):
            (said_N.sin().sum() * num_ranks).backward()  # FSDP averages over the ranks
    for hat in policy.hats:
        for name, tensor in policy.tensors(hat).items():
            figures[f"{hat}/tensor/{name}"] = parallel.whole(tensor.detach()).clone()
            if tensor.grad is not None:
                figures[f"{hat}/gradient/{name}"] = parallel.whole(tensor.grad).clone()
    return figures


def main(base_model: str, directory: str) -> None:
    rank, num_ranks = parallel.join(CPU)
    for lora, dtype, again in KINDS:
        config = TrainerConfig(
            lora=lora, dtype=dtype, gradient_checkpointing=again, logits_chunk=LOGITS_CHUNK, device="cpu"
        )
        policy = PolicyModel(Path(base_model), config, CPU, critic=True, anchor=lora is not None)
        policy.shard(CPU)
        dress(policy)
        figures = describe(policy, rank, num_ranks)
        if num_ranks > 1:
            trunks = [trunk for trunk in (policy.trunk, policy.frozen) if trunk is not None]
            assert all(isinstance(layer, FSDPModule) for trunk in trunks for layer in trunk.layers)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        save_file(figures, Path(directory) / f"{label(lora, dtype, again)}-{rank}.safetensors")

        # Weights that change between two forwards are seen by the second, whatever copies FSDP keeps of the first.
        with torch.no_grad():
            rows = draw_rows(range(NUM_ROWS))
            policy(rows)
            policy.wear(policy.fresh("actor", 0))
            torch.testing.assert_close(policy(rows), policy(rows, "reference"), rtol=0, atol=0)
    parallel.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
