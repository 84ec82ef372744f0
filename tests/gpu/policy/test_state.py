"""Three updates and a resume on a real GPU: every precision, dense and with experts, gives the same
bits after a resume, and stays near bf16. `pytest -m gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import free_port, search_path
from tests.support.tiny_families import make_family
from tests.te.cases import Case, run_case
from tests.te.fp8_cases import fp8_options

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
RECOMPUTE = {"recompute": {"granularity": "full"}, "distributed_optimizer": True}
CASES = {
    "qwen3": Case("qwen3"),
    "qwen3-recompute": Case("qwen3", 1, RECOMPUTE),
    "moe": Case("qwen3_moe"),
}
RECIPES = ("tensorwise", "blockwise", "delayed")


def trained(name: str, recipe: str, folder: Path) -> dict[str, Any]:
    """The outcome of a case in this process, which has one rank."""
    options = {} if recipe == "bf16" else fp8_options(recipe)
    outcome = run_case(CASES[name], folder / "model", folder / recipe, 1, dtype="bf16", **options)
    found = asdict(outcome)
    found.pop("weights")
    found["before"] = np.concatenate(
        [outcome.before[row] for row in sorted(outcome.before)]
    ).tolist()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_three_updates_and_a_resume(name: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this host")
    make_family(tmp_path / "model", CASES[name].family, **SHAPE)
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": search_path(ROOT),
    }
    processes = {}
    for recipe in ("bf16", *RECIPES):
        environment = os.environ | place | {"MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", "tests.gpu.policy.test_state", name, recipe]
        processes[recipe] = subprocess.Popen(
            [*command, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
    found = {}
    for recipe, process in processes.items():
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, recipe
        found[recipe] = json.loads(out.splitlines()[-1])

    for recipe, outcome in found.items():
        assert outcome["resumed_equal"], recipe
        assert not any(outcome["drift"]), recipe
    before = np.array(found["bf16"]["before"])
    for recipe in RECIPES:
        # The random model's log-probs are nearly all far from 0, so its FP8 errors are relative.
        difference = np.abs(np.array(found[recipe]["before"]) - before).mean()
        assert 0 < difference < 0.1 * np.abs(before).mean(), (recipe, difference)
        np.testing.assert_allclose(found[recipe]["norms"], found["bf16"]["norms"], rtol=0.5)


if __name__ == "__main__":
    print(json.dumps(trained(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
