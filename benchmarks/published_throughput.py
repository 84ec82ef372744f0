"""The training throughput of `plan` against published figures.

    python benchmarks/published_throughput.py

FIT rows gave FP8_SPEEDUP and EXPERT_COPY_BYTES (with TRAIN_MFU of Megatron-LM's README); the other
rows are held out. All rows: NVIDIA-NeMo/Megatron-Bridge, commit 0a25f911,
docs/performance-summary-archive.md, FP8 with current scaling, dropless experts.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec, read_spec
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.known_models import KNOWN_MODELS
from pacs_megatron.workbench.plan.timing import (
    TrainWork,
    busy_seconds,
    forward_flops,
    linear_frac,
    train_span,
)


class Row(NamedTuple):
    """One published figure."""

    model: str
    gpu: str
    release: str
    world: int
    global_batch: int
    tp: int
    pp: int
    cp: int
    vpp: int
    ep: int
    published: float
    """tokens/s a GPU"""
    is_fitted: bool = False


FIT = True
ROWS = [
    Row("llama3-8b", "h100", "25.09", 8, 128, 1, 1, 1, 1, 1, 14079, FIT),
    Row("llama3-8b", "h100", "25.11", 8, 128, 1, 1, 1, 1, 1, 14451, FIT),
    Row("llama3-405b", "h100", "25.09", 1024, 512, 8, 8, 2, 8, 1, 302, FIT),
    Row("qwen3-235b", "h100", "25.11", 256, 2048, 2, 8, 1, 4, 32, 1575, FIT),
    Row("qwen3-235b", "h100", "26.02", 256, 8192, 2, 8, 1, 4, 32, 1633, FIT),
    Row("llama3-70b", "h100", "25.09", 64, 128, 4, 8, 1, 5, 1, 1619),
    Row("llama3-70b", "h100", "25.11", 64, 128, 4, 8, 1, 5, 1, 1602),
    Row("llama3-70b", "h100", "26.02", 64, 256, 4, 8, 1, 5, 1, 1621),
    Row("llama3-405b", "h100", "25.11", 1024, 512, 8, 8, 2, 8, 1, 292),
    Row("llama3-405b", "h100", "26.02", 1024, 1536, 8, 8, 2, 8, 1, 311),
    Row("qwen3-30b", "h100", "25.11", 16, 512, 1, 2, 1, 24, 8, 5275),
    Row("qwen3-30b", "h100", "26.02", 16, 1024, 1, 2, 1, 12, 8, 5113),
    Row("llama3-8b", "b200", "25.09", 8, 128, 1, 1, 1, 1, 1, 29994),
    Row("llama3-8b", "b200", "25.11", 8, 128, 1, 1, 1, 1, 1, 30624),
    Row("llama3-405b", "b200", "25.09", 128, 64, 4, 8, 2, 8, 1, 664),
    Row("llama3-405b", "b200", "25.11", 128, 64, 4, 8, 2, 8, 1, 661),
    Row("qwen3-30b", "b200", "25.11", 8, 512, 1, 1, 1, 1, 8, 9299),
    Row("qwen3-30b", "b200", "26.02", 8, 512, 1, 1, 1, 1, 8, 9691),
    Row("qwen3-235b", "b200", "25.11", 64, 1024, 1, 8, 1, 2, 8, 3269),
    Row("qwen3-235b", "b200", "26.02", 256, 8192, 1, 8, 1, 1, 8, 3805),
]


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }


CONFIGS = {
    "llama3-8b": _llama(4096, 32, 32, 14336),
    "llama3-70b": _llama(8192, 80, 64, 28672),
    "llama3-405b": _llama(16384, 126, 128, 53248),
    "qwen3-30b": dict(KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]),
    "qwen3-235b": {
        **KNOWN_MODELS["Qwen/Qwen3-30B-A3B"],
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
}


def planned_seconds(row: Row, spec: ModelSpec) -> tuple[float, tuple[float, float]]:
    """Seconds of a step, and its shortest and longest time as factors."""
    length = sequence_length(spec)
    tokens = row.global_batch * length
    layout = Layout(world_size=row.world, tp=row.tp, pp=row.pp, cp=row.cp, ep=row.ep)
    copies = 0.0 if spec.moe is None else tokens * spec.num_layers * spec.moe.top_k
    work = TrainWork(
        flops=3 * forward_flops(spec, tokens, length, tokens),
        expert_copies=copies,
        fp8_frac=linear_frac(spec, tokens, length, tokens),
        overlaps_tp=True,
    )
    bubble = (row.pp - 1) / (row.global_batch / layout.dp * row.vpp)
    gpu = GPUS[row.gpu]
    seconds = busy_seconds(work, layout, gpu, constants.TRAIN_MFU) * (1 + bubble)
    return seconds, train_span(work, layout, gpu, constants.TRAIN_MFU)


def published_seconds(row: Row, spec: ModelSpec) -> float:
    """Seconds of a step."""
    return row.global_batch * sequence_length(spec) / row.world / row.published


def sequence_length(spec: ModelSpec) -> int:
    """Tokens of a sequence in the published tables."""
    return 8192 if spec.moe is None else 4096


def main() -> None:
    """Prints the table and the median errors."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    print("model        gpu   release  published  plan   error")
    for row in ROWS:
        spec = read_spec(CONFIGS[row.model])
        seconds, _ = planned_seconds(row, spec)
        ratio = published_seconds(row, spec) / seconds
        found = row.published * ratio
        error = ratio - 1
        errors[row.is_fitted].append(abs(error))
        kind = "fitted" if row.is_fitted else "held out"
        print(
            f"{row.model:12} {row.gpu:5} {row.release}  {row.published:9,.0f} {found:8,.0f} "
            f"{error:+7.1%}  {kind}"
        )
    for is_fitted, values in errors.items():
        kind = "fitted" if is_fitted else "held out"
        print(f"{kind}: median {statistics.median(values):.1%}, largest {max(values):.1%}")


if __name__ == "__main__":
    main()
