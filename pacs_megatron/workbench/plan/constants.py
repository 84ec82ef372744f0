"""Numbers that `plan` cannot derive, each with its source: a measurement file of this repository,
or "assumed".
"""

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


# ---------------------------------------------------------------------------- bytes of one trainer
CUDA_CONTEXT_BYTES = Constant(
    value=0.8 * GIB,
    low=0.5 * GIB,
    high=1.2 * GIB,
    source="assumed: CUDA context and loaded kernels of one process",
)
NCCL_BYTES_PER_GROUP = Constant(
    value=0.35 * GIB,
    low=0.1 * GIB,
    high=0.6 * GIB,
    source="assumed: NCCL buffers of one process group",
)
FRAGMENTATION = Constant(
    value=0.04,
    low=0.01,
    high=0.1,
    source="assumed: share of the peak that the caching allocator cannot use",
)
FP8_WEIGHT_COPIES_BYTES = Constant(
    value=2.0,
    low=1.0,
    high=2.0,
    source="assumed: Transformer Engine keeps two FP8 copies of each matrix (rows, columns)",
)
FP8_ACTIVATION_FRAC = Constant(
    value=0.75,
    low=0.6,
    high=1.0,
    source="assumed: saved activations in FP8 against bf16",
)
EXPERT_IMBALANCE = Constant(
    value=1.3,
    low=1.05,
    high=2.0,
    source="assumed: tokens of the fullest expert-parallel rank over the mean",
)

# ----------------------------------------------------------------------------- bytes of one server
SGLANG_MEMORY_FRAC = Constant(
    value=0.85,
    low=0.8,
    high=0.9,
    source="assumed: SGLang's own choice of mem_fraction where none is set",
)
SGLANG_OVERHEAD_BYTES = Constant(
    value=3.0 * GIB,
    low=1.5 * GIB,
    high=6.0 * GIB,
    source="assumed: SGLang's CUDA context, graphs and activations",
)
SGLANG_RELEASED_BYTES = Constant(
    value=1.5 * GIB,
    low=1.0 * GIB,
    high=3.0 * GIB,
    source="assumed: CUDA context and decode graphs that a colocated SGLang keeps after it "
    "released weights and cache (it captures no prefill graphs)",
)

# ---------------------------------------------------------------------------- speed of the trainer
TRAIN_MFU = Constant(
    value=0.45,
    low=0.28,
    high=0.52,
    source="docs/measurements/gpu_session.md",
)
"""Share of the bf16 peak in matrix products, without a bubble; the low end is a model of 0.6B."""
FORWARD_MFU = Constant(
    value=0.45,
    low=0.27,
    high=0.55,
    source="docs/measurements/gpu_session.md",
)
"""The same in a forward-only pass."""
FP8_SPEEDUP = Constant(
    value=1.74,
    low=1.3,
    high=1.85,
    source="docs/measurements/published_throughput.md",
)
"""The layers' linear products of a training step in FP8 against bf16."""
EXPERT_COPY_BYTES = Constant(
    value=255e3,
    low=100e3,
    high=320e3,
    source="docs/measurements/published_throughput.md",
)
"""Time of one copy of a token in one layer's experts beside its matrix products (exchange, sorting,
launches; forward and backward), as bytes over NVLink.
"""
TP_LOSS = Constant(
    value=0.04,
    low=0.02,
    high=0.08,
    source="assumed: share of time lost for each doubling of tp inside a node",
)
CP_LOSS = Constant(
    value=0.05,
    low=0.02,
    high=0.1,
    source="assumed: share of time lost for each doubling of cp",
)

# ------------------------------------------------------------- speed of a kernel, for plan --trace
PRODUCT_PEAK_FRAC = Constant(
    value=0.72,
    low=0.5,
    high=0.8,
    source="docs/measurements/gpu_session.md",
)
"""Share of the bf16 peak in one large matrix product."""
ATTENTION_PEAK_FRAC = Constant(
    value=0.45,
    low=0.4,
    high=0.52,
    source="docs/measurements/gpu_session.md",
)
"""Share of the bf16 peak in attention, forward and backward; a causal mask counts half."""
KERNEL_BANDWIDTH_FRAC = Constant(
    value=0.7,
    low=0.5,
    high=0.8,
    source="docs/measurements/gpu_session.md",
)
"""Share of the memory bandwidth in kernels that read and write more than they compute."""
LAUNCH_S = Constant(
    value=45e-6,
    low=20e-6,
    high=70e-6,
    source="docs/measurements/gpu_session.md",
)
"""The host's time to launch one kernel."""

# ------------------------------------------------------------------------------ speed of a sampler
DECODE_BANDWIDTH_FRAC = Constant(
    value=0.99,
    low=0.8,
    high=1.0,
    source="docs/measurements/published_decode.md",
)
"""Share of the memory bandwidth at which a decoding step reads weights and cache."""
DECODE_MFU = Constant(
    value=0.74,
    low=0.4,
    high=0.8,
    source="docs/measurements/published_decode.md",
)
"""Share of the bf16 peak in the matrix products of a decoding step."""
DECODE_OVERHEAD_S = Constant(
    value=0.0028,
    low=0.001,
    high=0.005,
    source="docs/measurements/published_decode.md",
)
"""Launches of one decoding step."""
DECODE_SEQUENCE_S = Constant(
    value=49e-6,
    low=20e-6,
    high=60e-6,
    source="docs/measurements/published_decode.md",
)
"""Scheduling and sampling of one sequence in one decoding step."""
DECODE_TIME = Constant(
    value=1.0,
    low=0.8,
    high=1.4,
    source="docs/measurements/published_decode.md",
)
"""Published over planned time of a decoding step."""
MEAN_RESPONSE_FRAC = Constant(
    value=0.45,
    low=0.2,
    high=0.8,
    source="assumed: mean response length as a share of the limit",
)
MEAN_PROMPT_FRAC = Constant(
    value=0.15,
    low=0.05,
    high=0.4,
    source="assumed: mean prompt length as a share of the limit",
)

# --------------------------------------------------------------------------------- links and disks
NETWORK_GB_S = Constant(
    value=40.0,
    low=20.0,
    high=48.0,
    source="assumed: one GPU's share of the network between nodes (400 Gbit/s, 80 %)",
)
NVLINK_FRAC = Constant(
    value=0.75,
    low=0.5,
    high=0.85,
    source="assumed: share of NVLink's rate that a large collective reaches inside a node",
)
SYNC_FRAC = Constant(
    value=0.5,
    low=0.25,
    high=0.8,
    source="assumed: share of the link that a weight sync reaches",
)
COPY_FRAC = Constant(
    value=0.6,
    low=0.4,
    high=0.8,
    source="assumed: share of the memory bandwidth in copies of a weight sync",
)
SYNC_COPIES = Constant(
    value=7.0,
    low=4.0,
    high=9.0,
    source="assumed: bytes of GPU memory that an export moves for each of its bytes, into a bucket "
    "and for its digest",
)
BUCKET_S = Constant(
    value=0.005,
    low=0.002,
    high=0.02,
    source="assumed: one request to a server, and its launches, beside the bytes of a bucket",
)
HOST_GB_S = Constant(
    value=40.0,
    low=15.0,
    high=50.0,
    source="assumed: pinned host memory to or from one GPU, all GPUs of a node at once",
)
DISK_GB_S = Constant(
    value=2.0,
    low=0.3,
    high=10.0,
    source="assumed: write and read of a shared file system, one job",
)
FREE_DISK_FACTOR = Constant(
    value=1.2,
    low=1.2,
    high=1.2,
    source="assumed: free space to keep, as a factor on the size of the files",
)

MEASURABLE = tuple(value for value in vars().values() if isinstance(value, Constant))
"""All constants of this module."""
