"""The certificate of a conversion: every tensor of both sides with its digest, and the checks that passed."""

import json
import platform
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from pacs_megatron.checkpoint.safetensors_file import tensor_bytes
from pacs_megatron.models import ModelSpec
from pacs_megatron.runtime.environment import installed
from pacs_megatron.runtime.files import write_atomically

CERTIFICATE_NAME = "certificate.json"
_FORMAT = 1
_VERSIONS_OF = ("pacs-megatron", "torch", "megatron-core", "transformers", "safetensors")

Side = Literal["hf", "megatron"]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of one side; full shape. `xxh3_128` is the digest of its row-major bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its result. A failed check raises, so a certificate has passed checks only."""

    name: str
    result: str


@dataclass(slots=True, kw_only=True)
class Certificate:
    """Several threads add to it; tensors are sorted by name when written."""

    direction: Literal["hf-to-megatron", "megatron-to-hf", "verify"]
    source: str
    target: str
    spec: ModelSpec
    checks: list[Check] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Redundant Hugging Face tensors (a second copy of tied embeddings, rotary tables)"""
    logits: dict[str, Any] | None = None
    _tensors: dict[Side, dict[str, TensorRecord]] = field(default_factory=lambda: {"hf": {}, "megatron": {}})
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def add(self, side: Side, name: str, parts: Sequence[torch.Tensor]) -> None:
        """Records one tensor, given whole or as consecutive parts along its first dimension."""
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(tensor_bytes(part))
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        dtype = str(parts[0].dtype).removeprefix("torch.")
        nbytes = sum(part.nbytes for part in parts)
        record = TensorRecord(name, shape, dtype, nbytes, digest.hexdigest())
        with self._mutex:
            self._tensors[side][name] = record

    def records(self, side: Side) -> list[TensorRecord]:
        """Sorted by name."""
        return [record for _, record in sorted(self._tensors[side].items())]

    def to_json(self) -> str:
        sides = {}
        for side in ("hf", "megatron"):
            records = self.records(side)
            sides[side] = {
                "num_tensors": len(records),
                "nbytes": sum(r.nbytes for r in records),
                "tensors": [asdict(r) for r in records],
            }
        content = {
            "format": _FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "direction": self.direction,
            "source": self.source,
            "target": self.target,
            "family": self.spec.family,
            "versions": {"python": platform.python_version()}
            | {name: installed(name) or "not installed" for name in _VERSIONS_OF},
            "checks": [asdict(check) for check in self.checks],
            "left_out": sorted(self.left_out),
            "logits": self.logits,
            **sides,
        }
        return json.dumps(content, indent=1) + "\n"

    def write(self, path: Path) -> None:
        write_atomically(path, [self.to_json().encode()])
