"""Numbers that `plan` cannot derive, each with its source: a measurement file of this repository,
or "assumed".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pacs_megatron.runtime.files import GIB


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with its range and its source."""

    value: float
    low: float
    high: float
    source: str
    """`docs/measurements/...` if this project measured it, else a text that starts with `assumed`.
    """

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest value as factors on `value`."""
        return self.low / self.value, self.high / self.value


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


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            memory_gib=79.1,
            bf16_tflops=312,
            fp8_tflops=None,
            memory_gb_s=2039,
            nvlink_gb_s=300,
        ),
        Gpu(
            name="h100",
            memory_gib=79.1,
            bf16_tflops=989,
            fp8_tflops=1979,
            memory_gb_s=3350,
            nvlink_gb_s=450,
        ),
        Gpu(
            name="h200",
            memory_gib=139.8,
            bf16_tflops=989,
            fp8_tflops=1979,
            memory_gb_s=4800,
            nvlink_gb_s=450,
        ),
        Gpu(
            name="b200",
            memory_gib=178.3,
            bf16_tflops=2250,
            fp8_tflops=4500,
            memory_gb_s=8000,
            nvlink_gb_s=900,
        ),
    )
}

_CUDA_CONTEXT = "assumed: CUDA context and loaded kernels of one process"
CUDA_CONTEXT_BYTES = Constant(0.8 * GIB, 0.5 * GIB, 1.2 * GIB, _CUDA_CONTEXT)
NCCL_BYTES_PER_GROUP = Constant(
    0.35 * GIB, 0.1 * GIB, 0.6 * GIB, "assumed: NCCL buffers of one process group"
)
FRAGMENTATION = Constant(
    0.04, 0.01, 0.1, "assumed: share of the peak that the caching allocator cannot use"
)
TRAIN_MFU = Constant(
    0.40, 0.3, 0.5, "assumed: share of the bf16 peak in matrix products, without a bubble"
)
FORWARD_MFU = Constant(0.45, 0.33, 0.55, "assumed: share of the bf16 peak in a forward-only pass")
FP8_SPEEDUP = Constant(1.3, 1.1, 1.5, "assumed: training step in FP8 against bf16")
TP_LOSS = Constant(
    0.04, 0.02, 0.08, "assumed: share of time lost for each doubling of tp inside a node"
)
CP_LOSS = Constant(0.05, 0.02, 0.1, "assumed: share of time lost for each doubling of cp")
DECODE_BANDWIDTH_FRAC = Constant(
    0.6, 0.4, 0.8, "assumed: share of the memory bandwidth that decoding reaches"
)
DECODE_MFU = Constant(0.25, 0.15, 0.4, "assumed: share of the bf16 peak in a decoding step")
DECODE_OVERHEAD_S = Constant(
    0.004, 0.002, 0.01, "assumed: scheduling and launches of one decoding step of SGLang"
)
SGLANG_MEMORY_FRAC = Constant(
    0.85, 0.8, 0.9, "assumed: SGLang's own choice of mem_fraction where none is set"
)
_OVERHEAD = "assumed: SGLang's CUDA context, graphs and activations"
SGLANG_OVERHEAD_BYTES = Constant(3.0 * GIB, 1.5 * GIB, 6.0 * GIB, _OVERHEAD)
_RELEASED = "assumed: CUDA context and graphs that a colocated SGLang keeps after it released weights and cache"
SGLANG_RELEASED_BYTES = Constant(1.5 * GIB, 1.0 * GIB, 3.0 * GIB, _RELEASED)
MEAN_RESPONSE_FRAC = Constant(
    0.45, 0.2, 0.8, "assumed: mean response length as a share of the limit"
)
MEAN_PROMPT_FRAC = Constant(0.15, 0.05, 0.4, "assumed: mean prompt length as a share of the limit")
NETWORK_GB_S = Constant(
    40.0, 20.0, 48.0, "assumed: one GPU's share of the network between nodes (400 Gbit/s, 80 %)"
)
SYNC_FRAC = Constant(0.5, 0.25, 0.8, "assumed: share of the link that a weight sync reaches")
HOST_GB_S = Constant(
    40.0, 15.0, 50.0, "assumed: pinned host memory to or from one GPU, all GPUs of a node at once"
)
DISK_GB_S = Constant(2.0, 0.3, 10.0, "assumed: write and read of a shared file system, one job")
_COPIES = "assumed: Transformer Engine keeps two FP8 copies of each matrix (rows, columns)"
FP8_WEIGHT_COPIES_BYTES = Constant(2.0, 1.0, 2.0, _COPIES)
FP8_ACTIVATION_FRAC = Constant(0.75, 0.6, 1.0, "assumed: saved activations in FP8 against bf16")
EXPERT_IMBALANCE = Constant(
    1.3, 1.05, 2.0, "assumed: tokens of the fullest expert-parallel rank over the mean"
)
FREE_DISK_FACTOR = Constant(
    1.2, 1.2, 1.2, "assumed: free space to keep, as a factor on the size of the files"
)

MEASURABLE = tuple(value for value in vars().values() if isinstance(value, Constant))
