"""A dense hybrid on a real server: every transport brings all weights, and responses are theirs.

The kernels of a gated delta net are those of tests/support/sglang_cpu.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import Sample
from pacs_megatron.models import load_spec
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang.weights.server_sync import server_sync
from pacs_megatron.training.push import push
from tests.integration.sglang.conftest import START_S, own_options, sample_requests
from tests.support.needs import require_sglang
from tests.support.tiny_families import make_family
from tests.support.tiny_models import save_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.full]

STAND_INS = Path(__file__).parents[3] / "support" / "sglang_cpu"
TRANSPORTS = ("disk", "broadcast", "ipc")
NATS = 1e-3


def make(folder: Path, seed: int) -> Path:
    """With a tokenizer, and the key from which SGLang reads the kind of each layer."""
    # On a CPU SGLang pads the MLP to multiples of 32.
    make_family(folder, "qwen3_5", seed=seed, vocab_size=397, intermediate_size=64)
    save_tokenizer(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text()) | {"full_attention_interval": 2}
    file.write_text(json.dumps(content))
    return folder


@contextmanager
def serving(
    options: SglangRollout, model: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a server of `model`, whose weights are random until a push."""
    require_sglang()
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    # Else SGLang keeps the convolution's state in bf16 (configs/mamba_utils.py:68), and log-probs
    # differ by up to 0.02 nats.
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    specs = sglang.server_specs(options, ModelOptions(path=str(model)), tmp / "servers")
    [server] = sglang.start_servers(specs, START_S)
    try:
        yield server.url
    finally:
        server.close()


def worst(sample: Sample, model: torch.nn.Module) -> float:
    """Largest difference of the sample's log-probs from those of `model`, by transformers."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, sample.prompt_len - 1 : -1]
    response = ids[sample.prompt_len :, None]
    expected = torch.log_softmax(logits.float(), -1).gather(1, response)[:, 0].numpy()
    return float(np.abs(sample.sampler_logprobs - expected).max())


def test_every_way_brings_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each push the checksums are the export's, and log-probs those of the new weights."""
    from transformers import AutoModelForCausalLM

    folders = [make(tmp_path / f"m{seed}", seed) for seed in range(2)]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in folders
    ]
    options = own_options(dtype="fp32", servers={"extra_args": ("--load-format", "dummy")})
    with serving(options, folders[0], tmp_path, monkeypatch) as url:
        verified = set()
        for number, transport in enumerate(TRANSPORTS):
            sync_options = options.sync.model_copy(
                update={"transport": transport, "verify": "full", "timeout_s": 60.0}
            )
            run = options.model_copy(update={"sync": sync_options, "servers": None, "urls": (url,)})
            sync = server_sync(run, load_spec(folders[0]), tmp_path / "run" / "weights")
            sync.set_targets(sglang.server_apis(run, (url,)))
            new = (number + 1) % 2
            with sglang.open_engine(run, ModelOptions(path=str(folders[0])), tmp_path) as engine:
                engine.begin_update()
                weights = load_file(folders[new] / "model.safetensors")
                digest = push(number + 1, weights.items(), [sync])
                engine.set_current(number + 1, digest)
                verified.add(sync.report.verified)
                samples = list(engine.stream(sample_requests(8, tag=transport, tokens=12)))
            sync.close()
            assert max(worst(sample, models[new]) for sample in samples) < NATS
            assert min(worst(sample, models[1 - new]) for sample in samples) > 0.5
        [count] = verified
        assert count > 20
