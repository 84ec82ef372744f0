"""docs/performance.md has the tables of benchmarks/shipped_runs.py."""

from pathlib import Path

import pytest

from benchmarks import shipped_runs
from pacs_megatron.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("gpu", shipped_runs.GPUS)
def test_the_page_has_todays_figures_of_each_run(gpu: str) -> None:
    """Without the figures of older files, which stand before an arrow."""
    table = PAGE.split(f"{gpu.upper()}:\n\n")[1].split("\n\n")[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, *values = line.strip("| ").split(" | ")
        rows[name] = [value.split(" → ")[-1] for value in values]

    plans = shipped_runs.planned(ROOT / "configs", gpu)
    expected = {name: shipped_runs.cells(plan) for name, plan in plans.items()}
    for path in (ROOT / "configs" / "runs").glob("*n8g*.yaml"):
        # A run for the other GPU may have no include for this one.
        if load_config(path).config.resources.gpu == gpu:
            assert path.stem in {plan.config.run.name for plan in plans.values()}
    assert rows == expected, "python benchmarks/shipped_runs.py --before COMMIT prints the tables"


def test_the_page_has_the_seconds_of_weight_syncs() -> None:
    assert shipped_runs.sync_table() in PAGE


def test_figures_of_a_run_whose_sides_wait_for_each_other() -> None:
    """14B ahead on H100: the trainer's four nodes wait for the servers' three, which never wait."""
    [plan] = [
        plan
        for name, plan in shipped_runs.planned(ROOT / "configs", "h100").items()
        if name == "grpo-qwen3-14b-ahead"
    ]
    waiting = 1 - sum(phase.seconds for phase in plan.phases[1:]) / plan.step_s
    assert plan.idle["servers"] == pytest.approx(0)
    assert plan.idle_share == pytest.approx(4 / 7 * waiting)
