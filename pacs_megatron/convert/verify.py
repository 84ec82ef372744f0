"""Reads both sides of a conversion from disk and compares them bit for bit.

The table's inverse transforms give the Hugging Face tensors of a checkpoint.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from pacs_megatron.checkpoint.hf_folder import HfFolder, check_names
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint
from pacs_megatron.convert.certificate import ConversionCertificate
from pacs_megatron.convert.logits import LogitsOptions, check_layout, compare_logits
from pacs_megatron.convert.pipeline import Task, run_tasks
from pacs_megatron.errors import ConversionError
from pacs_megatron.models import Entry, ModelSpec, read_spec, weight_table
from pacs_megatron.models.hub import model_folder

FILES = "files of the checkpoint"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOT_COMPARED = {"dtype", "max_positions"}
"""Fields of ModelSpec that may differ between a folder and a checkpoint of the same weights."""


def verify(
    hf: str,
    checkpoint: Path,
    certificate_file: Path,
    *,
    step: int | None,
    logits: LogitsOptions | None,
) -> str:
    """Compares a folder with a checkpoint and writes the certificate.

    Args:
        hf: Hugging Face folder or hub id.
        checkpoint: folder of a checkpoint or of a run.
        certificate_file: JSON file to write.
        step: step of a run's checkpoint; None: the newest.
        logits: layout for a comparison of logits with transformers; None: tensors only.

    Returns:
        A summary of one line.

    Raises:
        ConversionError, CheckpointError: the first failed check; no certificate is written.
    """
    folder = HfFolder(model_folder(hf, "--hf"))
    if logits is not None:
        check_layout(weight_table(read_spec(folder.config)), logits)
    weights = MegatronWeights(find_checkpoint(checkpoint, step))
    certificate = ConversionCertificate(
        direction="verify",
        source=str(folder.path),
        target=str(weights.path),
        spec=weights.table.spec,
    )
    certificate.left_out = check_names(folder, weights.table)
    _check_specs(folder, read_spec(folder.config), weights)
    certificate.checks["names and shapes"] = (
        f"{len(weights.table.by_hf)} tensors, {len(weights.table.entries)} rows"
    )
    certificate.checks[FILES] = files_check(weights, verified=True)
    result = compare(folder, weights, certificate)
    summary = f"{folder.path} and {weights.path}: {result}"
    if logits is not None:
        certificate.logits = compare_logits(folder.path, weights.path, logits)
        summary += (
            f"; logits at tp={logits.tp} pp={logits.pp} ep={logits.ep} in {logits.dtype} differ "
            f"from transformers by at most {certificate.logits['max_abs_difference']:.2e}"
        )
    certificate.write(certificate_file)
    return f"{summary}; certificate: {certificate_file}"


def _check_specs(folder: HfFolder, spec: ModelSpec, weights: MegatronWeights) -> None:
    """Raises ConversionError naming the first value that differs between the two models."""
    names = {field.name for field in fields(spec)} - _NOT_COMPARED
    for name in sorted(names):
        folder_value = getattr(spec, name)
        checkpoint_value = getattr(weights.table.spec, name)
        if folder_value != checkpoint_value:
            raise ConversionError(
                f"{folder.path}: config.json has {name}={folder_value}, {weights.path} has "
                f"{checkpoint_value}"
            )


def files_check(weights: MegatronWeights, *, verified: bool) -> str:
    """The certificate's entry on the comparison of the checkpoint's files with its manifest."""
    if not verified:
        return "not verified (--no-verify)"
    return f"{len(weights.manifest.files)} match the digests of the manifest"


def compare(folder: HfFolder, weights: MegatronWeights, certificate: ConversionCertificate) -> str:
    """Compares every tensor of both sides; adds digests and the result to the certificate.

    Args:
        folder: the Hugging Face side.
        weights: the Megatron side.
        certificate: gets the digests of all tensors and the result.

    Returns:
        The result, with any casts.

    Raises:
        ConversionError: names the first tensor that differs and by how much.
    """
    casts: set[str] = set()

    def check(entry: Entry) -> None:
        full = weights.get_entry(entry)
        certificate.add("megatron", entry.megatron_name, full)
        has_padding = entry.place in ("embedding", "output")
        if has_padding and full[entry.sizes["vocab"] :].count_nonzero():
            raise ConversionError(
                f"{entry.megatron_name}: the rows of the vocabulary's padding are not zero"
            )
        for name, back in zip(entry.hf_names, entry.to_hf(full), strict=True):
            original = folder.get(name)
            certificate.add("hf", name, original)
            if original.dtype != back.dtype:
                casts.add(f"{original.dtype} against {back.dtype}".replace("torch.", ""))
            if not _same(original, back):
                difference = (original.double() - back.double()).abs().max().item()
                raise ConversionError(
                    f"{name} of {folder.path} differs from {entry.megatron_name} of "
                    f"{weights.path} by up to {difference:.3g}; one of them was changed; convert "
                    "again"
                )
            folder.release(name)
        weights.release_entry(entry)

    tasks = []
    for entry in weights.table.entries:
        nbytes = sum(folder.info(name).nbytes for name in entry.hf_names)
        tasks.append(Task(nbytes, partial(check, entry)))
    run_tasks("verify", tasks)

    result = f"{len(weights.table.by_hf)} equal bit for bit"
    if casts:
        result += f", cast ({', '.join(sorted(casts))})"
    certificate.checks["tensors, read back"] = result
    return result


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the bits are equal, or one tensor is the cast of the other."""
    if _same_bits(left.to(right.dtype), right):
        return True
    return left.dtype != right.dtype and _same_bits(left, right.to(left.dtype))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the bits are equal: NaN equals itself, 0.0 differs from -0.0."""
    left_bytes = left.contiguous().view(torch.uint8)
    right_bytes = right.contiguous().view(torch.uint8)
    return torch.equal(left_bytes, right_bytes)
