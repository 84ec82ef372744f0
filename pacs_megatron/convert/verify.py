"""Reads both sides of a conversion from disk and compares them bit for bit through the table's
inverse transforms.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint
from pacs_megatron.convert.certificate import Certificate
from pacs_megatron.convert.logits import LogitsOptions, check_layout, compare_logits
from pacs_megatron.convert.pipeline import Job, run_jobs
from pacs_megatron.errors import ConversionError
from pacs_megatron.models import Entry, WeightTable, read_spec, weight_table
from pacs_megatron.models.hub import model_folder

FILES = "files of the checkpoint"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_ROTARY_TABLE = ".rotary_emb.inv_freq"


def verify(
    hf: str,
    checkpoint: Path,
    certificate_file: Path,
    *,
    step: int | None,
    logits: LogitsOptions | None,
) -> str:
    """Compares a folder with a checkpoint and writes the certificate; returns the summary.

    Raises ConversionError or CheckpointError at the first failed check and writes no certificate.
    """
    folder = HfFolder(model_folder(hf, "--hf"))
    if logits is not None:
        check_layout(weight_table(read_spec(folder.config)), logits)
    weights = MegatronWeights(find_checkpoint(checkpoint, step))
    certificate = Certificate(
        direction="verify",
        source=str(folder.path),
        target=str(weights.path),
        spec=weights.table.spec,
    )
    certificate.left_out = check_names(folder, weights.table)
    spec = read_spec(folder.config)
    for name in sorted({field.name for field in fields(spec)} - {"dtype", "max_positions"}):
        one = getattr(spec, name)
        other = getattr(weights.table.spec, name)
        if one != other:
            raise ConversionError(
                f"{folder.path}: config.json has {name}={one}, {weights.path} has {other}"
            )
    certificate.checks["names and shapes"] = (
        f"{len(weights.table.by_hf)} tensors, {len(weights.table.entries)} rows"
    )
    certificate.checks[FILES] = files_check(weights, verified=True)
    summary = f"{folder.path} and {weights.path}: {compare(folder, weights, certificate)}"
    if logits is not None:
        certificate.logits = compare_logits(folder.path, weights.path, logits)
        summary += (
            f"; logits at tp={logits.tp} pp={logits.pp} ep={logits.ep} in {logits.dtype} differ "
            f"from transformers by at most {certificate.logits['max_abs_difference']:.2e}"
        )
    certificate.write(certificate_file)
    return f"{summary}; certificate: {certificate_file}"


def check_names(folder: HfFolder, table: WeightTable) -> list[str]:
    """Checks that every row has its tensors, with the right shape, and every tensor a row; returns
    redundant tensors.

    Raises ConversionError naming the first tensor that does not fit.
    """
    left_out: list[str] = []
    for name in folder.names:
        if name in table.by_hf:
            continue
        if name.endswith(_ROTARY_TABLE):
            left_out.append(name)
        elif name == _OUTPUT and table.spec.tied:
            if not torch.equal(folder.get(_OUTPUT), folder.get(_EMBEDDING)):
                raise ConversionError(
                    f"{folder.path}: config.json has tie_word_embeddings: true, but {_OUTPUT} "
                    f"differs from {_EMBEDDING}; set tie_word_embeddings to false if the output "
                    "layer has its own weights"
                )
            left_out.append(name)
        else:
            raise ConversionError(
                f"{folder.path} contains {name}, which no row of the table of family "
                f"{table.spec.family} maps; the checkpoint and its config.json are of different "
                "architectures"
            )
    present = set(folder.names)
    for entry in table.entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name not in present:
                raise ConversionError(
                    f"{folder.path} lacks {name}, which makes {entry.megatron_name}; get a "
                    "complete copy"
                )
            found = folder.info(name).shape
            if found != shape:
                raise ConversionError(
                    f"{folder.path}: {name} is {list(found)}, expected {list(shape)} from "
                    "config.json; the two are of different models, get another copy"
                )
    return left_out


def files_check(weights: MegatronWeights, *, verified: bool) -> str:
    """The certificate's entry on the comparison of the checkpoint's files with its manifest."""
    return (
        f"{len(weights.manifest.files)} match the digests of the manifest"
        if verified
        else "not verified (--no-verify)"
    )


def compare(folder: HfFolder, weights: MegatronWeights, certificate: Certificate) -> str:
    """Compares every tensor of both sides and adds digests and result, with any casts, to the
    certificate.

    Raises ConversionError naming the first tensor that differs and by how much.
    """
    casts: set[str] = set()

    def check(entry: Entry) -> None:
        full = weights.get_entry(entry)
        certificate.add("megatron", entry.megatron_name, full)
        if entry.place in ("embedding", "output") and full[entry.sizes["vocab"] :].count_nonzero():
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
                    f"{weights.path} by up to "
                    f"{difference:.3g}; one of them was changed; convert again"
                )
            folder.release(name)
        weights.release_entry(entry)

    jobs = [
        Job(sum(folder.info(name).nbytes for name in entry.hf_names), partial(check, entry))
        for entry in weights.table.entries
    ]
    run_jobs("verify", jobs)
    cast = f", cast ({', '.join(sorted(casts))})" if casts else ""
    certificate.checks["tensors, read back"] = result = (
        f"{len(weights.table.by_hf)} equal bit for bit{cast}"
    )
    return result


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, or one is the cast of the other."""
    return _same_bits(left.to(right.dtype), right) or (
        left.dtype != right.dtype and _same_bits(left, right.to(left.dtype))
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the bits are equal: NaN equals itself, 0.0 differs from -0.0."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
