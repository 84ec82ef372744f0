"""`plan` against a real GPU: its count for one training stage equals that of PyTorch's allocator
within 5 %.

Left out of both: CUDA context, NCCL and fragmentation, which `max_memory_allocated` does not see.
Run: `pytest -m gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.config.layout import layout_of
from pacs_megatron.models import load_spec
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import activations, state
from tests.support.planned import run_config
from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import free_port, search_path
from tests.support.tiny_families import make_family

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[4]
TOKENS = 8192
SHAPE: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
}


def gpu_name() -> str:
    """This GPU's name in `resources.gpu`: a chunk of logits grows with the GPU's memory."""
    device = torch.cuda.get_device_name().lower()
    return next(name for name in GPUS if name in device)


def peak_bytes(folder: Path, parallel: dict[str, Any]) -> int:
    """The allocator's peak in a training step, in this process (the test starts a fresh one).

    Not in a fork: importing Megatron calls CUDA (megatron/core/nccl_allocator.py:11), and a fork of
    that process cannot use it.
    """
    policy = make_policy(folder, 1, dtype="bf16", tokens_per_microbatch=TOKENS, **parallel)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
    # Short samples, packed: three micro-batches that fill the budget nearly.
    steps = [random_step(seed, num_groups=3 * TOKENS // 50, vocab=30000) for seed in range(3)]
    train(
        policy, objective, steps[:2], tokens_per_microbatch=TOKENS
    )  # creates the optimizer's state
    torch.cuda.reset_peak_memory_stats()
    train(policy, objective, steps[2:], tokens_per_microbatch=TOKENS)
    return torch.cuda.max_memory_allocated()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("family", SHAPE)
def test_one_stage_is_as_planned(family: str, granularity: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this host")
    folder = make_family(tmp_path, family, **SHAPE[family])
    parallel = {"recompute": {"granularity": granularity}}
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    environment = (
        os.environ | place | {"MASTER_PORT": str(free_port()), "PYTHONPATH": search_path(ROOT)}
    )
    command = [
        sys.executable,
        "-m",
        "tests.gpu.workbench.plan.test_memory",
        str(folder),
        json.dumps(parallel),
    ]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=800,
        check=True,
    )
    peak = int(done.stdout.split()[-1])
    config = run_config("bf16", parallel)
    config = config.model_copy(
        update={
            "batch": config.batch.model_copy(update={"tokens_per_microbatch": TOKENS}),
            "resources": config.resources.model_copy(update={"gpu": gpu_name()}),
        }
    )
    spec = load_spec(folder)
    layout = layout_of(config, 1)
    items = [
        *state.state_items(config, spec, layout, 0),
        *activations.activation_items(config, spec, layout, 0),
    ]
    planned = sum(item.num_bytes for item in items)
    table = ", ".join(f"{item.name} {item.num_bytes / 2**20:.0f}" for item in items)
    assert peak == pytest.approx(planned, rel=0.05), (
        f"{peak / 2**20:.0f} MiB, planned {planned / 2**20:.0f}: {table}"
    )


if __name__ == "__main__":
    sys.stdout.write(f"{peak_bytes(Path(sys.argv[1]), json.loads(sys.argv[2]))}\n")
