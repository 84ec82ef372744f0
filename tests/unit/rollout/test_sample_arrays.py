"""The record of a step's samples: bit for bit, and cut back with the rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from pacs_megatron.contracts import Sample, Span, Stop, ToolCall
from pacs_megatron.observability.rollout_log import (
    RECORD_SUFFIX,
    rollout_files,
    rollout_path,
    truncate_after,
)
from pacs_megatron.rollout.sample_arrays import (
    requests_from_message,
    samples_from_message,
    samples_to_message,
    turns_to_message,
    write_record,
)
from tests.support.rollout import read_record, requests_for, sampling


def samples() -> list[Sample]:
    generator = np.random.default_rng(3)
    found = []
    for number, stop in enumerate([Stop.EOS, Stop.LENGTH, Stop.ABORTED, Stop.EOS]):
        size = 0 if stop is Stop.ABORTED else 5 + number
        logprobs = -generator.exponential(size=size).astype(np.float32)
        logprobs[:1] = np.float32(-1e-45)  # the smallest there is
        half = Span(version=7, digest="a", start=0, end=2)
        rest = Span(version=8, digest="b", start=2, end=size)
        found.append(
            Sample(
                id=f"9:d/{number // 2}#{number % 2}",
                prompt_id=f"d/{number // 2}",
                token_ids=generator.integers(0, 2**31 - 1, 4 + size).astype(np.int32),
                prompt_len=4,
                sampler_logprobs=logprobs,
                spans=(half, rest) if size else (),
                stop=stop,
            )
        )
    return found


def test_a_record_holds_every_bit(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 9).with_suffix(RECORD_SUFFIX)
    written = samples()
    write_record(path, written)
    found = read_record(path)
    assert [sample.id for sample in found] == [sample.id for sample in written]
    for mine, theirs in zip(found, written, strict=True):
        assert mine.token_ids.dtype == np.int32 and mine.sampler_logprobs.dtype == np.float32
        assert mine.token_ids.tobytes() == theirs.token_ids.tobytes()
        assert mine.sampler_logprobs.tobytes() == theirs.sampler_logprobs.tobytes()
        assert (mine.prompt_id, mine.prompt_len, mine.spans, mine.stop) == (
            *(theirs.prompt_id, theirs.prompt_len),
            *(theirs.spans, theirs.stop),
        )
    again = path.with_name("again")
    write_record(again, found)
    assert again.read_bytes() == path.read_bytes()


def test_a_record_holds_who_wrote_each_token(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 9).with_suffix(RECORD_SUFFIX)
    single = samples()[0]
    turns = replace(single, environment=((1, 3),))
    assert (turns.response_len, turns.environment_len) == (3, 2)
    write_record(path, [turns, single])
    of_turns, of_single = read_record(path)
    assert of_turns.environment == ((1, 3),)
    np.testing.assert_array_equal(of_turns.writers, [0] * 4 + [1, 2, 2, 1, 1])
    np.testing.assert_array_equal(of_single.writers, [0] * 4 + [1] * 5)
    assert of_turns.policy_logprobs.tolist() == single.sampler_logprobs[[0, 3, 4]].tolist()
    assert (of_single.response_len, of_single.environment_len) == (5, 0)


def test_records_go_with_the_rollouts_of_their_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        for kind in ("step", "eval"):
            write_record(rollout_path(tmp_path, step, kind).with_suffix(RECORD_SUFFIX), samples())  # type: ignore[arg-type]
            rollout_path(tmp_path, step, kind).write_bytes(b"{}\n")  # type: ignore[arg-type]
    assert [number for number, _ in rollout_files(tmp_path)] == [1, 2]
    truncate_after(tmp_path, 1, trained=1)
    left = {path.name for path in (tmp_path / "rollouts").iterdir()}
    assert left == {
        "step_000001.jsonl",
        "step_000001.safetensors",
        "eval_000001.jsonl",
        "eval_000001.safetensors",
    }


def test_calls_are_in_a_message_and_not_in_a_record(tmp_path: Path) -> None:
    call = ToolCall(tool="sum", arguments="{}", failure="slow", seconds=2.5, turn=1, timed_out=True)
    [first, *rest] = samples()
    written = [replace(first, calls=(call,)), *rest]
    found = samples_from_message(*samples_to_message(written))
    assert [sample.calls for sample in found] == [(call,), (), (), ()]
    path = tmp_path / f"step_000001{RECORD_SUFFIX}"
    write_record(path, written)
    assert [sample.calls for sample in read_record(path)] == [()] * 4


def test_turns_keep_their_own_tokens_limits_and_stop_strings() -> None:
    params = sampling(max_tokens=9, temperature=0.5)
    turns = []
    for number, request in enumerate(requests_for([[1, 2], [3], [4, 5, 6]], params=params)):
        own = params.model_copy(update={"max_response_tokens": 1 + number, "stop": ("x",) * number})
        turns.append(replace(request, params=own))
    header, arrays = turns_to_message(turns)
    found = requests_from_message(json.loads(json.dumps(header)), arrays)
    for mine, theirs in zip(found, turns, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert (mine.id, mine.seed, mine.params) == (theirs.id, theirs.seed, theirs.params)
