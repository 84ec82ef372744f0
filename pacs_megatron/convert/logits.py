"""Compares the policy's logits on a converted checkpoint, at a layout, with transformers' on the
Hugging Face folder.
"""

import math
import random
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.errors import ConversionError
from pacs_megatron.models import WeightTable
from pacs_megatron.runtime.rank_processes import Processes
from pacs_megatron.runtime.waiting import report_wait

_PROMPT_LENS = (7, 33, 64, 18)
_FP32_TOLERANCE = 2e-5
"""Tolerance, relative to the largest logit if that exceeds 1, else absolute. bf16 has none: it
reports the difference.
"""
_TIMEOUT_S = 3600.0
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsOptions:
    """Layout and dtype (`fp32` or `bf16`) of the comparison."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "fp32"
    trust_remote_code: bool = False

    @property
    def world_size(self) -> int:
        # Expert parallelism uses data-parallel ranks; all of them compute the same prompts.
        return self.tp * self.pp * self.ep


def check_layout(table: WeightTable, options: LogitsOptions) -> None:
    """Raises ConversionError for a layout that does not fit the model, before anything is loaded."""
    spec = table.spec
    num_experts = 1 if spec.moe is None else spec.moe.num_experts
    sizes = (
        ("tp", math.gcd(spec.num_heads, spec.num_kv_heads), "heads and key-value heads"),
        ("pp", spec.num_layers, "layers"),
        ("ep", num_experts, "experts"),
    )
    for name, size, what in sizes:
        axis = getattr(options, name)
        if axis < 1 or size % axis:
            raise ConversionError(
                f"--{name} {axis} does not divide the model's {what}; use a divisor of {size}"
            )
    for entry in table.entries:
        entry.shard_shape(options.tp)


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts with the same token ids in every release, so certificates are comparable."""
    generator = random.Random(20250902)  # not a secret
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in _PROMPT_LENS]


def compare_logits(hf: Path, checkpoint: Path, options: LogitsOptions) -> dict[str, Any]:
    """The certificate's entry on logits.

    Raises ConversionError if the difference exceeds the tolerance.
    """
    import torch
    from safetensors.torch import load_file

    reference = _transformers_logits(hf, options)
    with tempfile.TemporaryDirectory(prefix="pacs-logits-") as scratch:
        action = partial(_rank, checkpoint.absolute(), options, Path(scratch))
        ranks = Processes(
            Path(scratch),
            "policy",
            action,
            options.world_size,
            limit_s=_TIMEOUT_S,
            start_method="spawn",
        )
        ranks.wait(ConversionError)
        ours = load_file(Path(scratch) / "logits.safetensors")["logits"]
    difference = (ours - reference).abs().max().item()
    largest = reference.abs().max().item()
    tolerance = _FP32_TOLERANCE * max(1.0, largest) if options.dtype == "fp32" else None
    found = {
        "max_abs_difference": difference,
        "max_abs_logit": largest,
        "same_argmax_frac": (ours.argmax(-1) == reference.argmax(-1)).double().mean().item(),
        "num_tokens": len(reference),
        "dtype": options.dtype,
        "tp": options.tp,
        "pp": options.pp,
        "ep": options.ep,
        "tolerance": tolerance,
    }
    if not bool(torch.isfinite(ours).all()) or (
        tolerance is not None and not difference <= tolerance
    ):
        raise ConversionError(
            f"logits of {checkpoint} at tp={options.tp} pp={options.pp} ep={options.ep} differ "
            f"from transformers on {hf} by {difference:.3g}, allowed {tolerance}; the weights or "
            "the architecture do not match"
        )
    return found


@report_wait("for the logits of transformers")
def _transformers_logits(hf: Path, options: LogitsOptions) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf,
        dtype=getattr(torch, _DTYPES[options.dtype]),
        local_files_only=True,
        trust_remote_code=options.trust_remote_code,
    ).eval()
    with torch.no_grad():
        parts = [
            model(torch.tensor([p])).logits[0].float()
            for p in fixed_prompts(model.config.vocab_size)
        ]
    return torch.cat(parts)


def _rank(checkpoint: Path, options: LogitsOptions, scratch: Path) -> None:
    """Runs one rank: builds the model, loads the checkpoint's weights, runs the prompts; the last
    stage writes.
    """
    import torch.distributed as dist
    from safetensors.torch import save_file

    from pacs_megatron.checkpoint.megatron_weights import MegatronWeights
    from pacs_megatron.config.schema import ParallelOptions, PrecisionOptions
    from pacs_megatron.contracts import Layout
    from pacs_megatron.parallel import groups

    parallel = ParallelOptions(tp=options.tp, pp=options.pp, ep=options.ep)
    layout = Layout(world_size=options.world_size, tp=options.tp, pp=options.pp, ep=options.ep)
    rank = groups.initialize(layout, seed=0, control_timeout_s=_TIMEOUT_S)
    from pacs_megatron.policy import model, precision, weights
    from pacs_megatron.policy.logits import logits

    source = MegatronWeights(checkpoint, digests=False)
    spec = source.table.spec
    precision_options = PrecisionOptions(dtype="bf16" if options.dtype == "bf16" else "fp32")
    machine = precision.inspect_machine()
    config = model.transformer_config(spec, parallel, precision_options, machine)
    chunks = model.build_chunks(spec, source.table.padded_vocab, config, machine, rank)
    for chunk in chunks:
        chunk.eval()
    weights.load([model.unwrap(chunk) for chunk in chunks], source.table, source.get)
    found = logits(chunks, spec, fixed_prompts(spec.vocab_size))
    if found is not None and rank.tp == 0 and rank.dp == 0:
        save_file({"logits": found.cpu().contiguous()}, scratch / "logits.safetensors")
    dist.barrier(group=rank.control)
    groups.shutdown()
