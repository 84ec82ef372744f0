"""Both sides of a conversion, read from disk and compared bit for bit through the table's other direction."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights
from pacs_megatron.convert.certificate import Certificate, Check
from pacs_megatron.convert.pipeline import Job, run_jobs
from pacs_megatron.errors import ConversionError
from pacs_megatron.models import Entry


def compare(
    folder: HfFolder, weights: MegatronWeights, certificate: Certificate, *, workers: int, show_progress: bool
) -> Check:
    """Every tensor of both sides, digested into the certificate; a cast on the way is allowed and named.

    Raises ConversionError naming the first tensor that differs and by how much.
    """
    casts: set[str] = set()

    def check(entry: Entry) -> None:
        full = weights.get_entry(entry)
        certificate.add("megatron", entry.megatron_name, full, with_digest=True)
        _check_padding(entry, full)
        for name, back in zip(entry.hf_names, entry.to_hf(full), strict=True):
            original = folder.get(name)
            certificate.add("hf", name, original, with_digest=True)
            if original.dtype != back.dtype:
                casts.add(f"{original.dtype} against {back.dtype}".replace("torch.", ""))
            if not _same(original, back):
                difference = (original.double() - back.double()).abs().max().item()
                raise ConversionError(
                    f"{name} of {folder.path} differs from {entry.megatron_name} of {weights.path} by up to "
                    f"{difference:.3g}; one of them was altered, convert again"
                )

    jobs = [
        Job(sum(folder.info(name).nbytes for name in entry.hf_names), partial(check, entry))
        for entry in weights.table.entries
    ]
    run_jobs("verify", jobs, workers=workers, show_progress=show_progress)
    cast = f", cast ({', '.join(sorted(casts))})" if casts else ""
    return Check("tensors, read back", f"{len(weights.table.by_hf)} equal bit for bit{cast}")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, or one is the cast of the other."""
    return _same_bits(left.to(right.dtype), right) or (
        left.dtype != right.dtype and _same_bits(left, right.to(left.dtype))
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN equals itself, 0.0 differs from -0.0."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _check_padding(entry: Entry, full: torch.Tensor) -> None:
    if entry.place in _VOCABULARY and bool(full[entry.dims.spec.vocab_size :].count_nonzero()):
        raise ConversionError(f"{entry.megatron_name}: the rows of the vocabulary's padding are not zero")


_VOCABULARY: tuple[Literal["embedding", "output"], ...] = ("embedding", "output")
