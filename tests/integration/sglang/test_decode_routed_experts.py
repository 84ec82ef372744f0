"""`policy.routing: replay_sampler` with a real SGLang server: it returns the experts that
transformers' routers choose.

On a CPU one function of the server is replaced: the pinning of a host buffer
(tests/support/sglang_cpu/sgl_kernel).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from tests.support.needs import SGLANG_PYTHON, require_sglang
from tests.support.rollout import read_record
from tests.support.routing_runs import LAYERS, STEPS, TOP_K, start
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.sglang, pytest.mark.full]


def test_a_real_server_returns_the_experts_that_training_replays(tmp_path: Path) -> None:
    require_sglang()
    from transformers import Qwen3MoeForCausalLM

    model = make_tiny_qwen3(tmp_path / "model", vocab_size=262)  # its tokenizer
    for file in model.glob("*.safetensors*"):
        file.unlink()
    # SGLang's loader for CPUs pads experts that are no multiple of 32 (configs/update_config.py),
    # and checksums differ.
    make_family(
        model,
        "qwen3_moe",
        vocab_size=262,
        num_hidden_layers=LAYERS,
        hidden_size=64,
        moe_intermediate_size=32,
    )
    rollout = (
        f"{{engine: sglang, servers: {{python: ['{SGLANG_PYTHON}'], device: cpu, max_total_tokens: "
        "16384}, dtype: fp32, sync: {transport: disk, verify: full}, sampling: "
        "{max_response_tokens: 12, stop: ['a', 'b']}}"
    )
    layout = ("parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true")
    options = (
        "policy.routing=replay_sampler",
        "admission.truncated=judge",
    )  # so that most groups have both labels
    done = start(tmp_path / "run", model, f"rollout={rollout}", *options, *layout)
    assert done.returncode == ExitCode.OK, done.stderr
    run_dir = tmp_path / "run" / "runs" / "tiny"
    rows = read_metrics(run_dir)
    # The trainer in another layout than the server, with the server's experts: only the order of
    # additions differs.
    # (A first update whose groups have one label each has no comparison.)
    apart = [row["mismatch/logprob_abs_mean"] for row in rows if "mismatch/logprob_abs_mean" in row]
    assert len(rows) == STEPS and apart and max(apart) < 1e-5
    reference = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    equal = []
    for sample in read_record(
        run_dir / "rollouts" / "step_000001.safetensors"
    ):  # from the first weights
        assert sample.routes is not None
        with torch.no_grad():
            tokens = torch.from_numpy(sample.token_ids[None, :-1].astype(np.int64))
            logits = reference(tokens, output_router_logits=True).router_logits
        chosen = torch.stack([own.topk(TOP_K).indices for own in logits], 1).sort(-1).values.numpy()
        equal.append((np.sort(sample.routes, -1) == chosen).mean())
    assert len(equal) == 16 and min(equal) > 0.9 and np.mean(equal) > 0.99  # a near tie is possible
