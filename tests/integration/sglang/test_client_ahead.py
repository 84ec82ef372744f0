"""Training that never waits, with the real server:
the next step is sampled while this one trains.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.integration.sglang.conftest import Lab
from tests.support.ranks import run_ranks
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.sglang
STEPS = 4
TOKENS = 160


@pytest.mark.full
@pytest.mark.parametrize(
    "pause",
    [
        pytest.param("abort", marks=pytest.mark.full),
        "retract",
        pytest.param("in_place", marks=pytest.mark.full),
    ],
)
def test_the_next_step_is_sampled_while_this_one_trains(
    lab: Lab, tmp_path: Path, pause: str
) -> None:
    config = write_tiny_run(tmp_path, lab.folders[0])
    overrides = (
        f"run.steps={STEPS}",
        f"rollout={{engine: sglang, urls: ['{lab.url}'], dtype: bf16, max_staleness: 1, sampling: "
        f"{{max_response_tokens: "
        f"{TOKENS}, stop: ['a', 'b']}}, sync: {{transport: broadcast, verify: sample, pause: "
        f"{pause}}}}}",
        "objective={name: grpo, importance: truncate}",
        "checkpoint.every=1",
        "batch.prompts_per_step=8",
        "batch.updates_per_step=1",
        "parallel.tp=1",
    )

    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        return int(run_rank(config, overrides))

    assert run_ranks(on_rank, 1, init_process_group=False) == [ExitCode.OK]
    run_dir = tmp_path / "runs" / "tiny"
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in rows) == 1 and rows[0]["staleness/max"] == 0
    assert all(row["admission/dropped_stale_groups"] == 0 for row in rows)
    seen: set[str] = set()
    mixed = 0
    for step in range(1, STEPS + 1):
        samples = read_rollouts(rollout_path(run_dir, step))
        ids = {sample["id"] for sample in samples}
        assert len(samples) == len(ids) == 32 and not ids & seen
        seen |= ids
        for sample in samples:
            versions = [span["version"] for span in sample["spans"]]
            # One update a step, so versions are steps: never newer than the step's start, at most
            # one older.
            assert versions == sorted(versions) and set(versions) <= {step - 2, step - 1}
            assert [span["start"] for span in sample["spans"][1:]] == [
                span["end"] for span in sample["spans"][:-1]
            ]
            assert sample["spans"][-1]["end"] == sample["response_tokens"]
            mixed += len(versions) > 1
    assert rows[1]["staleness/mean"] > 0
    if pause == "abort":
        assert mixed == 0
    else:
        assert mixed > 0
        assert mixed == pytest.approx(sum(32 * row["staleness/multi_version_frac"] for row in rows))
