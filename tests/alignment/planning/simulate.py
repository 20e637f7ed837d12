"""`python -m tests.alignment.planning.simulate CASE`: the peak memory of a step on rank 0 of N ranks, as JSON.

The policy, its sharding, its head and its optimizer are the trainer's own. Only the values are missing: tensors are
fake, and so is the process group, so that 70 billion parameters on 64 ranks take no memory here. Not counted are the
allocator's fragmentation, CUDA's context and NCCL's buffers.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models import parallel, policy_model
from alignment.models.base_model import ModelInputs
from alignment.models.policy_model import PolicyModel

CPU = torch.device("cpu")


def peak(case: dict[str, Any]) -> dict[str, float]:
    """Return the bytes at the peak: `total`, and by kind as torch's tracker names them.

    `case`: folder, ranks (at least 2), tokens, scored, rank, checkpointing, logits_chunk.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["ranks"])
    config = TrainerConfig(
        lora=LoRAConfig(r=case["rank"], alpha=2 * case["rank"]),
        dtype="bfloat16",
        activation_checkpointing=case["checkpointing"],
        logits_chunk=case["logits_chunk"],
        device="cpu",
    )

    def load(path: Path, dtype: str, device: torch.device) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        return model.requires_grad_(False).eval()

    mesh = init_device_mesh("cpu", (case["ranks"],))  # its ranks are real numbers
    with (
        FakeTensorMode(),
        patch.object(policy_model, "load_base_model", load),
        patch.object(parallel, "init_device_mesh", lambda *_, **__: mesh),
    ):
        policy = PolicyModel(Path(case["folder"]), config, CPU)
        policy.shard()
        parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
        inputs = make_inputs(case["tokens"], case["scored"])
        tracker = FSDPMemTracker(policy, adamw)
        tracker.track_inputs((inputs,))
        head = policy.base_lm.model.get_output_embeddings()

        def grad_of_head(logits: Tensor, hidden: Tensor, derivatives: Tensor) -> tuple[Tensor]:
            return (derivatives @ head.weight,)

        # The tracker's hooks do not allow autograd.grad, which the head calls for its linear layer.
        with tracker, patch.object(torch.autograd, "grad", grad_of_head):
            for step in range(2):  # the second step has the optimizer's moments
                policy(inputs).sum().backward()
                adamw.step()
                adamw.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2].lower(): value for kind, value in snapshot.items()}


def make_inputs(tokens: int, scored: int) -> ModelInputs:
    """Return one row of tokens, the last of which are scored."""
    columns_N = torch.arange(tokens - scored - 1, tokens - 1)
    return ModelInputs(
        torch.zeros(1, tokens, dtype=torch.long),
        torch.zeros(scored, dtype=torch.long),
        columns_N,
        torch.zeros(scored, dtype=torch.long),
        torch.ones(scored),
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    print(json.dumps(peak(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
