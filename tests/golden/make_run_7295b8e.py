"""Writes run_7295b8e.tar.xz: a run that commit 7295b8e stopped inside a step, and its result.

Not a test. Runs with the code of that commit, whose checkout is first on the path:
    PYTHONPATH=CHECKOUT python tests/golden/make_run_7295b8e.py FOLDER

`stopped/` contains the model, the data, the configuration and the run folder. A SIGTERM in step 2
has stopped the run: the checkpoint has the first of two updates of step 2, and samples of step 3.
`resumed/` contains metrics, rollouts and final weights after that commit has resumed the run.

With this seed no random number is closer than 7e-5 (of the probability) to the border between two
tokens. Other processors change probabilities by about 1e-6. So they sample the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_name("run_7295b8e.tar.xz")
UPDATES = 2
"""A step."""
CONFIG = f"""\
run:
  name: tiny
  dir: runs
  steps: 4
  seed: 2
model:
  path: model
precision:
  dtype: fp32
parallel:
  tp: 2
objective:
  name: pacs
  reference: frozen
  importance_cap: 2.0
  clip_grad: 1.0
batch:
  prompts_per_step: 4
  samples_per_prompt: 2
  updates_per_step: {UPDATES}
  tokens_per_microbatch: 140
  groups: apart
rollout:
  engine: embedded
  max_staleness: 1
  sampling:
    max_response_tokens: 5
    stop: [{", ".join("abcdefghijklmnopqrstuvwxyz")}]
  batch_sequences: 8
reward:
  name: custom
  function: reward.py:reward
data:
  prompt_suffix: ""
  max_prompt_tokens: 64
  train:
    path: train.jsonl
    columns: {{problem: problem, answer: answer}}
optimizer:
  lr: 1e-3
  min_lr: 1e-4
  schedule: linear
checkpoint:
  every: 2
evaluation:
  benchmarks:
    - {{path: test.jsonl, name: test, columns: {{problem: problem, answer: answer}}}}
  samples_per_prompt: 1
  k: [1]
  sampling: {{max_response_tokens: 4}}
logging:
  tensorboard: false
  save_tokens: true
"""
REWARD = """\
def reward(prompt, response):
    return float(sum(response.encode()) % 2)
"""
SHAPE: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
LEFT_OUT = ("environment.json", "heartbeats", "logs", "report.html", "run.lock")
"""Files of a run folder that a resumed run does not read."""


def write_inputs(folder: Path) -> None:
    from tests.support.tiny_models import make_tiny_qwen3

    make_tiny_qwen3(folder / "model", **SHAPE)
    problems = []
    for a in range(4):
        for b in range(4):
            problems.append(json.dumps({"problem": f"{a} + {b} = ?", "answer": str(a + b)}) + "\n")
    (folder / "train.jsonl").write_text("".join(problems[:12]))
    (folder / "test.jsonl").write_text("".join(problems[12:14]))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.yaml").write_text(CONFIG)


def train_until_stopped() -> int:
    """One rank. Rank 1 gets a SIGTERM in the first update of step 2."""
    from pacs_megatron.policy.engine import MegatronPolicy
    from pacs_megatron.training.main import run_rank

    method = MegatronPolicy._forward_backward

    def signalled(policy: Any, *arguments: Any) -> Any:
        if policy.version == UPDATES and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return method(policy, *arguments)

    MegatronPolicy._forward_backward = signalled
    return int(run_rank(Path("run.yaml"), ()))


def main(folder: Path) -> None:
    stopped = folder / "stopped"
    resumed = folder / "work"
    result = folder / "resumed"
    stopped.mkdir(parents=True)
    write_inputs(stopped)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*ranks, str(Path(__file__).resolve()), "--rank"], cwd=stopped, check=False)
    [checkpoint] = (stopped / "runs/tiny/checkpoints").iterdir()
    assert checkpoint.name == "step_000001_plus_01"
    for name in LEFT_OUT:
        path = stopped / "runs/tiny" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    shutil.copytree(stopped, resumed)
    command = [sys.executable, "-m", "pacs_megatron", "train", "run.yaml"]
    subprocess.run(command, cwd=resumed, check=True)
    shutil.copytree(resumed / "runs/tiny/rollouts", result / "rollouts")
    shutil.copy(resumed / "runs/tiny/metrics.jsonl", result)
    shutil.copy(resumed / "runs/tiny/hf/model.safetensors", result)

    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name in (stopped.name, result.name):
            archive.add(folder / name, arcname=name, filter=without_owner)


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = 0
    member.gid = 0
    member.uname = ""
    member.gname = ""
    member.mtime = 0
    return member


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.exit(train_until_stopped())
    main(Path(sys.argv[1]))
