"""Adapters in files: PEFT's folder, and the facts about them in a training checkpoint.

PEFT's folder has `adapter_model.safetensors` (every A and B under PEFT's name) and
`adapter_config.json`. A training checkpoint has `lora.json` and the adapters, not the frozen
weights.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save

from pacs_megatron.checkpoint.safetensors_file import SafetensorsFile
from pacs_megatron.checkpoint.staging import StagedFolder
from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.errors import CheckpointError, shown
from pacs_megatron.models import WeightTable
from pacs_megatron.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    all_matrices,
    first_difference,
    peft_config,
)
from pacs_megatron.runtime.files import is_file, write_atomically
from pacs_megatron.runtime.json_reader import read_object

LORA_FILE = "lora.json"
"""of a training checkpoint"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFacts:
    """The adapters of a training checkpoint, and the frozen weights that they belong to."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str
    """`model.path` of the run"""
    base_digest: str
    """of `combined_digest`"""

    @property
    def options(self) -> LoraOptions:
        """As `policy.lora`."""
        return LoraOptions.model_validate(
            {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        )

    def write(self, folder: Path) -> None:
        """Writes `lora.json` into a folder."""
        write_atomically(folder / LORA_FILE, [f"{json.dumps(asdict(self), indent=1)}\n".encode()])

    @classmethod
    def read(cls, folder: Path) -> "LoraFacts | None":
        """The facts in a checkpoint; None if it has all weights.

        Raises:
            CheckpointError: if the file is malformed.
        """
        file = folder / LORA_FILE
        if not is_file(file, CheckpointError):
            return None
        found = read_object(file, error=CheckpointError)
        try:
            facts = cls(**{**found, "targets": tuple(found["targets"])})
            facts.options.model_dump()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} is malformed; restore it") from error
        return facts


def facts_of(options: LoraOptions, base: str, base_digest: str) -> LoraFacts:
    """The facts of a run."""
    return LoraFacts(
        rank=options.rank,
        alpha=options.alpha,
        targets=tuple(options.targets),
        base=base,
        base_digest=base_digest,
    )


def tensor_digests(names: Iterable[str], get: Callable[[str], torch.Tensor]) -> dict[str, str]:
    """Name -> digest of name, dtype, shape and bytes."""
    digests = {}
    for name in names:
        digest = WeightDigest()
        digest.update(name, get(name))
        digests[name] = digest.hexdigest()
    return digests


def combined_digest(digests: Mapping[str, str]) -> str:
    """The digest of a model, which does not depend on the files that contain its tensors."""
    lines = [f"{name} {digests[name]}\n" for name in sorted(digests)]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def check_facts(saved: LoraFacts | None, own: LoraFacts | None, folder: Path) -> None:
    """Checks that a run can continue from a checkpoint.

    Args:
        saved: of the checkpoint.
        own: of the run.
        folder: the checkpoint, for the message.

    Raises:
        CheckpointError: if the run trains other matrices, or has other frozen weights.
    """
    if (saved is None) != (own is None):
        has = "all weights" if saved is None else "adapters"
        fix = "remove" if saved is None else "set"
        raise CheckpointError(
            f"{folder} has {has}, which policy.lora of this run contradicts; {fix} policy.lora, or "
            "start a new run"
        )
    if saved is None or own is None:
        return
    for key in ("rank", "alpha", "targets"):
        was = getattr(saved, key)
        now = getattr(own, key)
        if was != now:
            raise CheckpointError(
                f"{folder} was trained with policy.lora.{key}={shown(was)}, got {shown(now)}; set "
                "it back, or start a new run"
            )
    if saved.base_digest != own.base_digest:
        raise CheckpointError(
            f"{folder} has adapters of other frozen weights than model.path={own.base}: digest "
            f"{saved.base_digest[:12]}, got {own.base_digest[:12]}; restore the model that the run "
            f"started from ({saved.base})"
        )


def write_peft(
    target: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
) -> Path:
    """Writes PEFT's folder, as PEFT's `save_pretrained` does.

    Args:
        target: the folder, which must not exist.
        tensors: every A and B under PEFT's name.
        config: of `peft_config`.

    Raises:
        CheckpointError: if the folder exists.
    """
    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    text = json.dumps(config, indent=2, sort_keys=True)
    with StagedFolder(target) as staged:
        write_atomically(
            staged.path / ADAPTER_WEIGHTS, [save(contiguous, metadata={"format": "pt"})]
        )
        write_atomically(staged.path / ADAPTER_CONFIG, [text.encode()])
        return staged.commit()


def read_peft(folder: Path, table: WeightTable, options: LoraOptions) -> dict[str, torch.Tensor]:
    """The A and B of PEFT's folder, by PEFT's names.

    Args:
        folder: with `adapter_model.safetensors` and `adapter_config.json`.
        table: of the model.
        options: what the adapters must be.

    Raises:
        CheckpointError: if a file is missing or malformed, or the adapters are others.
    """
    config_file = _file_of_peft(folder, ADAPTER_CONFIG)
    found = read_object(config_file, error=CheckpointError)
    expected = peft_config(table.spec, options, "")
    key = first_difference(found, expected)
    if key is not None:
        raise CheckpointError(
            f"{config_file}: {key} is {shown(found.get(key))}, expected "
            f"{shown(expected.get(key))}; use adapters that fit policy.lora, or change policy.lora"
        )

    file = SafetensorsFile(_file_of_peft(folder, ADAPTER_WEIGHTS))
    shapes = {matrix.name: matrix.shape for matrix in all_matrices(table, options)}
    for name in sorted(file.tensors.keys() ^ shapes.keys()):
        state = "is not in policy.lora.targets" if name in file.tensors else "is missing"
        raise CheckpointError(f"{file.path}: {name} {state}; use adapters that fit policy.lora")
    for name, shape in shapes.items():
        info = file.tensors[name]
        if info.shape != shape or info.dtype not in _DTYPES:
            raise CheckpointError(
                f"{file.path}: {name} is {info.dtype} {list(info.shape)}, expected fp32, bf16 or "
                f"fp16 {list(shape)}; the adapters belong to another model"
            )
    return {name: file.get(name) for name in shapes}


def _file_of_peft(folder: Path, name: str) -> Path:
    """Raises CheckpointError if the folder does not contain the file."""
    if not is_file(folder / name, CheckpointError):
        raise CheckpointError(f"{folder} has no {name}; name a folder of PEFT")
    return folder / name
