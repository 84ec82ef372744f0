"""The smallest run that goes through every phase: a tiny model, a few sums, two steps of PACS."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

CONFIG = """\
run:
  name: tiny
  dir: {folder}/runs
  steps: 2
  seed: 5
model:
  path: {model}
precision:
  dtype: fp32
parallel:
  tp: 2
objective:
  name: pacs
batch:
  prompts_per_step: 4
  samples_per_prompt: 4
  updates_per_step: 2
  tokens_per_microbatch: 512
rollout:
  engine: embedded
  sampling:
    max_response_tokens: 12
    stop: [{stop}]
  batch_sequences: 8
reward:
  name: custom
  function: {folder}/reward.py:reward
data:
  prompt_suffix: ""
  max_prompt_tokens: 128
  train:
    path: {folder}/train.jsonl
    columns: {{problem: problem, answer: answer}}
optimizer:
  lr: 1e-3
checkpoint:
  every: 1
logging:
  tensorboard: false
"""
# A random model has no correct answers: labels are a function of the text, the same on every
# machine.
REWARD = """import time


def reward(prompt, response):
    time.sleep({delay_s})
    return float(sum(response.encode()) % 2)
"""


def write_tiny_run(folder: Path, model: Path, delay_s: float = 0.0) -> Path:
    """Writes data, reward and configuration below `folder` and returns the configuration's path.

    The verifier takes `delay_s` per response, so that a test can stop a run in the middle.
    """
    rows = []
    for a, b in itertools.product(range(4), repeat=2):
        rows.append({"problem": f"{a} + {b} = ?", "answer": str(a + b)})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD.format(delay_s=delay_s))
    path = folder / "run.yaml"
    # A random model rarely ends a response, and a truncated response has label 0: stop strings end
    # most of them.
    stop = ", ".join(f"'{letter}'" for letter in "abcdefghijklmnopqrstuvwxyz0123456789")
    path.write_text(CONFIG.format(folder=folder, model=model, stop=stop))
    return path


AGENT = """
async def solve(problem, session):
    number = int(problem.id.rpartition("/")[2])
    await session.generate(max_tokens=3)
    if number % 4 == 1:
        raise ValueError("no luck")
    session.append(await session.call("calculate", expression=f"{number} * 3"))
    await session.generate(max_tokens=4)
"""
"""Two turns with a call; the agent fails for one prompt in four."""


def with_agent(config: Path, code: str = "", **options: object) -> Path:
    """Adds an agent to the configuration and returns its path.

    Args:
        config: of `write_tiny_run`.
        code: of `solve`; empty: `AGENT`.
        options: of `rollout.agent`.
    """
    file = config.parent / "my_agent.py"
    file.write_text(code or AGENT)
    markers = {"answer_end": "", "before": {"tool": "<"}, "after": {"tool": ">"}, "generation": "="}
    agent = {
        "function": f"{file}:solve",
        "turn_markers": markers,
        "tools": {"calculate": {"kind": "calculator"}},
        "tool_workers": 1,
        **options,
    }
    text = config.read_text().replace("max_response_tokens: 12", "max_response_tokens: 40")
    config.write_text(
        text.replace(
            "  batch_sequences: 8\n", f"  batch_sequences: 8\n  agent: {json.dumps(agent)}\n"
        )
    )
    return config
