"""Training with the real SGLang is bit-identical given the samples: a run records them, another one
gets them from a replay server, is stopped in the middle of generation and resumed, and ends with
the same weights, metrics and rollouts.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from tests.integration.sglang.conftest import Lab
from tests.support.servers.recorded_sglang import RecordedSglang
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.sglang
STEPS = 5
PROMPTS = 8
SIBLINGS = 4
LIMIT_S = 800.0
_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()


def start(folder: Path, model: Path, url: str, **changes: Any) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)
    rows = [{"problem": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(4)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"sync": "{transport: disk, verify: 'off', pause: in_place}"} | changes
    rollout = (
        f"{{engine: sglang, urls: ['{url}'], dtype: bf16, max_staleness: "
        f"{options['max_staleness']}, sync: {options['sync']}, probe_interval_s: 0.3, sampling: "
        f"{{max_response_tokens: {options['tokens']}, stop: ['a', 'b']}}}}"
    )
    benchmark = (
        f"{{path: {folder}/test.jsonl, name: test, columns: {{problem: problem, answer: answer}}}}"
    )
    overrides = (
        *(
            f"run.steps={STEPS}",
            f"rollout={rollout}",
            "checkpoint.every=null",
            "logging.save_tokens=true",
        ),
        *(f"batch.prompts_per_step={PROMPTS}", "batch.updates_per_step=1", "parallel.tp=1"),
        "batch.tokens_per_microbatch=1024",
        "objective={name: grpo, importance: truncate}",
        f"evaluation={{benchmarks: [{benchmark}], every: 2, samples_per_prompt: 1, k: [1], "
        "sampling: "
        "{max_response_tokens: 8}}",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pacs_megatron.training.main", str(config), *overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str], expected: ExitCode = ExitCode.OK) -> None:
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == expected, err[-4000:]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1][-4000:]}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_same(run: Path, recorded: Path) -> None:
    """Final weights, every metric but times, and every sample: text, tokens, log-probs and the
    weights they came from.
    """
    assert (run / "hf" / "model.safetensors").read_bytes() == (
        recorded / "hf" / "model.safetensors"
    ).read_bytes()
    mine, theirs = ([timeless(row) for row in read_metrics(folder)] for folder in (run, recorded))
    assert mine == theirs and len(mine) == STEPS + 1
    names = sorted(path.name for path in (recorded / "rollouts").iterdir())
    # Text, its lines' offsets and arrays: of each step, and of evaluations after steps 0, 2, 4, 5.
    assert len(names) == 3 * (STEPS + 4)
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == names
    for name in names:
        assert (run / "rollouts" / name).read_bytes() == (
            recorded / "rollouts" / name
        ).read_bytes(), name


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if not name.startswith("time/") and "per_s" not in name
    }


def weights_of(sample: Sample) -> set[int]:
    return {span.version for span in sample.spans}


def step_to_stop_in(samples: list[Sample]) -> tuple[int, set[str]]:
    """The last step with samples that come from the weights of its start alone: delayed, they are
    requested again after the stop from the same weights. A sample that spans an update cannot be
    requested twice on any server.
    """
    for step in range(STEPS, 0, -1):
        found = {
            s.id for s in samples if s.id.startswith(f"{step}:") and weights_of(s) == {step - 1}
        }
        if found:
            return step, set(sorted(found)[::2])
    raise AssertionError("no step has samples of its own weights")


@pytest.mark.full
@pytest.mark.parametrize(
    ("max_staleness", "pause"),
    [
        (0, "abort"),
        pytest.param(1, "abort", marks=pytest.mark.campaign),
        (1, "retract"),
        pytest.param(2, "in_place", marks=pytest.mark.campaign),
    ],
)
def test_a_run_is_the_same_bits_given_the_recorded_samples(
    lab: Lab, tmp_path: Path, max_staleness: int, pause: str
) -> None:
    sync = f"{{transport: broadcast, verify: sample, pause: {pause}}}"
    # Long where an update is due in the middle of responses, however slow the trainer is.
    options = {"max_staleness": max_staleness, "tokens": 160 if pause == "abort" else 480}
    finish(start(tmp_path / "recorded", lab.folders[0], lab.url, **options, sync=sync))
    recorded, replayed = (tmp_path / name / "runs" / "tiny" for name in ("recorded", "replayed"))
    with RecordedSglang(recorded) as server:
        ids = itertools.chain.from_iterable(server.steps.values())
        train = [server.samples[sample_id] for sample_id in ids]
        assert len(train) == STEPS * PROMPTS * SIBLINGS
        is_mixed = any(len(weights_of(sample)) > 1 for sample in train)
        assert is_mixed == (max_staleness > 0 and pause != "abort")
        step, late = step_to_stop_in(train)
        server.holds = lambda sample: sample.id in late
        process = start(tmp_path / "replayed", lab.folders[0], server.url, **options)
        own = server.steps[step]
        # Nothing of this step comes any more, and all else that there is has come.
        wait_until(lambda: late <= set(server.asked) and own - late <= server.finished, process)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        finish(process, ExitCode.PREEMPTED)
        [folder] = (replayed / "checkpoints").iterdir()
        assert folder.name == f"step_{step - 1:06d}"
        kept = set(json.loads((folder / "buffer.json").read_text())["ids"])
        finished = {
            s.id for s in train if s.id in server.finished and int(s.id.partition(":")[0]) >= step
        }
        assert own - late <= finished >= kept > set()
        server.asked.clear()
        server.holds = lambda _: False
        finish(start(tmp_path / "replayed", lab.folders[0], server.url, **options))
        # A busy client may have received a response too late to keep it; such a sample is requested
        # again.
        asked = set(server.asked)
        assert late <= asked and finished - kept <= asked and not kept & asked
    assert_same(replayed, recorded)
