"""DAPO's preset on the real server: dynamic sampling with refill, stopped inside a refill and
resumed.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from pacs_megatron.sglang.api import SglangApi
from tests.integration.sglang.conftest import ROOT, START_S, Lab, num_running
from tests.support.servers.fleet_run import STOP, FleetRun

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(1800)]
STEPS = 4
WANTED = 2
SIBLINGS = 4
PROMPTS = 90
# Of four prompts in the order of the data, three have label 1 for every response; the fourth
# depends on the text. So three prompts, the first round, never have two groups of both classes.
# Truncated responses are judged too.
REWARD = """import time


def reward(prompt, response):
    time.sleep(0.2)
    return float(int(prompt.answer) % 4 != 3 or sum(response.encode()) % 2)
"""


def start(run: FleetRun) -> list[psutil.Process]:
    """Starts the run.

    Returns its processes once it samples the second round of a step that has trained steps before.
    """
    run.start()
    seen = len(run.driver_log())
    run.until(
        lambda: _refills(run.driver_log()[seen:], first=2) != [], "refill of a later step", START_S
    )
    root = psutil.Process(run.process.pid)
    return [root, *root.children(recursive=True)]


def _refills(log: str, first: int = 1) -> list[tuple[int, int]]:
    """(step, number of prompts) of every round of further prompts, from step `first` on."""
    found = re.findall(
        r"step (\d+): \d of \d groups are admitted; refill \d of at most 9: (\d+) more", log
    )
    return [(int(step), int(count)) for step, count in found if int(step) >= first]


def assert_nothing_runs(run: FleetRun, processes: list[psutil.Process], lab: Lab) -> None:
    run.process.wait(60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    deadline = time.monotonic() + 60
    while num_running(SglangApi(url=lab.url, api_key=None)):
        assert time.monotonic() < deadline, "the server still works on requests of the run"
        time.sleep(0.1)


def test_refill_trains_full_batches_of_admitted_groups(lab: Lab, tmp_path: Path) -> None:
    preset = yaml.safe_load((ROOT / "examples" / "objectives" / "dapo.yaml").read_text())
    assert preset["admission"] == {
        "drop_one_class_groups": True,
        "oversample": 1.5,
        "refill_rounds": 9,
    }
    sampling = {"max_response_tokens": preset["objective"]["overlong_length"], "stop": STOP}
    sync = {"transport": "broadcast", "timeout_s": 60.0}
    rollout = {"engine": "sglang", "urls": [lab.url], "sync": sync, "sampling": sampling}
    run = FleetRun(tmp_path, lab.folders[0], rollout, steps=STEPS)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"problem": f"{n} + 0 = ?", "answer": str(n)} for n in range(PROMPTS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {name: json.dumps(preset[name]) for name in ("objective", "admission")}
    run._overrides = (
        *run._overrides,
        *(
            "objective=null",
            f"objective={sections['objective']}",
            f"admission={sections['admission']}",
        ),
        "admission.truncated=judge",
        *(f"batch.prompts_per_step={WANTED}", "data.shuffle=false", "reward.workers=2"),
    )

    processes = start(run)
    run.process.send_signal(signal.SIGTERM)
    code, err = run.finish()
    assert code == ExitCode.PREEMPTED, err
    assert_nothing_runs(run, processes, lab)
    *_, folder = sorted((run.run_dir / "checkpoints").iterdir())
    saved = json.loads((folder / "buffer.json").read_text())
    [step] = saved["steps"]
    assert (
        step["step"] == run.last_step() + 1
        and step["refills"] >= 1
        and step["samples"] == len(saved["ids"])
    )
    # The samples of the first round are judged, and are not requested again.
    assert step["samples"] >= SIBLINGS * 3
    resumed_at = len(run.driver_log())

    processes = start(run) if step["step"] < STEPS else []
    code, err = run.finish()
    assert code == ExitCode.OK, err
    assert_nothing_runs(run, processes, lab)
    log = run.driver_log()
    assert (
        f"step {step['step']}: {step['samples']} of {len(step['prompts']) * SIBLINGS} samples are "
        "in the" in log
    )
    check_steps(run, log, saved, step, resumed_at)


def _at_mean(group: list[dict[str, Any]]) -> int:
    """Number of samples whose reward, less DAPO's punishment from 36 to 48 tokens, is the mean of
    the group.
    """
    found = [
        float(row["reward"]) - 0.5 * min(max((row["response_tokens"] - 36) / 12, 0.0), 1.0)
        for row in group
    ]
    return sum(abs(value - sum(found) / len(found)) < 1e-6 for value in found)


def check_steps(
    run: FleetRun, log: str, saved: dict[str, Any], stopped: dict[str, Any], resumed_at: int
) -> None:
    finished: set[str] = set()
    refills = _refills(log)
    metrics = read_metrics(run.run_dir)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    names = []
    for row in metrics:
        number = int(row["step"])
        samples = read_rollouts(rollout_path(run.run_dir, number))
        labels: dict[str, list[int]] = {}
        for sample in samples:
            labels.setdefault(sample["prompt_id"], []).append(sample["label"])
        assert len({sample["id"] for sample in samples}) == len(samples)
        whole = {prompt: found for prompt, found in labels.items() if len(found) == SIBLINGS}
        two_classes = {prompt for prompt, found in whole.items() if len(set(found)) == 2}
        # Every prompt of the step is trained, dropped as one class, or surplus.
        assert (
            row["admission/num_groups"] == WANTED
            and row["admission/num_samples"] == WANTED * SIBLINGS
        )
        # No group of one class is trained. The punishment of long responses can still give a sample
        # its group's mean.
        at_mean = sum(
            _at_mean([sample for sample in samples if sample["prompt_id"] == prompt])
            for prompt in two_classes
        )
        assert (
            row["dapo/zero_advantage_frac"] * WANTED * SIBLINGS <= at_mean
            and row["optimizer/grad_norm"] > 0
        )
        assert row["admission/dropped_one_class_groups"] == len(whole) - len(two_classes)
        assert row["admission/refills"] >= 1 or number > 1, "the first three prompts have one class"
        requested = 3 + sum(count for step, count in refills if step == number)
        dropped = sum(
            value
            for name, value in row.items()
            if re.fullmatch("admission/dropped_.*_groups", name)
        )
        assert requested == WANTED + dropped
        assert (
            row["admission/dropped_surplus_groups"]
            == requested - len(whole) + len(two_classes) - WANTED
        )
        assert len([1 for step, _ in refills if step == number]) == row["admission/refills"]
        assert not finished & whole.keys(), "a prompt was sampled twice"
        finished |= whole.keys()
        names += [sample["id"] for sample in samples]
    assert set(saved["ids"]) <= set(names), "a finished sample was requested again"
    # No prompt is lost: those before the position of the data are finished, or come first in the
    # next step.
    *_, last = sorted((run.run_dir / "checkpoints").iterdir())
    order = json.loads((last / "state.json").read_text())["driver"]
    done = {int(prompt.rpartition("/")[2]) for prompt in finished}
    assert order["epoch"] == 0
    assert sorted([*done, *order["skipped"]]) == list(range(order["position"]))
