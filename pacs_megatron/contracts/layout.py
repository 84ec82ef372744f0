"""How the ranks are divided over the parallel axes."""

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
        """Ranks that hold one replica of the model and see the same samples."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel replicas; exact only when `world_size` is divisible (the config checks that)."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_tp(self) -> int:
        """Ranks that cut one expert: expert parallelism deals whole experts, without it they are cut like the rest."""
        return 1 if self.ep > 1 else self.tp

    @property
    def needs_equal_microbatches(self) -> bool:
        """True where a collective inside the forward pass spans data-parallel ranks, so counts must agree."""
        return self.ep > 1

    @property
    def microbatch_multiple(self) -> int:
        """A rank's number of micro-batches must be a multiple of this: the interleaved schedule fills whole rounds."""
        return self.pp if self.vpp is not None else 1
