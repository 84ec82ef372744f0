"""A run of a model with a vision tower beside its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from tests.support.needs import needs_delta_nets
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_with_vision
from tests.support.tiny_models import save_tokenizer
from tests.support.tiny_run import write_tiny_run


@pytest.mark.full
@needs_delta_nets
def test_a_run_keeps_the_vision_tower_beside_its_model(tmp_path: Path) -> None:
    """A checkpoint of the run has it, and so has the export of an attempt that resumes there."""
    folder = make_with_vision(tmp_path / "model", "qwen3_5_moe", vocab_size=262, all_experts=True)
    save_tokenizer(folder)
    layout = ("parallel.tp=1", "parallel.ep=2")
    config = write_tiny_run(tmp_path, folder)

    def attempt(*overrides: str) -> None:
        def on_rank(_rank: int, _world: int) -> int:
            from pacs_megatron.training.main import run_rank

            return int(run_rank(config, (*layout, *overrides)))

        assert run_ranks(on_rank, 2, init_process_group=False) == [ExitCode.OK] * 2

    attempt("run.steps=1")
    attempt()
    run_dir = tmp_path / "runs" / "tiny"
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2]

    before = load_file(folder / "model.safetensors")
    others = {name: before[name] for name in before if "visual" in name or "mtp" in name}
    stored = load_file(run_dir / "checkpoints" / "step_000001" / "hf" / "beside.safetensors")
    after = load_file(run_dir / "hf" / "model.safetensors")
    for found in (stored, {name: after[name] for name in others}):
        assert found.keys() == others.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in others.items())
    log = next((run_dir / "logs").glob("*rank*0*")).read_text()
    assert f"{len(others)} tensors of a vision tower or MTP layers" in log
    router = "model.language_model.layers.0.mlp.gate.weight"
    assert not torch.equal(after[router], before[router])
