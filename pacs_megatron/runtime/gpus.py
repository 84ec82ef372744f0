"""GPU models of `resources.gpu`: memory, peak speed and links."""

from collections.abc import Mapping
from dataclasses import dataclass

from pacs_megatron.runtime.files import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model; unverified figures of its vendor's data sheet (dense, without sparsity)."""

    name: str
    memory_gib: float
    """Memory that a process can allocate, less than the nominal size."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: no FP8 matrix units."""
    memory_gb_s: float
    nvlink_gb_s: float
    """One direction, one GPU, inside a node."""

    @property
    def memory_bytes(self) -> float:
        """Bytes that a process can allocate."""
        return self.memory_gib * GIB

    @property
    def bf16_flops_s(self) -> float:
        """FLOPs per second at the bf16 peak."""
        return self.bf16_tflops * 1e12


_A100 = Gpu(
    name="a100",
    memory_gib=79.1,
    bf16_tflops=312,
    fp8_tflops=None,
    memory_gb_s=2039,
    nvlink_gb_s=300,
)
_H100 = Gpu(
    name="h100",
    memory_gib=79.1,
    bf16_tflops=989,
    fp8_tflops=1979,
    memory_gb_s=3350,
    nvlink_gb_s=450,
)
_H200 = Gpu(
    name="h200",
    memory_gib=139.8,
    bf16_tflops=989,
    fp8_tflops=1979,
    memory_gb_s=4800,
    nvlink_gb_s=450,
)
_B200 = Gpu(
    name="b200",
    memory_gib=178.3,
    bf16_tflops=2250,
    fp8_tflops=4500,
    memory_gb_s=8000,
    nvlink_gb_s=900,
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in (_A100, _H100, _H200, _B200)}
