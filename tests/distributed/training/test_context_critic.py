"""The critic's initial weights are checked like the policy's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run


def test_an_altered_checkpoint_at_critic_path_is_rejected_on_all_ranks(tmp_path: Path) -> None:
    from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron

    model = make_tiny_qwen3(tmp_path / "model", vocab_size=262)
    critic = tmp_path / "critic"
    hf_to_megatron(str(model), ConversionOptions(out=critic))
    file = max((critic / "dist").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    # In the middle of the file: the numbers of a tensor, which are valid with another bit, too.
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    config = write_tiny_run(tmp_path, model)
    overrides = ("objective={name: ppo}", f"objective.critic.path={critic}")

    def on_rank(_rank: int, _world: int) -> str:
        from pacs_megatron.errors import CheckpointError
        from pacs_megatron.training.main import run_rank

        with pytest.raises(CheckpointError) as caught:
            run_rank(config, overrides)
        return str(caught.value)

    for message in run_ranks(on_rank, 2, init_process_group=False):
        assert re.search(rf"critic/dist/{file.name} was altered since it was written", message)
        assert "resume" not in message
