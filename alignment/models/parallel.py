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
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def init_process_group(device: torch.device, timeout: timedelta | None = None) -> tuple[int, int]:
    """Return (rank, number of ranks), and join torchrun's process group unless the caller has joined it already.

    `timeout` limits each collective; None is torch's default of minutes.
    """
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return rank(), num_ranks()


def rank() -> int:
    """Return this process's rank; 0 if it is the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


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
    shards: int | None = None,
) -> None:
    """Shard a module with FSDP2, in place. With one rank it does nothing.

    `shards` ranks share one copy of the weights, None: all of them. With fewer, there are several copies (HSDP). With 1
    each rank has one: then no weights are gathered, and only gradients are added up.

    Each unit is gathered by itself, so that only one is unsharded at a time; the remaining parameters belong to the
    root. Units are gathered in `dtype`, `full_precision_units` in their own dtype. Gradients are reduced in float32.

    Raises ValueError if the number of ranks is not a multiple of `shards`.
    """
    if num_ranks() == 1:
        return
    mesh = _mesh(device, shards or num_ranks())
    # Inputs are not cast: they include temperatures, which bfloat16 would round.
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in full_precision_units:
        fully_shard(module, mesh=mesh)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=mixed_precision)
    fully_shard(root, mesh=mesh, mp_policy=mixed_precision)


def _mesh(device: torch.device, shards: int) -> DeviceMesh:
    if num_ranks() % shards:
        raise ValueError(f"trainer.dp_shard is {shards}, but the number of ranks, {num_ranks()}, is no multiple of it")
    if shards == num_ranks():
        return init_device_mesh(device.type, (shards,))
    shape = (num_ranks() // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


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
    if num_ranks() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies of the full tensors on rank 0, and nothing on the others. All ranks must call it."""
    full = ((name, full_tensor(tensor).detach()) for name, tensor in tensors.items())
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in full if rank() == 0
    }


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank. All ranks must call it."""
    objects = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(objects, src=0)
    return objects[0]
