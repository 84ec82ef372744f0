"""The sizes of the parallel axes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes; `world_size = tp * pp * cp * dp`.

    Expert parallelism divides a stage's ranks.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel replicas; exact only if the replicas divide `world_size` (the config checks
        that).
        """
        return self.world_size // self.model_parallel_size

    @property
    def expert_tp(self) -> int:
        """Number of ranks that shard one expert: 1 with expert parallelism, which distributes whole
        experts, else tp.
        """
        return 1 if self.ep > 1 else self.tp

    @property
    def needs_equal_microbatches(self) -> bool:
        """True if a collective inside the forward pass spans data-parallel ranks."""
        return self.ep > 1

    @property
    def microbatch_multiple(self) -> int:
        """A rank's number of micro-batches is a multiple of this, because the interleaved schedule
        needs complete rounds.
        """
        return self.pp if self.vpp is not None else 1


def logits_per_chunk(device_bytes: float | None) -> int:
    """Number of elements of one chunk of logits.

    Every chunk reads and writes the fp32 gradient of the whole output layer, so larger chunks move
    fewer bytes. At 10 bytes an element a chunk needs 2 % of the GPU's memory. On the CPU it needs
    256 MiB in fp32.

    Args:
        device_bytes: memory of the GPU; None: the CPU.
    """
    if device_bytes is None:
        return 1 << 26
    return int(device_bytes / 512)
