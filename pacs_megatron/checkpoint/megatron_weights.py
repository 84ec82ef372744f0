"""Reads the policy's weights of a Megatron checkpoint through the weight table, also under Hugging
Face names.
"""

from pathlib import Path
from typing import Any

import torch

from pacs_megatron.checkpoint.adapters import LoraFacts, combined_digest, tensor_digests
from pacs_megatron.checkpoint.dist_reader import MODEL_PREFIX, DistReader
from pacs_megatron.checkpoint.hf_folder import WEIGHT_DTYPES, HfFolder, check_names
from pacs_megatron.checkpoint.manifest import (
    DIST_FOLDER,
    HF_FOLDER,
    check_checkpoint,
    read_manifest,
)
from pacs_megatron.checkpoint.names import CHECKPOINTS_FOLDER, MANIFEST_NAME, position_of
from pacs_megatron.errors import CheckpointError
from pacs_megatron.models import Entry, load_config, read_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.models.lora import adapter_matrices, all_matrices, fused_up, merged

_NOT_WEIGHTS = "._extra_state"
"""Objects that Megatron's linear layers add (FP8 scales or empty objects)"""


class MegatronWeights:
    """A converted or training checkpoint. `get` takes Hugging Face names, same as HfFolder.

    The weights of a checkpoint of adapters are those of its frozen model with the adapters merged.
    """

    def __init__(self, path: str | Path, *, digests: bool = True) -> None:
        """Checks everything except, without `digests`, the data.

        Args:
            path: a checkpoint with a manifest.
            digests: whether every file is read first and its digest compared with the manifest's.

        Raises:
            CheckpointError: for files that are missing or altered, a checkpoint under another one's
                name, a key that no row of the table maps, a row without a key, a wrong shape, or
                with adapters a frozen model that is missing or (with `digests`) changed.
        """
        self.path = Path(path)
        self.manifest = check_checkpoint(self.path, digests=digests)
        self.metadata_folder = self.path / HF_FOLDER
        self.config: dict[str, Any] = load_config(self.metadata_folder)
        self.table = weight_table(read_spec(self.config))
        self._reader = DistReader(self.path / DIST_FOLDER)
        self._newest: tuple[Entry, tuple[torch.Tensor, ...]] | None = None
        self.lora = LoraFacts.read(self.path)
        """with adapters only"""
        self._base: HfFolder | MegatronWeights | None = None
        if self.lora is not None:
            self._base = _open_base(self.path, self.lora, digests=digests)
        self._check_keys()

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names, in the table's order."""
        return tuple(self.table.by_hf)

    def dtype(self, entry: Entry) -> torch.dtype:
        """The dtype in the checkpoint."""
        if self.lora is not None:
            first, *_ = all_matrices(self.table, self.lora.options)
            return self._reader.dtype(MODEL_PREFIX + first.name)
        first_key, *_ = entry.checkpoint_shapes
        return self._reader.dtype(MODEL_PREFIX + first_key)

    def get_entry(self, entry: Entry) -> torch.Tensor:
        """The full Megatron tensor, vocabulary padded. Safe from any thread."""
        if self._base is not None:
            return self._merged(entry)
        keys = [MODEL_PREFIX + key for key in entry.checkpoint_shapes]
        parts = [self._reader.get(key, entry.expert) for key in keys]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def adapters(self) -> dict[str, torch.Tensor]:
        """Every A and B under PEFT's name."""
        assert self.lora is not None
        names = [matrix.name for matrix in all_matrices(self.table, self.lora.options)]
        return {name: self._reader.get(MODEL_PREFIX + name, None) for name in names}

    def _merged(self, entry: Entry) -> torch.Tensor:
        """The frozen tensor with its adapters, as the policy exports it."""
        assert self.lora is not None
        if isinstance(self._base, MegatronWeights):
            frozen = self._base.get_entry(entry)
        else:
            assert self._base is not None
            frozen = entry.to_megatron([self._base.get(name) for name in entry.hf_names])
        frozen = frozen.to(self.dtype(entry))

        ups = {}
        downs = []
        for matrix in adapter_matrices(entry, self.lora.options):
            values = self._reader.get(MODEL_PREFIX + matrix.name, None).double()
            if matrix.kind == "A":
                downs.append(values)
            else:
                ups[matrix.hf_name] = values
        if not downs:
            return frozen
        up = fused_up(entry, ups, entry.sizes)
        return merged(frozen, up, torch.cat(downs), self.lora.alpha / self.lora.rank)

    def release_entry(self, entry: Entry) -> None:
        """Frees the memory of `get_entry`'s tensor. A later use of a view reads the file again."""
        if isinstance(self._base, MegatronWeights):
            self._base.release_entry(entry)
            return
        if self._base is not None:
            for name in entry.hf_names:
                self._base.release(name)
            return
        for key in entry.checkpoint_shapes:
            self._reader.release(MODEL_PREFIX + key, entry.expert)

    def get(self, name: str) -> torch.Tensor:
        """One Hugging Face tensor. Reads the whole Megatron tensor that contains it."""
        if name not in self.table.by_hf:
            raise CheckpointError(f"{self.path} has no tensor {name}; it belongs to another model")
        entry = self.table.by_hf[name]
        # A Megatron tensor gives up to three Hugging Face tensors, which callers get in a row.
        if self._newest is None or self._newest[0] is not entry:
            self._newest = entry, entry.to_hf(self.get_entry(entry))
        _, hf_tensors = self._newest
        return hf_tensors[entry.hf_names.index(name)]

    def _check_keys(self) -> None:
        """Raises CheckpointError unless keys, dtypes and shapes are those of the table."""
        folder = self.path / DIST_FOLDER
        expected = self._expected_shapes()
        present = {
            key
            for key in self._reader.keys
            if key.startswith(MODEL_PREFIX) and _NOT_WEIGHTS not in key
        }
        family = self.table.spec.family
        for key in sorted(present - expected.keys()):
            raise CheckpointError(
                f"{folder} contains {key}, which no row of the table of family {family} maps"
            )
        for key in sorted(expected.keys() - present):
            raise CheckpointError(f"{folder} lacks {key}, which the table of family {family} needs")
        for key in expected:
            dtype = self._reader.dtype(key)
            if dtype not in WEIGHT_DTYPES:
                raise CheckpointError(f"{folder}: {key} is {dtype}, which is no dtype of weights")
        for key, expected_shape in expected.items():
            shape = self._reader.shape(key)
            if shape != expected_shape:
                raise CheckpointError(
                    f"{folder}: {key} is {list(shape)}, expected {list(expected_shape)} from "
                    f"{HF_FOLDER}/config.json; they belong to different models"
                )
        if self.lora is not None:
            return
        for entry in self.table.entries:
            dtypes = {self._reader.dtype(MODEL_PREFIX + key) for key in entry.checkpoint_shapes}
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{folder}: the parts of {entry.checkpoint_name} have different dtypes "
                    f"({', '.join(sorted(map(str, dtypes)))}), but form one tensor"
                )

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of every tensor of the model."""
        if self.lora is not None:
            matrices = all_matrices(self.table, self.lora.options)
            return {MODEL_PREFIX + matrix.name: matrix.shape for matrix in matrices}
        expected = {}
        for entry in self.table.entries:
            for key, shape in entry.checkpoint_shapes.items():
                expected[MODEL_PREFIX + key] = shape
        return expected


def _open_base(checkpoint: Path, lora: LoraFacts, *, digests: bool) -> HfFolder | MegatronWeights:
    """The frozen weights of a checkpoint of adapters.

    Raises:
        CheckpointError: if they are missing or, with `digests`, changed.
    """
    try:
        folder = model_folder(lora.base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint} has adapters alone, and their model is missing: {error}"
        ) from None
    base = open_weights(weights_folder(folder), digests=digests)
    if digests:
        found = combined_digest(tensor_digests(base.names, base.get))
        if found != lora.base_digest:
            raise CheckpointError(
                f"{checkpoint} has adapters of other weights than those in {lora.base} now: digest "
                f"{lora.base_digest[:12]}, got {found[:12]}; restore that model"
            )
    return base


def weights_folder(model_dir: Path) -> Path:
    """The folder of the weights for a folder from `model_folder`; a converted checkpoint has its HF
    files in `hf/`.
    """
    parent = model_dir.parent
    if is_megatron_checkpoint(parent) and model_dir.name == HF_FOLDER:
        return parent
    return model_dir


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Whether the folder is a checkpoint with a manifest (and no Hugging Face folder)."""
    return (Path(path) / MANIFEST_NAME).is_file()


def open_weights(path: str | Path, *, digests: bool = True) -> HfFolder | MegatronWeights:
    """The weights at `model.path`: a Hugging Face folder, a converted checkpoint or a training
    checkpoint. Checks names and shapes.

    Args:
        path: the folder.
        digests: whether every file of a Megatron checkpoint is first compared with its manifest.

    Raises:
        CheckpointError, ConversionError: names the first file or tensor that does not fit.
    """
    if is_megatron_checkpoint(path):
        return MegatronWeights(path, digests=digests)
    folder = HfFolder(path)
    check_names(folder, weight_table(read_spec(folder.config)))
    return folder


def find_checkpoint(path: str | Path, step: int | None) -> Path:
    """A checkpoint at a step boundary.

    Args:
        path: the checkpoint itself, a run's folder, or its `checkpoints`.
        step: its step; None: the newest one.

    Raises:
        CheckpointError: if there is none; names the steps that exist.
    """
    folder = Path(path)
    if is_megatron_checkpoint(folder):
        saved_step = read_manifest(folder).step
        if step is not None and step != saved_step:
            raise CheckpointError(
                f"{folder} is the checkpoint of step {saved_step}, not of step {step}; correct "
                "--step"
            )
        return folder

    parent = folder / CHECKPOINTS_FOLDER
    if not parent.is_dir():
        parent = folder
    by_step = _checkpoints_by_step(parent)
    if not by_step:
        raise CheckpointError(
            f"{folder} contains no complete checkpoint (one with {MANIFEST_NAME})"
        )
    selected = max(by_step) if step is None else step
    if selected not in by_step:
        steps = ", ".join(str(number) for number in sorted(by_step))
        raise CheckpointError(f"{parent} has no checkpoint of step {step}; there are {steps}")
    return by_step[selected]


def _checkpoints_by_step(parent: Path) -> dict[int, Path]:
    """Step -> its checkpoint; complete ones at step boundaries, under any name."""
    by_step: dict[int, Path] = {}
    if not parent.is_dir():
        return by_step
    for child in sorted(parent.iterdir()):
        position = position_of(child.name)
        is_inside_step = position is not None and position.updates > 0
        if ".partial" in child.name or is_inside_step or not is_megatron_checkpoint(child):
            continue
        step = read_manifest(child).step
        if step is not None:
            by_step[step] = child
    return by_step
