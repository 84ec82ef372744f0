"""The teacher of `distill` is loaded beside the policy; one that does not fit is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run


def run_of(folder: Path, *overrides: str) -> list[Any]:
    """The errors of two ranks, or None each, of a run of two steps with the teacher in `folder`."""
    config = write_tiny_run(folder, folder / "model")
    teacher = "objective={name: distill, teacher: " + str(folder / "teacher") + "}"

    def on_rank(_rank: int, _world: int) -> str | None:
        from pacs_megatron.errors import PacsError
        from pacs_megatron.training.main import run_rank

        try:
            run_rank(config, (teacher, "run.steps=2", *overrides))
        except PacsError as error:
            return str(error)
        return None

    return run_ranks(on_rank, 2, init_process_group=False)


@pytest.mark.full
def test_the_first_update_compares_with_the_teacher(tmp_path: Path) -> None:
    from pacs_megatron.observability.metrics import read_metrics

    make_tiny_qwen3(tmp_path / "model")
    make_tiny_qwen3(tmp_path / "teacher", seed=1)
    assert run_of(tmp_path) == [None, None]
    [folder] = (tmp_path / "runs").iterdir()
    first = next(row for row in read_metrics(folder) if "distill/kl" in row)
    assert first["distill/kl"] > 0.01


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "has another architecture than model.path="),
        ({"num_tokens": 3}, "has another vocabulary than model.path: 3 tokens differ"),
    ],
)
def test_a_teacher_that_does_not_fit_is_rejected_on_all_ranks(
    tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    from tests.support.tiny_models import save_tokenizer

    make_tiny_qwen3(tmp_path / "model")
    changes = dict(changes)
    num_tokens = changes.pop("num_tokens", 0)
    make_tiny_qwen3(tmp_path / "teacher", **changes)
    if num_tokens:
        tokenizer = save_tokenizer(tmp_path / "teacher")
        tokenizer.add_tokens([f"<more {number}>" for number in range(num_tokens)])
        tokenizer.save_pretrained(tmp_path / "teacher")
    for message in run_of(tmp_path):
        assert message.startswith("objective.teacher=") and words in message
    assert not list((tmp_path / "runs").glob("*"))
