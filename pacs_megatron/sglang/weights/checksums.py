"""Expected checksums of a server's parameters, computed by an independent implementation.

They come from the exported tensors. SGLang hashes its parameters in their server-side form: fused
(q, k, v; gate, up; the experts of a layer), sharded over tensor-parallel ranks, vocabulary padded.
Hashes as in SGLang 0.5.23: SHA-256 on CPU, a 64-bit word hash on CUDA.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pacs_megatron.contracts.digest import as_words
from pacs_megatron.errors import SyncError
from pacs_megatron.models import VISION_PREFIX, ModelSpec

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this, with zeros."""
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    # Gated delta nets of Qwen3.5; Qwen3-Next is exported with the fused ones.
    "in_proj_qkv": ("in_proj_qkvz", 0, 2),
    "in_proj_z": ("in_proj_qkvz", 1, 2),
    "in_proj_b": ("in_proj_ba", 0, 2),
    "in_proj_a": ("in_proj_ba", 1, 2),
}
"""Hugging Face module -> (the server's module, index of the part, number of parts)"""
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<module>gate_proj|up_proj|down_proj)\.weight"
)
_MODULE = re.compile(r"(?P<prefix>.*\.)(?P<module>\w+)\.(?P<parameter>weight|bias)")


_SPLIT_BY_HEADS = re.compile(
    r"\.linear_attn\.((in_proj_z|in_proj_b|in_proj_a|in_proj_qkvz|in_proj_ba)\.weight|dt_bias|A_log)"
)
"""Tensors of a gated delta net that ranks share by rows"""
_THREE_PARTS = re.compile(r"\.linear_attn\.(in_proj_qkv|conv1d)\.weight")
"""Its tensors of queries, keys and values, each of which ranks share by rows"""
_ZERO_CENTRED = re.compile(r"(?<!linear_attn\.)norm\.weight$")
"""Norms of a hybrid, except a delta net's own"""
_NOT_TRAINED = "visual."
"""Start of the servers' names in a vision tower, which no export has"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The dimensions that decide how a server fuses and shards its parameters."""

    num_kv_heads: int
    num_experts: int = 0
    """0: a dense model"""
    delta_keys: int = 0
    """Rows of the keys of a gated delta net; 0: the model is no hybrid"""
    delta_values: int = 0
    """Rows of its values"""

    @classmethod
    def of(cls, spec: ModelSpec) -> "ModelDims":
        """Those of a model."""
        num_experts = 0 if spec.moe is None else spec.moe.num_experts
        delta = spec.delta
        if delta is None:
            return cls(num_kv_heads=spec.num_kv_heads, num_experts=num_experts)
        return cls(
            num_kv_heads=spec.num_kv_heads,
            num_experts=num_experts,
            delta_keys=delta.num_key_heads * delta.key_head_dim,
            delta_values=delta.num_value_heads * delta.value_head_dim,
        )


class ExpectedChecksums:
    """Processes an export tensor by tensor; keeps only the parts of incomplete fused parameters."""

    def __init__(
        self, dims: ModelDims, tp: int, hash_tensor: Callable[[torch.Tensor], str]
    ) -> None:
        """Expects the parameters of servers that are all alike.

        Args:
            dims: of the model.
            tp: number of tensor-parallel ranks of a server.
            hash_tensor: hash of one rank's part, as the server computes it.

        Raises:
            SyncError: the key-value heads cannot be sharded over `tp` ranks.
        """
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
        """Adds one exported tensor.

        Args:
            name: its Hugging Face name.
            tensor: the whole tensor in the dtype that is sent.
            only: names of the server's parameters that are hashed; None: all.
        """
        target, part, num_parts = self.place(name)
        if self._dims.delta_keys and _ZERO_CENTRED.search(target):
            self._add_shifted(target, tensor, only)
        if only is not None and target not in only:
            return
        # The caller may reuse the memory of a tensor that waits for other parts.
        part_tensor = tensor if num_parts == 1 else tensor.clone()
        parts = self._waiting.setdefault(target, {})
        parts[part] = name, part_tensor
        if len(parts) < num_parts:
            return

        del self._waiting[target]
        ordered = [parts[number] for number in range(num_parts)]
        self.by_name[target] = [self._hash(self._shard(ordered, rank)) for rank in range(self._tp)]

    def _add_shifted(self, target: str, tensor: torch.Tensor, only: frozenset[str] | None) -> None:
        """A server also has 1 + weight of a norm, in the dtype of the weight."""
        shifted = f"{target.removesuffix('weight')}gemma_weight"
        if only is None or shifted in only:
            self.by_name[shifted] = [self._hash(tensor + 1)] * self._tp

    def place(self, name: str) -> tuple[str, int, int]:
        """(server's parameter, index of the part, number of parts) of a Hugging Face name."""
        if self._dims.delta_keys:
            # Their layers on a server have the attention's parameters themselves.
            name = name.replace(VISION_PREFIX, "model.", 1).replace(".self_attn.", ".")
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            number = int(expert["expert"])
            num_experts = self._dims.num_experts
            match expert["module"]:
                case "down_proj":
                    return f"{expert['prefix']}.w2_weight", number, num_experts
                case "gate_proj":
                    return f"{expert['prefix']}.w13_weight", 2 * number, 2 * num_experts
                case _:
                    return f"{expert['prefix']}.w13_weight", 2 * number + 1, 2 * num_experts

        module = _MODULE.fullmatch(name)
        if module is not None and module["module"] in _FUSED:
            fused, part, num_parts = _FUSED[module["module"]]
            return f"{module['prefix']}{fused}.{module['parameter']}", part, num_parts
        return name, 0, 1

    def check_complete(self) -> None:
        """Raises SyncError if a fused parameter lacks parts: the export was incomplete."""
        for target, parts in self._waiting.items():
            any_name, _ = next(iter(parts.values()))
            _, _, num_parts = self.place(any_name)
            raise SyncError(
                f"sync.verify: {target} got {len(parts)} of its {num_parts} parts in this export"
            )

    def _shard(self, fused: list[tuple[str, torch.Tensor]], rank: int) -> torch.Tensor:
        """A tensor-parallel rank's part of the server's parameter, from the exported tensors."""
        parts = [self._slice(name, tensor, rank) for name, tensor in fused]
        name = fused[0][0]
        if _EXPERT.fullmatch(name) is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if ".down_proj." in name:
            return torch.stack(parts)
        gates_and_ups = [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return torch.stack(gates_and_ups)

    def _slice(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A tensor-parallel rank's part of one exported tensor.

        Embedding and lm_head are split by vocabulary; q, k, v, gate and up by output features; o
        and down by input features. Other tensors are whole on each rank.

        Args:
            name: Hugging Face name.
            tensor: the whole tensor.
            rank: number of the tensor-parallel rank.
        """
        if "embed_tokens." in name or name.startswith("lm_head."):
            num_missing = -len(tensor) % VOCAB_MULTIPLE
            if num_missing:
                padding = tensor.new_zeros(num_missing, *tensor.shape[1:])
                tensor = torch.cat([tensor, padding])
            return tensor.chunk(self._tp)[rank]
        if name.endswith(".A_log"):
            tensor = tensor.float()  # as servers store it
        if self._tp == 1:
            return tensor
        if ".linear_attn." in name:
            return self._slice_of_delta_net(name, tensor, rank)
        if re.search(r"\.(k_proj|v_proj)\.", name):
            # With more ranks than key-value heads, several ranks have the same head.
            num_shards = min(self._tp, self._dims.num_kv_heads)
            return tensor.chunk(num_shards)[rank * num_shards // self._tp]
        if re.search(r"\.(q_proj|gate_proj|up_proj)\.", name):
            return tensor.chunk(self._tp)[rank]
        if re.search(r"\.(o_proj|down_proj)\.weight$", name):
            return tensor.chunk(self._tp, dim=1)[rank].contiguous()
        return tensor

    def _slice_of_delta_net(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """As `_slice`: heads are split; the norm over a head is whole on each rank."""
        if _THREE_PARTS.search(name):
            keys = self._dims.delta_keys
            parts = tensor.split([keys, keys, self._dims.delta_values])  # type: ignore[no-untyped-call]
            return torch.cat([part.chunk(self._tp)[rank] for part in parts])
        if _SPLIT_BY_HEADS.search(name):
            return tensor.chunk(self._tp)[rank]
        if name.endswith(".out_proj.weight"):
            return tensor.chunk(self._tp, dim=1)[rank].contiguous()
        return tensor


def compare(
    url: str, expected: Mapping[str, list[str]], got: list[dict[str, str]], complete: bool
) -> int:
    """Number of compared hashes, over parameters and tensor-parallel ranks.

    Args:
        url: the server's, for messages.
        expected: the server's parameter name -> hash of each rank's part.
        got: for each rank, parameter name -> hash that the server reports.
        complete: whether a parameter of the server that is not expected is an error.

    Raises:
        SyncError: names the first hashes that differ.
    """
    num_ranks = {len(hashes) for hashes in expected.values()}
    if num_ranks != {len(got)}:
        raise SyncError(
            f"{url}: checksums of {len(got)} ranks, expected "
            f"{sorted(num_ranks) or 'some parameters'}; sync.verify supports servers with tensor "
            "parallelism only, use verify=off with others"
        )

    wrong: list[str] = []
    for rank, reported in enumerate(got):
        for name, hashes in expected.items():
            if name not in reported:
                wrong.append(f"{name} (not on the server)")
            elif reported[name] != hashes[rank]:
                wrong.append(f"{name} (rank {rank}: {reported[name]}, expected {hashes[rank]})")
        if complete:
            for name in reported:
                if name not in expected and not name.startswith(_NOT_TRAINED):
                    wrong.append(f"{name} (never sent)")
    if wrong:
        advice = ""
        if len(wrong) >= len(expected):
            advice = "; check that rollout.dtype and model.path are those of the servers"
        raise SyncError(
            f"{url}: {len(wrong)} of {len(expected)} parameters differ from the export by the "
            f"server's checksums: {', '.join(wrong[:3])}{advice}"
        )
    return len(expected) * len(got)


def hash_for(device: str) -> Callable[[torch.Tensor], str]:
    """The hash that a server on `device` (of its `/server_info`) uses.

    Raises SyncError for an unknown device.
    """
    if device == "cpu":
        return sha_hash
    if device == "cuda":
        return word_hash
    raise SyncError(
        f"sync.verify: the hash of servers on device {device!r} is not supported; use verify=off"
    )


def sha_hash(tensor: torch.Tensor) -> str:
    """First 8 bytes of the SHA-256 of the tensor's bytes, as 16 hexadecimal digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data
    return hashlib.sha256(data).digest()[:8].hex()


_MASK = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_TILE = 8192
_SEED = 0x243F6A88
_CHUNK_TILES = 2048
"""Tiles hashed at a time: bounds the int64 temporaries to a few hundred MB."""


def word_hash(tensor: torch.Tensor) -> str:
    """The hash that SGLang's CUDA servers report, as 16 hexadecimal digits.

    Each 32-bit word is mixed with its position, summed within tiles of 8192 words, mixed again; the
    tiles' 64-bit values are added and mixed. In int64, reduced to 32 bits.
    """
    words = as_words(tensor)
    num_words = words.numel()
    if num_words == 0:
        return f"{0:016x}"

    num_bytes = num_words * 4
    high_seed = _SEED
    low_seed = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK
    total = 0
    chunk_words = _TILE * _CHUNK_TILES
    for begin in range(0, num_words, chunk_words):
        chunk = words[begin : begin + chunk_words].to(torch.int64) & _MASK
        position = torch.arange(begin, begin + len(chunk), device=chunk.device)
        high = _tile_hashes(chunk ^ _key(position, 0x27D4EB2D, high_seed, 15), num_bytes)
        low = _tile_hashes(chunk ^ _key(position, 0x165667B1, low_seed, 13), num_bytes)
        # Sums of halves stay below 2**63; Python's integers add the carry of the low half.
        total += (int(high.sum()) << 32) + int(low.sum())
    return f"{_mix64(total):016x}"


def _key(position: torch.Tensor, factor: int, seed: int, turn: int) -> torch.Tensor:
    """The 32 bits that a word at each position is mixed with, as int64."""
    scaled = (position * factor + seed) & _MASK
    rotated = ((position << turn) | (position >> (32 - turn))) & _MASK
    return scaled ^ rotated


def _tile_hashes(words: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Hash of each tile of 8192 words.

    Args:
        words: int64 [words], below 2**32, mixed with their positions.
        num_bytes: size of the whole tensor.

    Returns:
        int64 [tiles], below 2**32.
    """
    mixed = _mix32(words)
    padded = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE))
    sums = padded.reshape(-1, _TILE).sum(1) & _MASK
    return _mix32(sums ^ (num_bytes & _MASK))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 for 32 bits, on int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    """The finalizer of SplitMix64."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
