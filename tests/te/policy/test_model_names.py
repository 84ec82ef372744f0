"""Parameter names, shapes and checkpoint keys of real Transformer Engine modules against the weight
table.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family
from tests.te.fp8_cases import RECIPES, fp8_options

FAMILIES = ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"]
PAIRWISE = {
    ("qwen2", None),
    ("qwen3", "blockwise"),
    ("qwen3_moe", "tensorwise"),
    ("llama", "delayed"),
    ("mistral", None),
}


def _case(family: str, recipe: str | None) -> Any:
    marks = [] if (family, recipe) in PAIRWISE else [pytest.mark.campaign]
    return pytest.param(family, recipe, marks=marks, id=f"{family}-{recipe or 'bf16'}")


@pytest.mark.parametrize(
    ("family", "recipe"), [_case(*pair) for pair in itertools.product(FAMILIES, RECIPES)]
)
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_names_shapes_and_checkpoint_keys(
    family: str, recipe: str | None, distributed_optimizer: bool, tmp_path: Path
) -> None:
    folder = make_family(tmp_path / family, family)

    def on_rank(_rank: int, world: int) -> tuple[set[str], set[str], list[str]]:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        from pacs_megatron.policy import state, weights
        from tests.support.policies.policy_cases import make_policy

        policy = make_policy(
            folder,
            world,
            dtype="bf16",
            distributed_optimizer=distributed_optimizer,
            **fp8_options(recipe),
        )
        model = policy.models[0]
        found = weights.named_parameters(model, policy.table)
        table = policy.table.by_megatron
        wrong = [
            name for name, p in found.items() if tuple(p.shape) != tuple(table[name].megatron_shape)
        ]
        sharded = model.sharded_state_dict(metadata=state.sharding_metadata())
        keys = {entry.key for entry in sharded.values() if not isinstance(entry, ShardedObject)}
        saved: set[str] = set()
        for entry in policy.table.entries:
            saved |= entry.checkpoint_shapes.keys()
        return (
            set(table) ^ set(found),
            keys ^ saved,
            wrong,
        )

    (names, keys, wrong) = run_ranks(on_rank, 1)[0]
    assert not names and not keys and not wrong
