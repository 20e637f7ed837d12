"""One model over several ranks: the process group, FSDP2, and conversion between full and sharded tensors.

With one rank the model is not wrapped, which avoids FSDP's copies. Adapters enter and leave as full tensors, so callers
need not know the number of ranks.

torch.distributed.checkpoint.state_dict is not used for these conversions: it works on a whole module and its optimizer
by module path. Here one role's tensors are selected, under the names of the engine's files, and the optimizer's moments
are restored without the dummy step that its `set_optimizer_state_dict` makes to create them.
"""

import logging
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def init_process_group(device: torch.device) -> tuple[int, int]:
    """Return (rank, number of ranks), and join torchrun's process group unless the caller has joined it already."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def exit_process() -> NoReturn:
    """End this rank's process with status 0. All ranks must call it.

    The process ends without finalizing the interpreter: torch's threads may still run meanwhile and occasionally abort
    the process, which torchrun takes for a crash.
    """
    if dist.is_initialized():
        dist.barrier()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def apply_fsdp(
    root: nn.Module,
    units: Iterable[nn.Module],
    full_precision_units: Iterable[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Shard a module over all ranks with FSDP2, in place. With one rank it does nothing.

    Each unit is gathered by itself, so that only one is unsharded at a time; the remaining parameters belong to the
    root. Units are gathered in `dtype`, `full_precision_units` in their own dtype. Gradients are reduced in float32.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs are not cast: they include temperatures, which bfloat16 would round.
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in full_precision_units:
        fully_shard(module, mesh=mesh)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=mixed_precision)
    fully_shard(root, mesh=mesh, mp_policy=mixed_precision)


def reshard(root: nn.Module) -> None:
    """Free the unsharded copies of the root's own parameters, which FSDP keeps between forward passes."""
    if isinstance(root, FSDPModule):
        root.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of which this rank may hold a shard. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor. It is not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, with the device, dtype and placement of `pattern`.

    Every rank must have the same full tensor.
    """
    tensor = tensor.to(device=pattern.device, dtype=pattern.dtype)
    if isinstance(pattern, DTensor):
        return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return tensor


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it. All ranks must call it."""
    dist.all_reduce(tensor)
    return tensor


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank. All ranks must call it."""
    objects = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(objects, src=0)
    return objects[0]
