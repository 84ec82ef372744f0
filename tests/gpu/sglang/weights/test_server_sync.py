"""A real SGLang server on the trainer's own GPU: weights by CUDA IPC and by disk, memory given back
between.

Needs one CUDA device and PACS_SGLANG_PYTHON, an interpreter that has sglang for CUDA. Run: `pytest
-m gpu tests/gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SampleRequest, SamplingOptions
from pacs_megatron.models import load_spec
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang.weights.server_sync import server_sync
from pacs_megatron.training.push import push
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(900)]
BF16_NATS = 0.15


@pytest.fixture(scope="module")
def python() -> str:
    if not torch.cuda.is_available() or "PACS_SGLANG_PYTHON" not in os.environ:
        pytest.skip("needs a CUDA device and PACS_SGLANG_PYTHON")
    return os.environ["PACS_SGLANG_PYTHON"]


def export(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        yield name, tensor.to(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("transport", ["ipc", "disk"])
def test_colocated_steps(python: str, tmp_path: Path, transport: str) -> None:
    from transformers import Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "head_dim": 128,
    }
    folders = [
        make_tiny_qwen3(tmp_path / f"m{seed}", seed=seed, dtype="bfloat16", **shape)
        for seed in range(2)
    ]
    models = [
        Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders
    ]
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=16),
        sync=SglangSync(transport=transport, verify="full", bucket_mib=64, timeout_s=120.0),
        servers=SglangServers(python=(python,), device="cuda", mem_fraction=0.3, colocated=True),
    )
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=16)
    with sglang.open_engine(options, ModelOptions(path=str(folders[0])), tmp_path) as engine:
        sync = server_sync(options, load_spec(folders[0]), tmp_path / "weights")
        sync.set_targets(
            sglang.server_apis(options, tuple(status.url for status in engine.status()))
        )
        for step in range(4):
            if step:
                free_before = torch.cuda.mem_get_info()[0]
                sync.release_memory()
                assert torch.cuda.mem_get_info()[0] > free_before + (1 << 30)
            engine.begin_update()
            pushed = push(step, export(models[step % 2]), [sync])
            engine.set_current(step, pushed)
            assert sync.report.verified > 0
            print(
                f"{transport}: {sync.report.num_bytes} bytes in {sync.report.seconds:.3f} s, "
                f"{sync.report.num_bytes / sync.report.seconds / 1e9:.2f} GB/s"
            )
            requests = [
                SampleRequest(
                    id=f"{step}:{i}",
                    prompt_id=str(i),
                    token_ids=np.arange(40, 60, dtype=np.int32),
                    seed=i,
                    params=params,
                )
                for i in range(8)
            ]
            for sample in engine.stream(requests):
                ids = torch.from_numpy(sample.token_ids.astype(np.int64))
                with torch.no_grad():
                    logprobs = models[step % 2](ids[None]).logits[0, :-1].log_softmax(-1)
                expected = logprobs.gather(1, ids[1:, None])[sample.prompt_len - 1 :, 0].numpy()
                np.testing.assert_allclose(sample.sampler_logprobs, expected, atol=BF16_NATS)
        sync.close()
