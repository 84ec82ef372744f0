"""Rollout files: their bytes, their order, cutting them back."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.contracts import Prompt, Sample, Span, Stop
from pacs_megatron.errors import DataError
from pacs_megatron.observability.metrics import MetricsWriter, read_metrics
from pacs_megatron.observability.rollout_log import (
    line_offsets,
    read_rollouts,
    rollout_files,
    rollout_path,
    truncate_after,
    write_rollouts,
)
from pacs_megatron.runtime.run_folder import write_environment


def prompt(prompt_id: str, text: str = "1 + 1?") -> Prompt:
    return Prompt(
        id=prompt_id,
        text=text,
        token_ids=np.array([1, 2], np.int32),
        answer="2",
        problem=text,
        source="toy",
    )


def sample(sample_id: str, *, response: tuple[int, ...] = (7, 8), **changes: object) -> Sample:
    fields: dict[str, object] = {
        "id": sample_id,
        "prompt_id": sample_id.partition(":")[2].partition("#")[0],
        "token_ids": np.array([1, 2, *response], np.int32),
        "prompt_len": 2,
        "sampler_logprobs": np.full(len(response), -0.5, np.float32),
        "spans": (Span(version=3, digest="d3", start=0, end=len(response)),),
        "stop": Stop.EOS,
        "reward": 1.0,
        "label": 1,
    }
    return Sample(**{**fields, **changes})  # type: ignore[arg-type]


def decode(ids: np.ndarray) -> str:
    return " ".join(str(i) for i in ids)


def test_record_contains_text_verdict_lengths_and_weights(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 12)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    write_rollouts(path, [sample("12:toy/0#0")], {"toy/0": prompt("toy/0")}, decode)
    assert read_rollouts(path) == [
        {
            "id": "12:toy/0#0",
            "prompt_id": "toy/0",
            "source": "toy",
            "prompt": "1 + 1?",
            "answer": "2",
            "response": "7 8",
            "reward": 1.0,
            "label": 1,
            "failure": None,
            "stop": "eos",
            "prompt_tokens": 2,
            "response_tokens": 2,
            "sampler_logprob_mean": -0.5,
            "spans": [{"version": 3, "digest": "d3", "start": 0, "end": 2}],
        }
    ]


def test_the_record_has_the_verifiers_details(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    details = {"components": [{"name": "math", "weight": 0.8, "reward": 1.0}]}
    write_rollouts(
        path, [sample("1:toy/0#0", reward_details=details)], {"toy/0": prompt("toy/0")}, decode
    )
    assert read_rollouts(path)[0]["reward_details"] == details


def test_the_record_has_further_columns(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    extra = {"kind": "sum", "level": 3, "tags": ["a", None]}
    prompts = {"toy/0": replace(prompt("toy/0"), extra=extra)}
    write_rollouts(path, [sample("1:toy/0#0")], prompts, decode)
    assert read_rollouts(path)[0]["extra"] == extra


def test_order_of_arrival_has_no_effect_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    ids = []
    for p in range(3):
        for g in range(12):
            ids.append(f"1:toy/{p}#{g}")
    prompts = {f"toy/{p}": prompt(f"toy/{p}") for p in range(3)}
    contents = []
    for seed in range(3):
        shuffled = ids.copy()
        random.Random(seed).shuffle(shuffled)
        path = rollout_path(tmp_path, seed)
        write_rollouts(path, [sample(i) for i in shuffled], prompts, decode)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert [r["id"] for r in read_rollouts(path)] == ids


def test_some_lines_are_read_by_their_offsets_alone(tmp_path: Path) -> None:
    """A line that is not read may be anything."""
    path = rollout_path(tmp_path, 1)
    ids = [f"1:toy/0#{number}" for number in range(12)]
    write_rollouts(path, [sample(i) for i in ids], {"toy/0": prompt("toy/0")}, decode)
    whole = read_rollouts(path)
    start, end = line_offsets(path)[5:7]
    content = bytearray(path.read_bytes())
    content[start:end] = b"x" * (end - start)
    path.write_bytes(content)
    assert read_rollouts(path, [11, 0, 7]) == [whole[11], whole[0], whole[7]]
    with pytest.raises(DataError, match=r"step_000001\.jsonl:6: malformed JSON"):
        read_rollouts(path, [5])


@pytest.mark.parametrize("damage", ["none", "cut", "unordered", "of other lines"])
def test_lines_without_their_offsets_are_counted(tmp_path: Path, damage: str) -> None:
    """Of an earlier release, or of a file that was edited."""
    path = rollout_path(tmp_path, 1)
    prompts = {"toy/0": prompt("toy/0")}
    write_rollouts(path, [sample(f"1:toy/0#{k}") for k in range(3)], prompts, decode)
    offsets_path = path.with_suffix(".offsets")
    expected = line_offsets(path)
    assert expected[-1] == path.stat().st_size
    match damage:
        case "none":
            offsets_path.unlink()
        case "cut":
            offsets_path.write_bytes(offsets_path.read_bytes()[:-3])
        case "unordered":
            offsets_path.write_bytes(expected[[0, 2, 1, 3]].tobytes())
        case _:
            with path.open("ab") as file:
                file.write(json.dumps({"id": "4"}).encode() + b"\n")
            expected = np.append(expected, path.stat().st_size)
    np.testing.assert_array_equal(line_offsets(path), expected)
    assert read_rollouts(path, [1]) == [read_rollouts(path)[1]]


def test_a_record_of_several_turns_has_the_spans_of_the_environment(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    turns = sample(
        "1:toy/0#0",
        response=(7, 8, 9, 7, 8),
        environment=((0, 1), (2, 4)),
        sampler_logprobs=np.array([0.0, -1.0, 0.0, 0.0, -3.0], np.float32),
    )
    write_rollouts(path, [turns], {"toy/0": prompt("toy/0")}, decode)
    [record] = read_rollouts(path)
    assert record["environment"] == [[0, 1], [2, 4]]
    assert record["response_tokens"] == 2 and record["sampler_logprob_mean"] == -2.0


def test_a_decoded_response_is_not_decoded_again(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    samples = [sample("1:toy/0#0", text="judged"), sample("1:toy/0#1")]
    write_rollouts(path, samples, {"toy/0": prompt("toy/0")}, decode)
    assert [record["response"] for record in read_rollouts(path)] == ["judged", "7 8"]


@pytest.mark.parametrize(
    "text", ["new\nline \u2028 \u0085", "lone \udc80 surrogate", "中文 😀", '"}\x00', "</script>"]
)
def test_any_text_survives_as_one_line(tmp_path: Path, text: str) -> None:
    path = rollout_path(tmp_path, 1)
    write_rollouts(path, [sample("1:toy/0#0")], {"toy/0": prompt("toy/0", text)}, lambda _: text)
    assert path.read_bytes().count(b"\n") == 1
    (record,) = read_rollouts(path)
    assert record["response"] == record["prompt"] == text


def test_unjudged_aborted_and_empty(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    odd = sample(
        "1:toy/0#0",
        response=(),
        reward=None,
        label=None,
        failure="TimeoutError",
        stop=Stop.ABORTED,
        spans=(),
    )
    write_rollouts(path, [odd], {"toy/0": prompt("toy/0")}, decode)
    (record,) = read_rollouts(path)
    assert (record["reward"], record["label"], record["failure"]) == (None, None, "TimeoutError")
    assert (record["stop"], record["response_tokens"], record["sampler_logprob_mean"]) == (
        "aborted",
        0,
        None,
    )


def test_failed_write_leaves_no_readable_file(tmp_path: Path) -> None:
    def fail(ids: np.ndarray) -> str:
        raise UnicodeError("tokenizer broke")

    with pytest.raises(UnicodeError):
        write_rollouts(
            rollout_path(tmp_path, 1), [sample("1:toy/0#0")], {"toy/0": prompt("toy/0")}, fail
        )
    assert rollout_files(tmp_path) == []


def test_resume_truncates_metrics_and_rollouts_to_the_same_step(tmp_path: Path) -> None:
    prompts = {"toy/0": prompt("toy/0")}
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.append({"step": step})
            write_rollouts(
                rollout_path(tmp_path, step), [sample(f"{step}:toy/0#0")], prompts, decode
            )
            write_rollouts(
                rollout_path(tmp_path, step, "eval"),
                [sample(f"eval{step}:toy/0#0")],
                prompts,
                decode,
            )
    torn = tmp_path / "rollouts" / "step_000005.jsonl.partial"
    torn.write_bytes(b'{"id": ')
    note = tmp_path / "rollouts" / "step_notes.jsonl"
    note.write_text("kept")
    for _ in range(2):
        truncate_after(tmp_path, 2, trained=3)
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
        assert [step for step, _ in rollout_files(tmp_path)] == [0, 1, 2, 3], (
            "step 3 is trained, its row is not written"
        )
        assert [step for step, _ in rollout_files(tmp_path, "eval")] == [0, 1, 2]
        assert not torn.exists()
        assert not rollout_path(tmp_path, 4).with_suffix(".offsets").exists()
        assert note.exists()


def test_files_sort_by_step_beyond_six_digits(tmp_path: Path) -> None:
    for step in (10**6, 999_999, 2):
        write_rollouts(rollout_path(tmp_path, step), [], {}, decode)
    assert [step for step, _ in rollout_files(tmp_path)] == [2, 999_999, 10**6]
    truncate_after(tmp_path, 999_999, trained=999_999)
    assert [step for step, _ in rollout_files(tmp_path)] == [2, 999_999]


def test_malformed_rollouts_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1}\n{"id"\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: malformed JSON"):
        read_rollouts(path)


def test_environment_names_versions(tmp_path: Path) -> None:
    write_environment(tmp_path, {"device": "CPU"})
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["device"] == "CPU"
    assert found["numpy"] == np.__version__
    assert "pacs-megatron" in found
