"""The certificate of a conversion.

It has every tensor of both sides with its digest, and the checks that passed.
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
class ConversionCertificate:
    """The content of a certificate. Several threads add tensors; the file has them by name."""

    direction: Literal["hf-to-megatron", "megatron-to-hf", "verify"]
    source: str
    """path of the folder or checkpoint that was read"""
    target: str
    """path of the folder or checkpoint that was written, or compared"""
    spec: ModelSpec
    checks: dict[str, str] = field(default_factory=dict)
    """Name -> result. A failed check raises, so a certificate has passed checks only."""
    left_out: list[str] = field(default_factory=list)
    """Redundant Hugging Face tensors (a second copy of tied embeddings, rotary tables)"""
    logits: dict[str, Any] | None = None
    _tensors: dict[Side, dict[str, dict[str, Any]]] = field(
        default_factory=lambda: {"hf": {}, "megatron": {}}
    )
    """side -> name -> full shape, dtype, and the digest of the row-major bytes"""

    def add(self, side: Side, name: str, tensor: torch.Tensor) -> None:
        """Records one full tensor, any shape and dtype, on the CPU."""
        record: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "nbytes": tensor.nbytes,
            "xxh3_128": xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)),
        }
        self._tensors[side][name] = record

    def write(self, path: Path) -> None:
        """Writes the certificate as JSON."""
        versions = {"python": platform.python_version()}
        for name in _VERSIONS_OF:
            versions[name] = installed(name) or "not installed"
        content = {
            "direction": self.direction,
            "format": _FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": self.source,
            "target": self.target,
            "family": self.spec.family,
            "versions": versions,
            "checks": [{"name": name, "result": result} for name, result in self.checks.items()],
            "left_out": sorted(self.left_out),
            "logits": self.logits,
            "hf": self._side("hf"),
            "megatron": self._side("megatron"),
        }
        text = json.dumps(content, indent=1) + "\n"
        write_outputs([(path, text.encode())])

    def _side(self, side: Side) -> dict[str, Any]:
        """The records of all tensors of a side, by name, with their number and size."""
        tensors = self._tensors[side]
        records = [tensors[name] for name in sorted(tensors)]
        return {
            "num_tensors": len(records),
            "nbytes": sum(record["nbytes"] for record in records),
            "tensors": records,
        }
