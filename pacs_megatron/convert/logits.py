"""Compares the policy's logits on a converted checkpoint with those of transformers.

The policy runs at a layout, transformers on the Hugging Face folder.
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
"""Tolerance, relative to the largest logit if that exceeds 1, else absolute.

bf16 has no tolerance: the difference is reported only.
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
        """Number of ranks.

        Expert parallelism uses data-parallel ranks; all of them compute the same prompts.
        """
        return self.tp * self.pp * self.ep


def check_layout(table: WeightTable, options: LogitsOptions) -> None:
    """Checks that a layout fits the model, before anything is loaded.

    Raises:
        ConversionError: it does not fit.
    """
    spec = table.spec
    num_experts = 1 if spec.moe is None else spec.moe.num_experts
    sizes = (
        ("tp", math.gcd(spec.num_heads, spec.num_kv_heads), "heads and key-value heads"),
        ("pp", spec.num_layers, "layers"),
        ("ep", num_experts, "experts"),
    )
    for axis, size, unit in sizes:
        degree = getattr(options, axis)
        if degree < 1 or size % degree:
            raise ConversionError(
                f"--{axis} {degree} does not divide the model's {unit}; use a divisor of {size}"
            )
    for entry in table.entries:
        entry.shard_shape(options.tp)


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts with the same token ids in every release, so certificates are comparable."""
    generator = random.Random(20250902)  # noqa: S311  # not a secret
    prompts = []
    for length in _PROMPT_LENS:
        prompts.append([generator.randrange(vocab_size) for _ in range(length)])
    return prompts


def compare_logits(hf: Path, checkpoint: Path, options: LogitsOptions) -> dict[str, Any]:
    """The certificate's entry on logits.

    Args:
        hf: Hugging Face folder, for transformers.
        checkpoint: Megatron checkpoint, for the policy.
        options: layout and dtype of the policy.

    Returns:
        Differences over all tokens of `fixed_prompts`, with the options.

    Raises:
        ConversionError: the difference exceeds the tolerance, or a logit is not finite.
    """
    import torch

    reference = _transformers_logits(hf, options)
    logits = _policy_logits(checkpoint, options)
    difference = (logits - reference).abs().max().item()
    largest = reference.abs().max().item()
    same_argmax = logits.argmax(-1) == reference.argmax(-1)
    tolerance = None
    if options.dtype == "fp32":
        tolerance = _FP32_TOLERANCE * max(1.0, largest)
    entry = {
        "max_abs_difference": difference,
        "max_abs_logit": largest,
        "same_argmax_frac": same_argmax.double().mean().item(),
        "num_tokens": len(reference),
        "dtype": options.dtype,
        "tp": options.tp,
        "pp": options.pp,
        "ep": options.ep,
        "tolerance": tolerance,
    }

    # `not <=`, so that a NaN is an error.
    exceeds = tolerance is not None and not difference <= tolerance
    if exceeds or not bool(torch.isfinite(logits).all()):
        raise ConversionError(
            f"logits of {checkpoint} at tp={options.tp} pp={options.pp} ep={options.ep} differ "
            f"from transformers on {hf} by {difference:.3g}, allowed {tolerance}; the weights or "
            "the architecture do not match"
        )
    return entry


def _policy_logits(checkpoint: Path, options: LogitsOptions) -> Any:
    """The policy's logits at the layout, fp32 [tokens of all prompts, vocabulary]."""
    from safetensors.torch import load_file

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
        return load_file(Path(scratch) / "logits.safetensors")["logits"]


@report_wait("for the logits of transformers")
def _transformers_logits(hf: Path, options: LogitsOptions) -> Any:
    """The logits of transformers, fp32 [tokens of all prompts, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf,
        dtype=getattr(torch, _DTYPES[options.dtype]),
        local_files_only=True,
        trust_remote_code=options.trust_remote_code,
    ).eval()
    parts = []
    with torch.no_grad():
        for prompt in fixed_prompts(model.config.vocab_size):
            logits = model(torch.tensor([prompt])).logits[0]
            parts.append(logits.float())
    return torch.cat(parts)


def _rank(checkpoint: Path, options: LogitsOptions, scratch: Path) -> None:
    """Runs one rank: builds the model, loads the checkpoint's weights, runs the prompts.

    A rank of the last stage writes the logits.
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
    all_logits = logits(chunks, spec, fixed_prompts(spec.vocab_size))
    if all_logits is not None and rank.tp == 0 and rank.dp == 0:
        save_file({"logits": all_logits.cpu().contiguous()}, scratch / "logits.safetensors")
    dist.barrier(group=rank.control)
    groups.shutdown()
