"""One model over many ranks: the process group, FSDP2, and tensors whole or in shards.

A group of one is no group: the model stays as it is, without FSDP's copies. Adapters are given and taken as
whole tensors, so nobody else has to know how many ranks there are.
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


def join(device: torch.device) -> tuple[int, int]:
    """Join the group that torchrun (or the caller) made; return (rank, number of ranks)."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leave() -> NoReturn:
    """End this rank's process, its work done. All ranks call.

    At once: torch's threads may still run while an interpreter winds down, and now and then abort the process, which
    torchrun takes for a crash.
    """
    if dist.is_initialized():
        dist.barrier()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def shard(
    root: nn.Module, units: Iterable[nn.Module], precise: Iterable[nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """Cut every unit by itself, so that only one is whole at a time; the rest with the root.

    Units are gathered in `dtype`, and what is `precise` as it is; gradients are summed in float32 in any case.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs are left alone: among them are temperatures, which bfloat16 would bend.
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in precise:
        fully_shard(module, mesh=mesh)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=mixed)
    fully_shard(root, mesh=mesh, mp_policy=mixed)


def at_rest(root: nn.Module) -> None:
    """Between forwards FSDP keeps the root's own weights whole, as copies; let go of them, and show the shards."""
    if isinstance(root, FSDPModule):
        root.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of which this rank may hold a shard. All ranks call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this rank's memory, and not a copy of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """This rank's share of a tensor that every rank has whole, cut as `pattern` is."""
    tensor = tensor.to(device=pattern.device, dtype=pattern.dtype)
    if isinstance(pattern, DTensor):
        return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return tensor


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """In place. All ranks call."""
    dist.all_reduce(tensor)
    return tensor


def from_rank_zero(text: str) -> str:
    """The text that rank 0 has, on every rank."""
    box = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]
