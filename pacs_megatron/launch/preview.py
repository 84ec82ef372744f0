"""`data preview`: prompts, lengths and verified answers of the data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pacs_megatron.config import load_config

if TYPE_CHECKING:
    from pacs_megatron.evaluation.preview import PreviewReport

MAX_UNVERIFIED = 10


def preview_text(config_path: Path, overrides: Sequence[str], rows: int) -> str:
    """Counts, lengths, rendered prompts and verified gold answers of the training set and each benchmark."""
    from pacs_megatron.data import load_tokenizer
    from pacs_megatron.evaluation.preview import preview

    config = load_config(config_path, overrides).config
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    sets = [config.data.train, *config.evaluation.benchmarks]
    return "\n\n".join(
        render(preview(dataset, config.data, tokenizer, config.reward, num_examples=rows)) for dataset in sets
    )


def render(report: PreviewReport) -> str:
    """One report as text."""
    tokens = report.tokens
    lines = [
        f"{report.name} ({report.path}): {report.num_rows} rows, {report.num_kept} kept, {report.num_too_long} too long, "
        f"{report.num_duplicates} duplicates",
        f"  prompt tokens: min {tokens.min}, mean {tokens.mean:.1f}, median {tokens.p50}, 95 % {tokens.p95}, max {tokens.max}",
    ]
    if report.num_checked:
        lines.append(f"  gold answers that verify against themselves: {report.num_verified} of {report.num_checked}")
    shown = report.unverified[:MAX_UNVERIFIED]
    lines.extend(f"    not verified: {row.prompt_id} answer {row.answer!r}: {row.reason}" for row in shown)
    if len(report.unverified) > len(shown):
        lines.append(f"    and {len(report.unverified) - len(shown)} more")
    for prompt in report.examples:
        lines.append(f"  --- {prompt.id}, answer {prompt.answer!r}")
        lines.extend(f"  | {line}" for line in prompt.text.splitlines())
    return "\n".join(lines)
