"""The GPUs that a plan can be made for. Figures are the vendors'; the shares of them that are reached are assumed."""

from dataclasses import dataclass

from alignment.extensions import describe_unknown

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: memory in GiB, dense bfloat16 TFLOP/s, and GB/s to the other GPUs of its host and beyond it."""

    name: str
    memory_gib: float
    tflops: float
    link_gb_s: float
    network_gb_s: float = 45.0

    @property
    def memory(self) -> float:
        """Return the memory in bytes."""
        return self.memory_gib * GIB


GPUS_PER_HOST = 8
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200-141", 140.4, 989, 300),
        Gpu("H100-80", 79.6, 989, 300),
        Gpu("A100-80", 79.2, 312, 230),
        Gpu("A100-40", 39.4, 312, 230),
        Gpu("L40S-48", 44.5, 362, 25),
        Gpu("A10-24", 22.5, 125, 25),
        Gpu("L4-24", 22.5, 121, 25),
        Gpu("RTX4090-24", 23.6, 165, 25),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name. Raises ValueError for one that is not known."""
    if name not in GPUS:
        raise ValueError(describe_unknown(name, GPUS, "GPU"))
    return GPUS[name]
