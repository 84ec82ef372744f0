"""Writes and reads `rollouts/step_000012.jsonl`: every sample of a step as readable text, one JSON
object per line.

`step_000012.offsets` beside it has the positions of the lines, int64: a reader of some lines reads
only these. A file without valid offsets (of an earlier release, or edited) is read to its end once.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pacs_megatron.contracts import Prompt, Sample, Turn
from pacs_megatron.contracts.conversation import response_text, turns_of
from pacs_megatron.observability.metrics import truncate_metrics
from pacs_megatron.runtime.files import (
    PARTIAL_SUFFIX,
    complete_lines,
    json_line,
    parse_line,
    write_atomically,
)

ROLLOUT_FOLDER = "rollouts"
RolloutKind = Literal["step", "eval"]
"""The samples of a step, or of the evaluation after it"""
RECORD_SUFFIX = ".safetensors"
"""The same samples as arrays, in a file beside the text (`logging.save_tokens`)."""
TEXT_SUFFIX = ".jsonl"
OFFSETS_SUFFIX = ".offsets"
"""int64 [lines + 1], little endian: the start of each line, and the end of the last one"""
_NAME = re.compile(r"(?:step|eval)_(\d{6,})\.(?:jsonl|safetensors|offsets)")


def rollout_path(run_dir: Path, step: int, kind: RolloutKind = "step") -> Path:
    """The file of the samples of `step`."""
    return run_dir / ROLLOUT_FOLDER / f"{kind}_{step:06d}{TEXT_SUFFIX}"


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
        decode: Token ids of a response, [response], int32, to text. For samples without text: a
            checkpoint has none.
    """
    ordered = sorted(samples, key=_order)
    offsets = [0]

    def lines() -> Iterator[bytes]:
        # One line at a time: a step of 8,192 long responses is gigabytes of text.
        for sample in ordered:
            decoded = replace(sample, text=response_text(sample, decode))
            turns = turns_of(sample, decode) if sample.environment or sample.calls else []
            line = json_line(rollout_record(decoded, prompts[sample.prompt_id], turns))
            offsets.append(offsets[-1] + len(line))
            yield line

    offsets_path = path.with_suffix(OFFSETS_SUFFIX)
    # First, so that a kill leaves no offsets of other lines.
    offsets_path.unlink(missing_ok=True)
    write_atomically(path, lines())
    write_atomically(offsets_path, [np.array(offsets, "<i8").tobytes()])


def _order(sample: Sample) -> tuple[str, int, str]:
    """(prompt id, number of the sample, id), by which samples are sorted."""
    text = sample.id.rpartition("#")[2]
    number = int(text) if text.isdecimal() else 0
    return sample.prompt_id, number, sample.id


def rollout_record(sample: Sample, prompt: Prompt, turns: Sequence[Turn] = ()) -> dict[str, Any]:
    """One line: texts, verdict, lengths in tokens, mean sampler log-prob in nats, and weight
    versions; `extra` only if the data set has further columns. Of an agent also `environment`,
    [start, end) of the tokens in the response that the environment wrote, and `turns` with their
    `calls` of tools, and `own_reward`, if it returned one.

    Args:
        sample: with its text.
        prompt: of the sample.
        turns: of an agent, the conversation.
    """
    assert sample.text is not None
    extra = {"extra": dict(prompt.extra)} if prompt.extra else {}
    agent: dict[str, Any] = {}
    if sample.environment:
        agent["environment"] = sample.environment
    if sample.environment or sample.calls:
        agent["turns"] = [asdict(turn) for turn in turns]
    if sample.own_reward is not None:
        agent["own_reward"] = sample.own_reward
    mean = math.nan
    logprobs = sample.policy_logprobs
    if len(logprobs):
        mean = float(np.mean(logprobs, dtype=np.float64))
    return {
        "id": sample.id,
        "prompt_id": sample.prompt_id,
        "source": prompt.source,
        "prompt": prompt.text,
        "answer": prompt.answer,
        **extra,
        "response": sample.text,
        **verdict_fields(sample),
        "stop": str(sample.stop),
        "prompt_tokens": sample.prompt_len,
        "response_tokens": sample.response_len,
        "sampler_logprob_mean": mean if math.isfinite(mean) else None,
        "spans": [asdict(span) for span in sample.spans],
        **agent,
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


def line_offsets(path: Path) -> np.ndarray:
    """The start of each complete line of a rollout file, and the end of the last one.

    Returns:
        int64 [lines + 1].
    """
    offsets_path = path.with_suffix(OFFSETS_SUFFIX)
    if offsets_path.is_file() and path.is_file():
        content = offsets_path.read_bytes()
        if len(content) % 8 == 0:
            offsets = np.frombuffer(content, "<i8")
            is_ascending = len(offsets) > 0 and offsets[0] == 0 and (np.diff(offsets) > 0).all()
            if is_ascending and offsets[-1] == path.stat().st_size:
                return offsets

    lens = [len(line) + 1 for line in complete_lines(path)]
    return np.cumsum([0, *lens], dtype=np.int64)


def read_rollouts(path: Path, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Records of one file.

    Args:
        path: From `rollout_path`.
        rows: 0-based numbers of the lines, in the order of the result; None: all lines.

    Raises:
        DataError: A line is malformed; the message has its number.
    """
    if rows is None:
        numbered = enumerate(complete_lines(path), start=1)
        return [parse_line(line, path, number) for number, line in numbered]

    offsets = line_offsets(path)
    records = []
    with path.open("rb") as file:
        for row in rows:
            file.seek(int(offsets[row]))
            line = file.read(int(offsets[row + 1] - offsets[row]))
            records.append(parse_line(line, path, row + 1))
    return records


def rollout_files(run_dir: Path, kind: RolloutKind = "step") -> list[tuple[int, Path]]:
    """(step, path) of every finished file, ordered by step."""
    return [(step, path) for step, path in _files(run_dir, kind) if path.suffix == TEXT_SUFFIX]


def _files(run_dir: Path, kind: str) -> list[tuple[int, Path]]:
    """(step, path) of the files of text, offsets and arrays, ordered by step."""
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
