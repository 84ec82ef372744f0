"""Warnings of `train` about data and reward, on the terminal and in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pacs_megatron.errors import ExitCode
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny_qwen3, save_tokenizer
from tests.support.tiny_run import write_tiny_run

OVERRIDES = ("parallel.tp=1", "run.nproc=1", "admission.drop_one_class_groups=true")
NOTHING = "def reward(prompt, response):\n    return 0.0\n"


def train(config: Path, *overrides: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pacs_megatron", "train", str(config), *OVERRIDES, *overrides],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr


def test_a_dated_template_a_reward_of_nothing_and_a_changed_reward(tmp_path: Path) -> None:
    """The template prints the second, so every attempt has another time. No group is trained: all
    rewards are 0.
    """
    model = make_tiny_qwen3(tmp_path / "model", vocab_size=262)
    save_tokenizer(model, chat_template="{{ strftime_now('%H:%M:%S') }}" + CHAT_TEMPLATE)
    config = write_tiny_run(tmp_path, model)
    reward = tmp_path / "reward.py"
    reward.write_text(NOTHING)
    run_dir = tmp_path / "runs" / "tiny"

    code, err = train(config, "run.steps=1")
    assert code == ExitCode.OK, err
    first = json.loads((run_dir / "prompts.json").read_text())["time"]
    assert "train: the chat template prints the time" in err
    assert "step 1 has trained nothing: admission dropped every group (one_class_groups: 4)" in err
    assert f"the run has trained nothing: its weights are those of {model}" in err

    reward.write_text(NOTHING + "# changed\n")
    code, err = train(config, "run.steps=4", "admission.max_idle_steps=2")
    assert code == ExitCode.FAILED, err
    assert json.loads((run_dir / "prompts.json").read_text())["time"] == first
    assert "the reward changed since the checkpoint" in err
    [line] = [line for line in err.splitlines() if line.startswith("RolloutError")]
    assert "step 2: the first 2 steps have trained nothing, admission dropped every group" in line
    log = (run_dir / "logs" / "rank0.log").read_text()
    assert "prints the time" in log and "the reward changed" in log
    assert (run_dir / "checkpoints" / "step_000002" / "manifest.json").is_file()

    texts = set()
    for step in (1, 2):
        lines = (run_dir / "rollouts" / f"step_00000{step}.jsonl").read_text().splitlines()
        texts |= {json.loads(line)["prompt"][:8] for line in lines}
    assert texts == {first[-8:]}
