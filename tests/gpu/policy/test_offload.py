"""`policy.offload` on a real GPU: the same bits, and the memory is free while the state is in host
memory. `pytest -m gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import free_port, search_path
from tests.support.tiny_families import make_family

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
KINDS: tuple[Literal["none", "optimizer", "all"], ...] = ("none", "optimizer", "all")


def trained(folder: Path, kind: Literal["none", "optimizer", "all"]) -> dict[str, Any]:
    """Three updates with the state in host memory before each: norms, digests of the exports there,
    allocated bytes.
    """
    policy = make_policy(folder, 1, dtype="bf16", distributed_optimizer=True, offload=kind)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
    found: dict[str, Any] = {"norms": [], "digests": []}
    for seed in range(3):
        policy.offload.to_host()
        found["bytes"] = torch.cuda.memory_allocated()
        digest = WeightDigest()
        for name, tensor in policy.export_weights():
            digest.update(name, tensor)
        found["digests"].append(digest.hexdigest())
        policy.offload.to_device()
        found["norms"] += [
            report.grad_norm for report in train(policy, objective, [random_step(seed, vocab=90)])
        ]
    return found


@pytest.mark.timeout(900)
def test_the_same_bits_with_free_memory(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this host")
    folder = make_family(
        tmp_path, "qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=8
    )
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    found = {}
    for kind in KINDS:  # in fresh processes: importing Megatron calls CUDA
        environment = (
            os.environ | place | {"MASTER_PORT": str(free_port()), "PYTHONPATH": search_path(ROOT)}
        )
        command = [sys.executable, "-m", "tests.gpu.policy.test_offload", str(folder), kind]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=300,
            check=True,
        )
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    sizes = {kind: each.pop("bytes") for kind, each in found.items()}
    assert found["none"] == found["optimizer"] == found["all"]
    # Weights 2 bytes a parameter, gradients 4, optimizer 12.
    assert sizes["optimizer"] < 0.2 * sizes["none"] and sizes["all"] < 0.1 * sizes["none"]


if __name__ == "__main__":
    print(json.dumps(trained(Path(sys.argv[1]), sys.argv[2])))  # type: ignore[arg-type]
