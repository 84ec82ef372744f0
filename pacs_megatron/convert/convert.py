"""HF folder -> Megatron checkpoint and back, tensor by tensor: memory use does not depend on the
model's size.
"""

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pacs_megatron.checkpoint.dist_reader import MODEL_PREFIX
from pacs_megatron.checkpoint.dist_writer import DistWriter, Piece
from pacs_megatron.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    HfFolder,
    HfFolderWriter,
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
from pacs_megatron.checkpoint.staging import StagedFolder, check_free_disk
from pacs_megatron.convert.certificate import CERTIFICATE_NAME, Certificate
from pacs_megatron.convert.pipeline import WORKERS, Job, run_jobs
from pacs_megatron.convert.verify import DTYPES, FILES, check_names, compare, files_check
from pacs_megatron.errors import CheckpointError, ConversionError
from pacs_megatron.models import Entry, WeightTable, read_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.runtime.json_reader import parse_json, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of both directions. `dtype` is a key of DTYPES; None keeps the source's dtype."""

    out: Path
    dtype: str | None = None
    verify: bool = False
    verify_source: bool = True
    """whether to compare a Megatron checkpoint's files with its manifest's digests before reading
    them
    """


def _summary(options: Options, num_tensors: int, nbytes: int, seconds: float) -> str:
    return (
        f"{options.out}: {num_tensors} tensors, {nbytes / 1e9:.3f} GB in {seconds:.1f} s "
        f"({nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s); "
        + ("read back and equal bit for bit" if options.verify else "not verified (use --verify)")
    )


def _refuse_inside(out: Path, source: Path) -> None:
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise ConversionError(
            f"{out} is inside the source {source}; choose an output folder outside of it"
        )


def hf_to_megatron(hf: str, options: Options) -> str:
    """Writes a Megatron checkpoint that loads at any TP x PP x VPP x EP; returns a summary.

    Raises PacsError subclasses for an incomplete source, a full disk or an existing output, and
    removes partial output.
    """
    start = time.perf_counter()
    folder = HfFolder(model_folder(hf, "--hf"))
    _refuse_inside(options.out, folder.path)
    table = weight_table(read_spec(folder.config))
    for file in metadata_files(folder.path):
        if file.suffix == ".json":  # copied as it is
            parse_json(
                read_text(file, error=CheckpointError),
                str(file),
                error=CheckpointError,
                any_text=True,
            )
    certificate = Certificate(
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
    total = sum(
        _target_bytes(entry, cast or folder.info(entry.hf_names[0]).dtype)
        for entry in table.entries
    )
    check_free_disk(options.out, total)
    with StagedFolder(options.out) as staged:
        files = _write_dist(folder, table, staged.path, cast, certificate)
        (staged.path / HF_FOLDER).mkdir()
        dtypes = {folder.info(name).dtype for name in table.by_hf} if cast is None else {cast}
        copy_hf_metadata(folder.path, staged.path / HF_FOLDER, dtypes=dtypes)
        for path in sorted((staged.path / HF_FOLDER).rglob("*")):
            if path.is_file():
                files[str(path.relative_to(staged.path))] = digest_file(path)
        write_manifest(staged.path, Manifest(step=None, files=files))
        summary = _summary(options, len(table.by_hf), total, time.perf_counter() - start)
        if options.verify:
            compare(folder, MegatronWeights(staged.path, digests=False), certificate)
        certificate.write(staged.path / CERTIFICATE_NAME)
        staged.commit()
    return summary


def megatron_to_hf(
    checkpoint: str | Path,
    options: Options,
    *,
    step: int | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Writes a Hugging Face folder from a converted or a training checkpoint (`step`; None: the
    newest).
    """
    start = time.perf_counter()
    source = find_checkpoint(checkpoint, step)
    _refuse_inside(options.out, source)
    weights = MegatronWeights(source, digests=options.verify_source)
    table = weights.table
    cast = DTYPES.get(options.dtype or "")
    infos = [
        info
        for entry in table.entries
        for info in hf_tensors([entry], cast or weights.dtype(entry))
    ]
    total = sum(info.nbytes for info in infos)
    check_free_disk(options.out, total)
    certificate = Certificate(
        direction="megatron-to-hf",
        source=str(weights.path),
        target=str(options.out),
        spec=table.spec,
    )
    certificate.checks[FILES] = files_check(weights, verified=options.verify_source)
    certificate.checks["names and shapes"] = f"{len(table.entries)} rows give {len(infos)} tensors"
    with HfFolderWriter(options.out, infos, max_shard_bytes=max_shard_bytes) as writer:
        jobs = [
            Job(
                _target_bytes(entry, weights.dtype(entry)),
                partial(_export, entry, weights, writer, certificate, cast),
            )
            for entry in table.entries
        ]
        run_jobs("to hf", jobs)
        writer.seal(weights.metadata_folder)
        summary = _summary(options, len(infos), total, time.perf_counter() - start)
        if options.verify:
            compare(HfFolder(writer.staged.path), weights, certificate)
        certificate.write(writer.staged.path / CERTIFICATE_NAME)
        writer.staged.commit()
    return summary


def _write_dist(
    folder: HfFolder,
    table: WeightTable,
    target: Path,
    cast: torch.dtype | None,
    certificate: Certificate,
) -> dict[str, FileFacts]:
    (target / DIST_FOLDER).mkdir()
    writer = DistWriter(target / DIST_FOLDER, num_files=WORKERS)

    def convert(entry: Entry) -> None:
        tensors = [folder.get(name) for name in entry.hf_names]
        for name, tensor in zip(entry.hf_names, tensors, strict=True):
            certificate.add("hf", name, tensor)
        full = entry.to_megatron(
            [_cast(t, cast, name) for t, name in zip(tensors, entry.hf_names, strict=True)]
        )
        certificate.add("megatron", entry.megatron_name, full)
        stacked = () if entry.expert is None else (entry.expert,)
        writer.put(
            Piece(
                key=MODEL_PREFIX + entry.checkpoint_key,
                shape=entry.checkpoint_shape,
                offset=(*stacked, *[0] * full.dim()),
                data=full[None] if stacked else full,
            )
        )
        for name in entry.hf_names:
            folder.release(name)

    jobs = []
    for entry in table.entries:
        read = sum(folder.info(name).nbytes for name in entry.hf_names)
        written = _target_bytes(entry, cast or folder.info(entry.hf_names[0]).dtype)
        jobs.append(Job(max(read, written), partial(convert, entry)))
    try:
        run_jobs("to megatron", jobs)
        facts = writer.finish()
    finally:
        writer.close()
    return {f"{DIST_FOLDER}/{name}": fact for name, fact in facts.items()}


def _export(
    entry: Entry,
    weights: MegatronWeights,
    writer: HfFolderWriter,
    certificate: Certificate,
    cast: torch.dtype | None,
) -> None:
    full = weights.get_entry(entry)
    certificate.add("megatron", entry.megatron_name, full)
    for name, tensor in zip(entry.hf_names, entry.to_hf(full), strict=True):
        out = _cast(tensor, cast, name)
        certificate.add("hf", name, out)
        writer.put(name, out)
    weights.release_entry(entry)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    if dtype is None:
        return tensor
    found = tensor.to(dtype)
    if (
        found.numel() and not torch.stack(found.aminmax()).isfinite().all()
    ):  # without a temporary of its size
        raise ConversionError(
            f"{name} has values that are not finite in {dtype}; choose a --dtype of a larger range"
        )
    return found


def _target_bytes(entry: Entry, dtype: torch.dtype) -> int:
    return math.prod(entry.megatron_shape) * dtype.itemsize
