r"""`samples-<digest>.jsonl`: every response of an evaluation, appended as it is judged.

The first line has `produced_by` (weights, sampling, prompt template, ...) and `judged_by` (the
verifier). The file name has the digest of `produced_by`, so other weights or settings use another
file. A killed evaluation resumes with the missing samples. The file has no token ids, because a
verdict needs the text only.
"""

import itertools
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash

from pacs_megatron.contracts import Prompt, Sample, Stop
from pacs_megatron.contracts.conversation import Turn, turn_from_json
from pacs_megatron.errors import ConfigError, DataError, RewardError
from pacs_megatron.observability.rollout_log import rollout_record, verdict_fields
from pacs_megatron.rewards.boxed import last_boxed
from pacs_megatron.rewards.labels import check_failures
from pacs_megatron.rewards.pool import received
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.files import has_fields, json_line, naming, parse_lines, write_atomically
from pacs_megatron.runtime.json_reader import parsing, read_lines

_FIELDS = {
    **dict.fromkeys(("id", "prompt_id", "source", "prompt", "response", "stop"), str),
    **dict.fromkeys(("prompt_tokens", "response_tokens"), int),
    "label": int | None,
    "failure": str | None,
}
REWARD_FILES = "reward files"
"""Key of `judged_by`: digests of the files of custom rewards"""
_REJUDGE_BATCH = 512
"""Samples whose verdicts `rejudge` waits for together"""


class Outcome(NamedTuple):
    r"""The part of a sample that statistics need: its label (None: no verdict) and the content of
    the last `\boxed{}`.
    """

    prompt_id: str
    label: int | None
    failure: str | None
    answer: str | None
    is_truncated: bool
    num_tokens: int


class SampleFile(Closing):
    """The samples of one model. The constructor reads the samples of an earlier attempt."""

    def __init__(
        self,
        folder: Path,
        produced_by: Mapping[str, Any],
        judged_by: Mapping[str, Any],
        prompts: Mapping[str, Prompt],
        now: datetime,
    ) -> None:
        """Reads the file, if it exists.

        Args:
            folder: of the file.
            produced_by: every setting that changes a response.
            judged_by: every setting that changes a verdict.
            prompts: prompt id -> prompt.
            now: time that the prompts have, from `first_time`.

        Raises:
            DataError: the file is malformed or has samples of other prompts.
        """
        self.digest = _digest(produced_by)
        self.path = _path(folder, self.digest)
        self.outcomes: dict[str, Outcome] = {}
        """by sample id"""
        self._prompts = prompts
        self._size = 0
        """bytes of complete lines; an append removes an incomplete last line"""
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {
            "digest": self.digest,
            "produced_by": produced_by,
            "judged_by": judged_by,
            "time": now.isoformat(),
        }
        self._judged_by: Mapping[str, Any] = judged_by
        """of the file"""
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        for number, (line, record) in enumerate(read_samples(self.path), start=1):
            self._size += len(line)
            if number == 1:
                self._read_header(record)
            else:
                self._add(number, record)

    def _read_header(self, record: Mapping[str, Any]) -> None:
        is_header = has_fields(record, {"judged_by": dict})
        if record.get("digest") != self.digest or not is_header:
            raise DataError(f"{self.path}:1: no header of these samples; remove the file")
        self._judged_by = record["judged_by"]

    def _add(self, line: int, record: Mapping[str, Any]) -> None:
        if not is_sample(record):
            raise DataError(f"{self.path}:{line}: not a judged sample; remove the file")
        sample_id = record["id"]
        problem = "is repeated" if sample_id in self.outcomes else ""

        # A sample without a prompt belongs to a benchmark that is no longer configured.
        prompt = self._prompts.get(record["prompt_id"])
        if prompt is not None:
            texts = (record["prompt"], record.get("answer"))
            if texts != (prompt.text, prompt.answer):
                problem = "is of another problem text or reference answer"
        if problem:
            raise DataError(
                f"{self.path}: sample {sample_id} {problem}; choose another --out, or remove the "
                "file"
            )
        self.outcomes[sample_id] = outcome_of(record)

    def check_verifier(self) -> None:
        """Raises ConfigError if another verifier judged the samples."""
        configured = self._header["judged_by"]
        for key in sorted({*self._judged_by, *configured}):
            before = self._judged_by.get(key)
            now = configured.get(key)
            if key == REWARD_FILES and before is None:  # of an earlier release
                continue
            if before != now:
                raise ConfigError(
                    f"{self.path}: judged with {key}={before}, the configuration has {now}; pass "
                    "--rejudge to judge these samples again"
                )

    def append(self, sample: Sample, seed: int, turns: Sequence[Turn] = ()) -> None:
        """Writes a judged sample to the file before it returns, so that a later kill does not lose
        it.

        Args:
            sample: with its text and its verdict.
            seed: of its request.
            turns: of an agent, the conversation.
        """
        record = rollout_record(sample, self._prompts[sample.prompt_id], turns)
        record["seed"] = seed
        lines = json_line(record)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(self._size)
            if not self._size:
                lines = json_line(self._header) + lines
        with naming(self.path):
            self._file.write(lines)
            self._file.flush()
        self.outcomes[sample.id] = outcome_of(record)

    def close(self) -> None:
        if self._file is not None:
            with naming(self.path):
                os.fsync(self._file.fileno())
                self._file.close()

    # ------------------------------------------------------------------------------- judging again
    def rejudge(self, judge: Judge, max_failure_frac: float) -> None:
        """Judges every response again and replaces the file when all have a verdict.

        Raises:
            RewardError: same as `received` and `check_failures`.
            ConfigError: samples of a benchmark without prompts.
        """
        write_atomically(self.path, self._judged_again(judge, max_failure_frac))
        self._judged_by = self._header["judged_by"]

    def _judged_again(self, judge: Judge, max_failure_frac: float) -> Iterator[bytes]:
        """The lines of the new file."""
        yield json_line(self._header)
        samples = itertools.islice(read_samples(self.path), 1, None)
        records = (record for _, record in samples)
        while batch := list(itertools.islice(records, _REJUDGE_BATCH)):
            verdicts = self._verdicts(judge, batch)
            for record in batch:
                verdict = verdicts[record["id"]]
                record.pop("reward_details", None)
                record |= verdict_fields(verdict)
                self.outcomes[verdict.id] = outcome_of(record)
                yield json_line(record)

        outcomes = self.outcomes.values()
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        check_failures(failures, len(outcomes), max_failure_frac)

    def _verdicts(self, judge: Judge, records: Sequence[Mapping[str, Any]]) -> dict[str, Sample]:
        """Sample id -> the sample with its new verdict and without its tokens."""
        verdicts: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
        for record in records:
            prompt = self._prompts.get(record["prompt_id"])
            if prompt is None:
                raise ConfigError(
                    f"{self.path} has samples of {record['prompt_id']}, which "
                    f"evaluation.benchmarks lacks; add {record['source']}, or correct its `limit` "
                    "and `where`"
                )
            turns = [turn_from_json(turn) for turn in record.get("turns", [])]
            judge.submit(_without_tokens(record), prompt, verdicts.put, turns)
        return {sample.id: sample for sample in received(verdicts, len(records))}


def _without_tokens(record: Mapping[str, Any]) -> Sample:
    """The sample of one line, with the right lengths and zeros as token ids."""
    num_tokens = record["prompt_tokens"] + record["response_tokens"]
    return Sample(
        id=record["id"],
        prompt_id=record["prompt_id"],
        token_ids=np.broadcast_to(np.int32(0), num_tokens),
        prompt_len=record["prompt_tokens"],
        sampler_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        stop=Stop(record["stop"]),
        own_reward=record.get("own_reward"),
        text=record["response"],
    )


def first_time(folder: Path, produced_by: Mapping[str, Any]) -> datetime:
    """The time of the evaluation's first attempt, which a chat template may print; else now.

    Args:
        folder: of the samples.
        produced_by: every setting that changes a response.

    Raises:
        DataError: the file of the samples is malformed.
    """
    path = _path(folder, _digest(produced_by))
    now = datetime.now().replace(microsecond=0)
    if not path.exists():
        return now
    for _, header in itertools.islice(read_samples(path), 1):
        with parsing(f"{path}:1", DataError):
            return datetime.fromisoformat(header.get("time", now.isoformat()))
    return now


def _digest(produced_by: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json_line(produced_by))


def _path(folder: Path, digest: str) -> Path:
    return folder / f"samples-{digest[:12]}.jsonl"


# ------------------------------------------------------------------------------------------- lines
def read_samples(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, its object) of every whole line, the header first.

    Raises DataError with the number of a malformed one.
    """
    whole_lines = itertools.takewhile(lambda line: line.endswith(b"\n"), read_lines(path))
    lines, lines_to_parse = itertools.tee(whole_lines)
    yield from zip(lines, parse_lines(lines_to_parse, path), strict=True)


def is_sample(record: Mapping[str, Any]) -> bool:
    """Whether a line has all fields of a judged sample."""
    if not has_fields(record, _FIELDS) or record["stop"] not in set(Stop):
        return False
    if min(record["prompt_tokens"], record["response_tokens"]) < 0:
        return False
    label = record["label"]
    if isinstance(label, bool):
        return False
    # A sample that could not be judged has no label.
    return label is None if record["failure"] is not None else label in (None, 0, 1)


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome of one line."""
    return Outcome(
        prompt_id=record["prompt_id"],
        label=record["label"],
        failure=record["failure"],
        answer=last_boxed(record["response"]),
        is_truncated=record["stop"] == Stop.LENGTH,
        num_tokens=record["response_tokens"],
    )
