"""Hugging Face folder -> Megatron checkpoint and back, tensor by tensor.

Memory use does not depend on the model's size.
"""

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pacs_megatron.checkpoint.adapters import write_peft
from pacs_megatron.checkpoint.beside import Beside
from pacs_megatron.checkpoint.dist_reader import MODEL_PREFIX
from pacs_megatron.checkpoint.dist_writer import DistWriter, Piece
from pacs_megatron.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    HfFolder,
    HfFolderWriter,
    check_names,
    copy_hf_metadata,
    hf_tensors,
    metadata_files,
)
from pacs_megatron.checkpoint.manifest import (
    DIST_FOLDER,
    HF_FOLDER,
    FileFacts,
    Manifest,
    digest_file,
    write_manifest,
)
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint
from pacs_megatron.checkpoint.safetensors_file import TensorInfo
from pacs_megatron.checkpoint.staging import StagedFolder, check_free_disk
from pacs_megatron.convert.certificate import CERTIFICATE_NAME, ConversionCertificate
from pacs_megatron.convert.pipeline import WORKERS, Task, run_tasks
from pacs_megatron.convert.verify import DTYPES, FILES, compare, files_check
from pacs_megatron.errors import CheckpointError, ConversionError
from pacs_megatron.models import Entry, WeightTable, read_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.models.lora import peft_config
from pacs_megatron.runtime.json_reader import parse_json, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """Options of both directions."""

    out: Path
    """target folder"""
    dtype: str | None = None
    """a key of DTYPES; None keeps the source's dtype"""
    verify: bool = False
    """whether to read the result back and compare every bit"""
    verify_source: bool = True
    """whether to compare a Megatron checkpoint's files with its manifest's digests before reading
    them
    """


def _summary(options: ConversionOptions, num_tensors: int, nbytes: int, seconds: float) -> str:
    gigabytes = nbytes / 1e9
    outcome = "not verified (use --verify)"
    if options.verify:
        outcome = "read back and equal bit for bit"
    return (
        f"{options.out}: {num_tensors} tensors, {gigabytes:.3f} GB in {seconds:.1f} s "
        f"({gigabytes / max(seconds, 1e-9):.2f} GB/s); {outcome}"
    )


def _check_outside(out: Path, source: Path) -> None:
    """Raises ConversionError if the target is inside the source."""
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise ConversionError(
            f"{out} is inside the source {source}; choose an output folder outside of it"
        )


def hf_to_megatron(hf: str, options: ConversionOptions) -> str:
    """Writes a Megatron checkpoint that loads at any TP x PP x VPP x EP.

    Args:
        hf: Hugging Face folder or hub id.
        options: target, dtype, and whether to read the result back.

    Returns:
        A summary of one line.

    Raises:
        PacsError: a subclass of it, for an incomplete source, a full disk or an existing output;
            partial output is removed.
    """
    start = time.perf_counter()
    folder = HfFolder(model_folder(hf, "--hf"))
    _check_outside(options.out, folder.path)
    table = weight_table(read_spec(folder.config))
    _check_metadata(folder.path)
    certificate = ConversionCertificate(
        direction="hf-to-megatron",
        source=str(folder.path),
        target=str(options.out),
        spec=table.spec,
    )
    certificate.left_out = check_names(folder, table)
    certificate.checks["names and shapes"] = (
        f"{len(table.by_hf)} tensors fill {len(table.entries)} rows"
    )

    cast = DTYPES.get(options.dtype or "")
    beside = Beside(folder.path)
    total = sum(_written_bytes(entry, folder, cast) for entry in table.entries)
    check_free_disk(options.out, total + beside.num_bytes)
    with StagedFolder(options.out) as staged:
        files = _write_dist(folder, table, staged.path, cast, certificate)
        files |= _write_metadata(folder, table, staged.path, cast, beside)
        write_manifest(staged.path, Manifest(step=None, files=files))
        summary = _summary(options, len(table.by_hf), total, time.perf_counter() - start)
        if options.verify:
            compare(folder, MegatronWeights(staged.path, digests=False), certificate)
        certificate.write(staged.path / CERTIFICATE_NAME)
        staged.commit()
    return "; ".join(part for part in (summary, beside.describe()) if part)


def megatron_to_hf(
    checkpoint: str | Path,
    options: ConversionOptions,
    *,
    step: int | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Writes a Hugging Face folder from a converted or a training checkpoint.

    Args:
        checkpoint: folder of a checkpoint or of a run.
        options: target, dtype, and what to verify.
        step: step of a run's checkpoint; None: the newest.
        max_shard_bytes: limit of a safetensors file.

    Returns:
        A summary of one line.

    Raises:
        PacsError: a subclass of it, for a damaged source, a full disk or an existing output;
            partial output is removed.
    """
    start = time.perf_counter()
    source = find_checkpoint(checkpoint, step)
    _check_outside(options.out, source)
    weights = MegatronWeights(source, digests=options.verify_source)
    table = weights.table
    cast = DTYPES.get(options.dtype or "")
    infos: list[TensorInfo] = []
    for entry in table.entries:
        infos += hf_tensors([entry], cast or weights.dtype(entry))
    beside = Beside(weights.metadata_folder)
    total = sum(info.nbytes for info in infos)
    check_free_disk(options.out, total + beside.num_bytes)

    certificate = ConversionCertificate(
        direction="megatron-to-hf",
        source=str(weights.path),
        target=str(options.out),
        spec=table.spec,
    )
    certificate.checks[FILES] = files_check(weights, verified=options.verify_source)
    certificate.checks["names and shapes"] = f"{len(table.entries)} rows give {len(infos)} tensors"

    announced = infos + beside.infos
    with HfFolderWriter(options.out, announced, max_shard_bytes=max_shard_bytes) as writer:
        tasks = []
        for entry in table.entries:
            nbytes = _target_bytes(entry, weights.dtype(entry))
            export = partial(_export, entry, weights, writer, certificate, cast)
            tasks.append(Task(nbytes, export))
        run_tasks("to hf", tasks)
        for info in beside.infos:
            writer.put(info.name, beside.get(info.name))
            beside.release(info.name)
        writer.seal(weights.metadata_folder)
        summary = _summary(options, len(infos), total, time.perf_counter() - start)
        if options.verify:
            compare(HfFolder(writer.staged.path), weights, certificate)
        certificate.write(writer.staged.path / CERTIFICATE_NAME)
        writer.staged.commit()
    return "; ".join(part for part in (summary, beside.describe()) if part)


def export_adapters(checkpoint: Path, out: Path, *, verify: bool = True) -> str:
    """Writes the adapters of a training checkpoint as PEFT's folder.

    Args:
        checkpoint: its folder.
        out: target folder, which must not exist.
        verify: whether to compare the checkpoint's files with its digests.

    Returns:
        A summary of one line.
    """
    weights = MegatronWeights(checkpoint, digests=verify)
    assert weights.lora is not None
    tensors = weights.adapters()
    write_peft(
        out, tensors, peft_config(weights.table.spec, weights.lora.options, weights.lora.base)
    )
    return f"{out}: {len(tensors)} tensors of adapters for PEFT"


def _write_dist(
    folder: HfFolder,
    table: WeightTable,
    target: Path,
    cast: torch.dtype | None,
    certificate: ConversionCertificate,
) -> dict[str, FileFacts]:
    """Writes the weights.

    Args:
        folder: the source.
        table: rows of the model.
        target: folder of the checkpoint.
        cast: dtype of the written tensors; None: that of the source.
        certificate: gets the digests of all tensors.

    Returns:
        File name -> size and digest, for the manifest.
    """
    (target / DIST_FOLDER).mkdir()
    writer = DistWriter(target / DIST_FOLDER, num_files=WORKERS)

    def convert(entry: Entry) -> None:
        tensors = {name: folder.get(name) for name in entry.hf_names}
        for name, tensor in tensors.items():
            certificate.add("hf", name, tensor)
        full = entry.to_megatron([_cast(tensors[name], cast, name) for name in entry.hf_names])
        certificate.add("megatron", entry.megatron_name, full)
        for piece in _pieces(entry, full):
            writer.put(piece)
        for name in entry.hf_names:
            folder.release(name)

    tasks = []
    for entry in table.entries:
        read_bytes = sum(folder.info(name).nbytes for name in entry.hf_names)
        nbytes = max(read_bytes, _written_bytes(entry, folder, cast))
        tasks.append(Task(nbytes, partial(convert, entry)))
    try:
        run_tasks("to megatron", tasks)
        facts = writer.finish()
    finally:
        writer.close()
    return {f"{DIST_FOLDER}/{name}": fact for name, fact in facts.items()}


def _pieces(entry: Entry, full: torch.Tensor) -> list[Piece]:
    """A row as tensors of the checkpoint: an expert is one slice of the tensor of all experts."""
    shapes = entry.checkpoint_shapes
    offset = (0,) * full.dim()
    parts = [full]
    if entry.expert is not None:
        offset = (entry.expert, *offset)
        parts = [full[None]]
    elif len(shapes) > 1:
        lengths = [shape[0] for shape in shapes.values()]
        parts = full.split(lengths)  # type: ignore[no-untyped-call]

    pieces = []
    for (key, shape), data in zip(shapes.items(), parts, strict=True):
        pieces.append(Piece(key=MODEL_PREFIX + key, shape=shape, offset=offset, data=data))
    return pieces


def _check_metadata(folder: Path) -> None:
    """Raises CheckpointError for invalid JSON among the files that are copied as they are."""
    for file in metadata_files(folder):
        if file.suffix == ".json":
            text = read_text(file, error=CheckpointError)
            parse_json(text, str(file), error=CheckpointError, any_text=True)


def _write_metadata(
    folder: HfFolder,
    table: WeightTable,
    target: Path,
    cast: torch.dtype | None,
    beside: Beside,
) -> dict[str, FileFacts]:
    """Copies config, tokenizer and what is kept beside; returns file name -> size and digest, for
    the manifest.
    """
    (target / HF_FOLDER).mkdir()
    stored_dtypes = {folder.info(name).dtype for name in table.by_hf}
    dtypes = stored_dtypes if cast is None else {cast}
    copy_hf_metadata(folder.path, target / HF_FOLDER, dtypes=dtypes)
    beside.write(target / HF_FOLDER)
    facts = {}
    for path in sorted((target / HF_FOLDER).rglob("*")):
        if path.is_file():
            facts[str(path.relative_to(target))] = digest_file(path)
    return facts


def _export(
    entry: Entry,
    weights: MegatronWeights,
    writer: HfFolderWriter,
    certificate: ConversionCertificate,
    cast: torch.dtype | None,
) -> None:
    """Writes the Hugging Face tensors of one row."""
    full = weights.get_entry(entry)
    certificate.add("megatron", entry.megatron_name, full)
    for name, tensor in zip(entry.hf_names, entry.to_hf(full), strict=True):
        converted = _cast(tensor, cast, name)
        certificate.add("hf", name, converted)
        writer.put(name, converted)
    weights.release_entry(entry)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """The tensor in `dtype`.

    Args:
        tensor: any shape and dtype.
        dtype: None keeps the tensor's dtype.
        name: name of the tensor, for the error.

    Raises:
        ConversionError: a value is not finite in `dtype`.
    """
    if dtype is None:
        return tensor
    cast = tensor.to(dtype)
    # The extremes, because `isfinite` of all values needs a temporary of the tensor's size.
    if cast.numel() and not torch.stack(cast.aminmax()).isfinite().all():
        raise ConversionError(
            f"{name} has values that are not finite in {dtype}; choose a --dtype of a larger range"
        )
    return cast


def _written_bytes(entry: Entry, folder: HfFolder, cast: torch.dtype | None) -> int:
    """Bytes of a row in the Megatron checkpoint of a folder."""
    return _target_bytes(entry, cast or folder.info(entry.hf_names[0]).dtype)


def _target_bytes(entry: Entry, dtype: torch.dtype) -> int:
    """Bytes of a row in `dtype`, with the padding of the vocabulary."""
    return math.prod(entry.megatron_shape) * dtype.itemsize
