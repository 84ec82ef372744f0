"""Writes and reads `rollouts/step_000012.jsonl`: every sample of a step as readable text, one JSON
object per line.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pacs_megatron.contracts import Prompt, Sample
from pacs_megatron.observability.metrics import truncate_metrics
from pacs_megatron.runtime.files import (
    PARTIAL_SUFFIX,
    complete_lines,
    json_line,
    parse_lines,
    write_atomically,
)

ROLLOUT_FOLDER = "rollouts"
RolloutKind = Literal["step", "eval"]
"""The samples of a step, or of the evaluation after it"""
RECORD_SUFFIX = ".safetensors"
"""The same samples as arrays, in a file beside the text (`logging.save_tokens`)."""
_NAME = re.compile(r"(?:step|eval)_(\d{6,})\.(?:jsonl|safetensors)")


def rollout_path(run_dir: Path, step: int, kind: RolloutKind = "step") -> Path:
    """The file of the samples of `step`."""
    return run_dir / ROLLOUT_FOLDER / f"{kind}_{step:06d}.jsonl"


def write_rollouts(
    path: Path,
    samples: Sequence[Sample],
    prompts: Mapping[str, Prompt],
    decode: Callable[[np.ndarray], str],
) -> None:
    """Writes the samples of a step.

    They are ordered by prompt id and sample number, so the bytes do not depend on the order of
    arrival.

    Args:
        path: From `rollout_path`.
        samples: In any order.
        prompts: By prompt id.
        decode: Token ids of a response, [response], int32, to text.
    """
    ordered = sorted(samples, key=_order)
    # One line at a time: a step of 8,192 long responses is gigabytes of text.
    lines = (
        json_line(rollout_record(sample, prompts[sample.prompt_id], decode)) for sample in ordered
    )
    write_atomically(path, lines)


def _order(sample: Sample) -> tuple[str, int, str]:
    """(prompt id, number of the sample, id), by which samples are sorted."""
    text = sample.id.rpartition("#")[2]
    number = int(text) if text.isdecimal() else 0
    return sample.prompt_id, number, sample.id


def rollout_record(
    sample: Sample, prompt: Prompt, decode: Callable[[np.ndarray], str]
) -> dict[str, Any]:
    """One line: texts, verdict, lengths in tokens, mean sampler log-prob in nats, and weight
    versions; `extra` only if the data set has further columns.
    """
    extra = {"extra": dict(prompt.extra)} if prompt.extra else {}
    mean = math.nan
    if len(sample.sampler_logprobs):
        mean = float(np.mean(sample.sampler_logprobs, dtype=np.float64))
    return {
        "id": sample.id,
        "prompt_id": sample.prompt_id,
        "source": prompt.source,
        "prompt": prompt.text,
        "answer": prompt.answer,
        **extra,
        "response": decode(sample.response_ids),
        **verdict_fields(sample),
        "stop": str(sample.stop),
        "prompt_tokens": sample.prompt_len,
        "response_tokens": sample.response_len,
        "sampler_logprob_mean": mean if math.isfinite(mean) else None,
        "spans": [asdict(span) for span in sample.spans],
    }


def verdict_fields(sample: Sample) -> dict[str, Any]:
    """The verdict's fields of a line; `reward_details` only if the verifier returned details."""
    fields: dict[str, Any] = {
        "reward": sample.reward,
        "label": sample.label,
        "failure": sample.failure,
    }
    if sample.reward_details is not None:
        fields["reward_details"] = sample.reward_details
    return fields


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The records of one file in order. Raises DataError with the line of a malformed one."""
    return list(parse_lines(complete_lines(path), path))


def rollout_files(run_dir: Path, kind: RolloutKind = "step") -> list[tuple[int, Path]]:
    """(step, path) of every finished file, ordered by step."""
    return [(step, path) for step, path in _files(run_dir, kind) if path.suffix != RECORD_SUFFIX]


def _files(run_dir: Path, kind: str) -> list[tuple[int, Path]]:
    """(step, path) of the files of text and of arrays, ordered by step."""
    files = []
    for path in (run_dir / ROLLOUT_FOLDER).glob(f"{kind}_*"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            files.append((int(match[1]), path))
    return sorted(files)


def truncate_after(run_dir: Path, step: int, trained: int) -> None:
    """Removes what the run wrote after its checkpoint, and unfinished files. Idempotent.

    A checkpoint before the evaluation of its step has no row of that step, but its samples are
    trained: `step` is then `trained - 1`, and -1 also removes the row of the evaluation before step
    1.

    Args:
        run_dir: The run folder.
        step: Last step whose metrics and evaluation stay.
        trained: Last step whose samples stay.
    """
    truncate_metrics(run_dir, step)

    evaluations = [path for number, path in _files(run_dir, "eval") if number > step]
    steps = [path for number, path in _files(run_dir, "step") if number > trained]
    unfinished = (run_dir / ROLLOUT_FOLDER).glob(f"*{PARTIAL_SUFFIX}")
    for path in [*evaluations, *steps, *unfinished]:
        path.unlink()
