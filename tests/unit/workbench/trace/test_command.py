"""`plan --trace` names what it cannot trace, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.errors import ConfigError
from pacs_megatron.workbench.plan.command import run_plan
from pacs_megatron.workbench.trace import command

RUNS = Path(__file__).parents[4] / "configs" / "runs"
DENSE = RUNS / "pacs-qwen3-14b-2n8g-tp4.yaml"


@pytest.mark.parametrize(
    ("config", "overrides", "local_layers", "says"),
    [
        (DENSE, [], False, "--local-layers"),
        (RUNS / "quickstart.yaml", [], True, "has no GPUs"),
        (RUNS / "pacs-qwen3-14b-2n8g-tp4-fp8.yaml", [], True, "precision.fp8=null"),
    ],
)
def test_what_cannot_be_traced(
    config: Path,
    overrides: list[str],
    local_layers: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match=says):
        run_plan(config, overrides, trace=True, local_layers=local_layers)


@pytest.mark.parametrize(
    ("search", "compare"), [(True, False), (False, True)], ids=["search", "compare"]
)
def test_one_layout_at_a_time(search: bool, compare: bool) -> None:
    with pytest.raises(ConfigError, match="remove --search and --compare"):
        run_plan(DENSE, [], trace=True, search=search, compare=compare)


def test_local_layers_belong_to_the_trace() -> None:
    with pytest.raises(ConfigError, match="add --trace"):
        run_plan(DENSE, [], local_layers=True)
