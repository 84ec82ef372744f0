"""Expected checksums of a server's parameters, computed from the exported tensors by an independent
implementation.

SGLang hashes its parameters in their server-side form: fused (q, k, v; gate, up; the experts of a
layer), sharded over tensor-parallel ranks, vocabulary padded. Hashes as in SGLang 0.5.23: SHA-256
on CPU, a 64-bit word hash on CUDA.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pacs_megatron.contracts.digest import as_words
from pacs_megatron.errors import SyncError

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this, with zeros."""
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
} | {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<what>gate_proj|up_proj|down_proj)\.weight"
)
_MODULE = re.compile(r"(?P<prefix>.*\.)(?P<module>\w+)\.(?P<what>weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    num_kv_heads: int
    num_experts: int = 0


class ExpectedChecksums:
    """Processes an export tensor by tensor; keeps only the parts of incomplete fused parameters."""

    def __init__(
        self, dims: ModelDims, tp: int, hash_tensor: Callable[[torch.Tensor], str]
    ) -> None:
        if tp > 1 and dims.num_kv_heads % tp and tp % dims.num_kv_heads:
            raise SyncError(
                f"sync.verify: neither of tp={tp} and {dims.num_kv_heads} key-value heads divides "
                "the other; use verify=off"
            )
        self._dims = dims
        self._tp = tp
        self._hash = hash_tensor
        self._waiting: dict[str, dict[int, tuple[str, torch.Tensor]]] = {}
        """server's parameter -> Hugging Face name and tensor of each part so far"""
        self.by_name: dict[str, list[str]] = {}
        """server's parameter name -> hash of each tensor-parallel rank's part"""

    def add(self, name: str, tensor: torch.Tensor, only: frozenset[str] | None = None) -> None:
        """Adds one exported tensor in the dtype that is sent; `only` restricts the hashes to some
        server parameters.
        """
        target, part, num_parts = self.place(name)
        if only is not None and target not in only:
            return
        parts = self._waiting.setdefault(target, {})
        parts[part] = name, tensor if num_parts == 1 else tensor.clone()
        if len(parts) == num_parts:
            del self._waiting[target]
            ordered = [parts[number] for number in range(num_parts)]
            self.by_name[target] = [
                self._hash(self._shard(ordered, rank)) for rank in range(self._tp)
            ]

    def place(self, name: str) -> tuple[str, int, int]:
        """(server's parameter, index of the part, number of parts)"""
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            number = int(expert["expert"])
            what = expert["what"]
            if what == "down_proj":
                return f"{expert['prefix']}.w2_weight", number, self._dims.num_experts
            return (
                f"{expert['prefix']}.w13_weight",
                2 * number + (what == "up_proj"),
                2 * self._dims.num_experts,
            )
        module = _MODULE.fullmatch(name)
        if module is not None and module["module"] in _FUSED:
            fused, part, num_parts = _FUSED[module["module"]]
            return f"{module['prefix']}{fused}.{module['what']}", part, num_parts
        return name, 0, 1

    def check_complete(self) -> None:
        """Raises SyncError if a fused parameter lacks parts: the export was incomplete."""
        for target, parts in self._waiting.items():
            num_parts = self.place(next(iter(parts.values()))[0])[2]
            raise SyncError(
                f"sync.verify: {target} got {len(parts)} of its {num_parts} parts in this export"
            )

    def _shard(self, fused: list[tuple[str, torch.Tensor]], rank: int) -> torch.Tensor:
        parts = [self._slice(name, tensor, rank) for name, tensor in fused]
        name = fused[0][0]
        if _EXPERT.fullmatch(name) is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if ".down_proj." in name:
            return torch.stack(parts)
        return torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)])

    def _slice(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if "embed_tokens." in name or name.startswith("lm_head."):
            missing = -len(tensor) % VOCAB_MULTIPLE
            padded = (
                torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
                if missing
                else tensor
            )
            return padded.chunk(self._tp)[rank]
        if self._tp == 1:
            return tensor
        if re.search(r"\.(k_proj|v_proj)\.", name):
            num_shards = min(self._tp, self._dims.num_kv_heads)
            return tensor.chunk(num_shards)[rank * num_shards // self._tp]
        if re.search(r"\.(q_proj|gate_proj|up_proj)\.", name):
            return tensor.chunk(self._tp)[rank]
        if re.search(r"\.(o_proj|down_proj)\.weight$", name):
            return tensor.chunk(self._tp, dim=1)[rank].contiguous()
        return tensor


def compare(
    url: str, expected: Mapping[str, list[str]], got: list[dict[str, str]], complete: bool
) -> int:
    """Number of compared hashes, by parameter and tensor-parallel rank.

    Raises SyncError with the first that differ. With `complete` the server must have no parameter
    beyond the expected ones.
    """
    wrong: list[str] = []
    num_ranks = {len(hashes) for hashes in expected.values()}
    if num_ranks != {len(got)}:
        raise SyncError(
            f"{url}: checksums of {len(got)} ranks, expected "
            f"{sorted(num_ranks) or 'some parameters'}; sync.verify supports servers with tensor "
            "parallelism only, use verify=off with others"
        )
    for rank, reported in enumerate(got):
        for name, hashes in expected.items():
            if name not in reported:
                wrong.append(f"{name} (not on the server)")
            elif reported[name] != hashes[rank]:
                wrong.append(f"{name} (rank {rank}: {reported[name]}, expected {hashes[rank]})")
        if complete:
            wrong += [f"{name} (never sent)" for name in reported if name not in expected]
    if wrong:
        advice = (
            "; check that rollout.dtype and model.path are those of the servers"
            if len(wrong) >= len(expected)
            else ""
        )
        raise SyncError(
            f"{url}: {len(wrong)} of {len(expected)} parameters differ from the export by the "
            "server's checksums: "
            f"{', '.join(wrong[:3])}{advice}"
        )
    return len(expected) * len(got)


def hash_for(device: str) -> Callable[[torch.Tensor], str]:
    """The hash that a server on `device` (of its `/server_info`) uses.

    Raises SyncError for an unknown device.
    """
    if device in ("cpu", "cuda"):
        return sha_hash if device == "cpu" else word_hash
    raise SyncError(
        f"sync.verify: the hash of servers on device {device!r} is not supported; use verify=off"
    )


def sha_hash(tensor: torch.Tensor) -> str:
    """First 8 bytes of the SHA-256 of the tensor's bytes, as 16 hexadecimal digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()[:8].hex()


_MASK = 0xFFFFFFFF
_TILE = 8192
_SEED = 0x243F6A88
_CHUNK_TILES = 2048
"""Tiles hashed at a time: bounds the int64 temporaries to a few hundred MB."""


def word_hash(tensor: torch.Tensor) -> str:
    """The hash that SGLang's CUDA servers report, 16 hexadecimal digits: each 32-bit word is mixed
    with its position, summed within tiles of 8192 words, mixed again; the tiles' 64-bit values are
    added and mixed. In int64, reduced to 32 bits.
    """
    words = as_words(tensor)
    num_words = words.numel()
    if num_words == 0:
        return f"{0:016x}"
    seeds = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
    total = 0
    for begin in range(0, num_words, _TILE * _CHUNK_TILES):
        chunk = words[begin : begin + _TILE * _CHUNK_TILES].to(torch.int64) & _MASK
        position = torch.arange(begin, begin + len(chunk), device=chunk.device)
        halves = []
        for factor, seed, turn in ((0x27D4EB2D, seeds[0], 15), (0x165667B1, seeds[1], 13)):
            mixed = ((position * factor + seed) & _MASK) ^ (
                ((position << turn) | (position >> (32 - turn))) & _MASK
            )
            mixed = _mix32(chunk ^ mixed)
            tiles = (
                torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).reshape(-1, _TILE).sum(1)
                & _MASK
            )
            halves.append(_mix32(tiles ^ (num_words * 4 & _MASK)))
        # Sums of halves stay below 2**63; Python's integers add the carry of the low half.
        total += (int(halves[0].sum()) << 32) + int(halves[1].sum())
    return f"{_mix64(total):016x}"


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
