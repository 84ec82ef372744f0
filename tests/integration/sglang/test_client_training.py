"""The whole loop with the real server: sample, judge, update, push, and sample again from the new
weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
import torch

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.integration.sglang.conftest import Lab
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.sglang
STEPS = 3
# A random model never ends its answer by itself, and a truncated one is label 0: then nothing would
# be learned.
STOP = list("abcdefghijklmnopqrstuvwxyz")
ADAPTERS = ("policy.lora={rank: 4, alpha: 8}", "optimizer.lr=1e-2")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "broadcast": ("broadcast", ()),
    "disk": ("disk", ()),
    "ipc": ("ipc", ()),
    "adapters-broadcast": ("broadcast", ADAPTERS),
    "adapters-disk": ("disk", ADAPTERS),
    "adapters-ipc": ("ipc", ADAPTERS),
}


@pytest.mark.parametrize("name", in_test(CASES, "broadcast"))
def test_training_through_the_real_server(lab: Lab, tmp_path: Path, name: str) -> None:
    """With adapters the server has the merged weights."""
    transport, changes = CASES[name]
    config = write_tiny_run(tmp_path, lab.folders[0])
    overrides = (
        f"run.steps={STEPS}",
        f"rollout={{engine: sglang, urls: ['{lab.url}'], dtype: bf16, sampling: "
        f"{{max_response_tokens: 12, stop: {STOP}}}, sync: {{transport: {transport}, verify: "
        "full}}",
        "checkpoint.every=null",
        "batch.prompts_per_step=8",
        "mismatch.max_abs_mean=0.2",
        *changes,
    )

    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        return int(run_rank(config, overrides))

    assert run_ranks(on_rank, 2, init_process_group=False) == [ExitCode.OK] * 2
    run_dir = tmp_path / "runs" / "tiny"
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        # A bf16 server against an fp32 trainer: apart by rounding, not by weights.
        assert 0 < row["mismatch/logprob_abs_mean"] < 0.06, row
    digests = set()
    for step in range(1, STEPS + 1):
        samples = read_rollouts(rollout_path(run_dir, step))
        assert {sample["label"] for sample in samples} == {0, 1}
        assert len(samples) == 32
        spans = []
        for sample in samples:
            for span in sample["spans"]:
                spans.append(span)
        # Two updates a step: step 1 samples version 0, step 2 version 2, ...
        assert {span["version"] for span in spans} == {2 * (step - 1)}
        digests |= {span["digest"] for span in spans}
    assert len(digests) == STEPS
    _assert_greedy_agrees(lab.url, run_dir / "hf")


def _assert_greedy_agrees(url: str, folder: Path) -> None:
    """The server holds the exported weights: its greedy tokens are transformers', where the choice
    is no near tie.
    """
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(torch.float32).eval()
    compared = 0
    # How many choices are near ties differs from run to run: prompts are added until enough was
    # compared.
    for start in range(40, 120, 2):
        if compared > 40:
            break
        prompt = list(range(start, start + 5))
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        answer = requests.post(
            f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=600
        )
        tokens = answer.json()["output_ids"]
        for position in range(len(tokens)):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens[:position]])).logits[0, -1]
            best = logits.topk(2)
            if float(best.values[0] - best.values[1]) > 0.15:
                assert tokens[position] == int(best.indices[0]), (start, position)
                compared += 1
    assert compared > 40
