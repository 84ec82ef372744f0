"""The certificate of a conversion: every tensor of both sides with its digest, and the checks that
passed.
"""

import json
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from pacs_megatron.checkpoint.safetensors_file import tensor_bytes
from pacs_megatron.models import ModelSpec
from pacs_megatron.runtime.environment import installed
from pacs_megatron.runtime.files import write_outputs

CERTIFICATE_NAME = "certificate.json"
_FORMAT = 1
_VERSIONS_OF = ("pacs-megatron", "torch", "megatron-core", "transformers", "safetensors")

Side = Literal["hf", "megatron"]


@dataclass(slots=True, kw_only=True)
class Certificate:
    """Several threads add to it; tensors are sorted by name when written."""

    direction: Literal["hf-to-megatron", "megatron-to-hf", "verify"]
    source: str
    target: str
    spec: ModelSpec
    checks: dict[str, str] = field(default_factory=dict)
    """Name -> result. A failed check raises, so a certificate has passed checks only."""
    left_out: list[str] = field(default_factory=list)
    """Redundant Hugging Face tensors (a second copy of tied embeddings, rotary tables)"""
    logits: dict[str, Any] | None = None
    _tensors: dict[Side, dict[str, dict[str, Any]]] = field(
        default_factory=lambda: {"hf": {}, "megatron": {}}
    )
    """Name -> full shape, dtype, and the digest of the row-major bytes"""

    def add(self, side: Side, name: str, tensor: torch.Tensor) -> None:
        """Records one tensor."""
        record: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "nbytes": tensor.nbytes,
            "xxh3_128": xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)),
        }
        self._tensors[side][name] = record

    def write(self, path: Path) -> None:
        sides: dict[str, Any] = {}
        for side, found in self._tensors.items():
            records = [found[name] for name in sorted(found)]
            nbytes = sum(record["nbytes"] for record in records)
            sides[side] = {"num_tensors": len(records), "nbytes": nbytes, "tensors": records}
        content = {
            "direction": self.direction,
            "format": _FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": self.source,
            "target": self.target,
            "family": self.spec.family,
            "versions": {"python": platform.python_version()}
            | {name: installed(name) or "not installed" for name in _VERSIONS_OF},
            "checks": [{"name": name, "result": result} for name, result in self.checks.items()],
            "left_out": sorted(self.left_out),
            "logits": self.logits,
            **sides,
        }
        write_outputs([(path, (json.dumps(content, indent=1) + "\n").encode())])
