"""Further samples of difficult prompts (`admission.resample`, DARS) from the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.integration.sglang.conftest import Lab
from tests.support.ranks import run_ranks
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.sglang, pytest.mark.full]
STEPS = 2
PROMPTS = 4
SIBLINGS = 4
MOST = 10
# By hand, `equal`: of four samples c are correct, p = c/4 (1/8 for none), S = 2 p (1 - p), and
# 4 S + k S is at least 2. None: (2 - 0.875) / 0.21875 = 5.1; one: (2 - 1.5) / 0.375 = 1.3.
EXTRA = {0: 6, 1: 2, 2: 0, 3: 0, 4: 0}
"""number of correct ones of a prompt's first samples -> its further samples"""
# Of the four prompts of a step one is never correct, one for a quarter of the responses, one for
# half of them, and one always.
REWARD = """def reward(prompt, response):
    kind = int(prompt.answer) % 4
    return float(kind > 0 and sum(response.encode()) % (4, 2, 1)[kind - 1] == 0)
"""


def by_prompt(samples: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The samples of each prompt, in the order of their numbers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda each: int(each["id"].rpartition("#")[2])):
        groups.setdefault(sample["prompt_id"], []).append(sample)
    return groups


def test_two_steps_with_further_samples_from_the_real_server(lab: Lab, tmp_path: Path) -> None:
    """The first samples of a prompt decide the number of further ones; all train, from the same
    weights, and the metrics count them.
    """
    config = write_tiny_run(tmp_path, lab.folders[0])
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"problem": f"{n} + 0 = ?", "answer": str(n)} for n in range(2 * PROMPTS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        f"run.steps={STEPS}",
        f"rollout={{engine: sglang, urls: ['{lab.url}'], dtype: bf16, sampling: "
        "{max_response_tokens: 8}, sync: {transport: broadcast, verify: full}}",
        f"admission={{truncated: judge, resample: {{schedule: equal, max_samples: {MOST}}}}}",
        "checkpoint.every=null",
        f"batch.prompts_per_step={PROMPTS}",
        "data.shuffle=false",
        "mismatch.max_abs_mean=0.2",
    )

    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        return int(run_rank(config, overrides))

    assert run_ranks(on_rank, 2, init_process_group=False) == [ExitCode.OK] * 2

    run_dir = tmp_path / "runs" / "tiny"
    metrics = read_metrics(run_dir)
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        step = int(row["step"])
        samples = read_rollouts(rollout_path(run_dir, step))
        assert len({sample["id"] for sample in samples}) == len(samples)
        groups = by_prompt(samples).values()
        assert min(map(len, groups)) == SIBLINGS
        assert max(map(len, groups)) == MOST
        num_extra = 0
        for group in groups:
            num_correct = sum(sample["label"] for sample in group[:SIBLINGS])
            extra = EXTRA[num_correct]
            assert len(group) == SIBLINGS + extra, (step, num_correct)
            numbers = [int(sample["id"].rpartition("#")[2]) for sample in group]
            assert numbers == list(range(len(group)))
            num_extra += extra

        versions = set()
        for sample in samples:
            versions |= {span["version"] for span in sample["spans"]}
        # Two updates a step.
        assert versions == {2 * (step - 1)}
        assert row["admission/extra_samples"] == num_extra
        assert row["admission/num_groups"] == PROMPTS
        assert row["admission/num_samples"] == len(samples) == PROMPTS * SIBLINGS + num_extra
        assert row["optimizer/grad_norm"] > 0
