"""Division of the ranks over the parallel axes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes; `world_size = tp * pp * cp * dp`. Expert parallelism divides a stage's ranks."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica of the model; they see the same samples."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel replicas; exact only when `world_size` is divisible (the config checks that)."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_tp(self) -> int:
        """Ranks over which one expert is sharded: expert parallelism assigns whole experts to ranks."""
        return 1 if self.ep > 1 else self.tp

    @property
    def needs_equal_microbatches(self) -> bool:
        """True if a collective inside the forward pass spans data-parallel ranks, so their counts must be equal."""
        return self.ep > 1

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches of a rank is a multiple of this: the interleaved schedule needs whole rounds."""
        return self.pp if self.vpp is not None else 1
