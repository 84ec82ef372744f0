"""A checkpoint of one Megatron-Core in another: the same norms and weights afterwards?

    .venv/bin/python benchmarks/megatron_versions.py write FOLDER
    .venv-other/bin/python benchmarks/megatron_versions.py read FOLDER

`.venv` has Python 3.11 here, and `.venv-other` 3.12. `write` (0.16.1): three updates, a save, two
more updates. `read` (0.19.2) loads the checkpoint and repeats the last two. Exit code 1 if a bit of
a norm or of a weight differs. Run it from the root of the repository with PYTHONPATH=.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family

STEPS = [random_step(seed, vocab=90) for seed in range(5)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-sp-distopt-fp32": (
        "qwen3",
        {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    ),
    "pp2-bf16": ("qwen3", {"pp": 2, "dtype": "bf16"}),
    "dp2-distopt-bf16": ("qwen3", {"distributed_optimizer": True, "dtype": "bf16"}),
    "moe-ep2-distopt-fp32": ("qwen3_moe", {"ep": 2, "distributed_optimizer": True}),
}


def run(case: str, folder: Path, *, writes: bool) -> list[Any]:
    """Norms of the last two updates, and a digest of all weights."""
    family, options = CASES[case]
    model = folder / family
    target = folder / case
    if not model.exists():
        make_family(model, family)

    def on_rank(rank: int, world: int) -> list[Any]:
        from pacs_megatron.checkpoint.dist_files import load_sharded, prepare_sharded
        from pacs_megatron.objectives.pacs import PacsOptions
        from pacs_megatron.objectives.registry import build_objective
        from pacs_megatron.policy import state

        policy = make_policy(model, world, **options)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        if writes:
            train(policy, objective, STEPS[:3])
            if rank == 0:
                target.mkdir()
            dist.barrier()
            sharded = state.sharded_state(policy, is_loading=False, with_reference=False)
            prepare_sharded(sharded, target).write(target)
        else:
            sharded = state.sharded_state(policy, is_loading=True, with_reference=False)
            state.load_sharded_state(policy, load_sharded(sharded, target))

        reports = train(policy, objective, STEPS[3:])
        norms = [repr(report.grad_norm) for report in reports]
        digest = hashlib.sha256()
        for _, tensor in policy.export_weights():
            digest.update(tensor.float().numpy().tobytes())
        return [*norms, digest.hexdigest()]

    return run_ranks(on_rank, 2)[0]


def main() -> int:
    writes = sys.argv[1] == "write"
    folder = Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    print(
        f"{sys.argv[1]}: megatron-core {version('megatron-core')}, torch {torch.__version__}, "
        f"Python {sys.version[:6]}"
    )
    is_different = False
    for case in CASES:
        result = run(case, folder, writes=writes)
        first_norm, second_norm, digest = result
        file = folder / f"{case}.json"
        verdict = ""
        if writes:
            file.write_text(json.dumps(result))
        elif json.loads(file.read_text()) == result:
            verdict = "same"
        else:
            verdict = "DIFFERENT"
            is_different = True
        print(f"{case:<22} {first_norm} {second_norm} {digest[:16]} {verdict}")
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
