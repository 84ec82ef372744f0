"""The step in progress, as a checkpoint contains it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pacs_megatron.checkpoint.run_checkpoint import read_open_step
from pacs_megatron.config import load_config
from pacs_megatron.contracts import TokenBuffers, UpdateReport
from pacs_megatron.errors import CheckpointError
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.training import saving
from pacs_megatron.training.progress import Logprobs, OpenStep
from tests.support.policies.certify_runs import write_run
from tests.support.ranks import rank_of, run_ranks

SETTINGS = {"batch.updates_per_step": 3, "objective.*": ["reference"]}

SAMPLING = {"max_response_tokens": 100}
ROLLOUT = {"engine": "embedded", "sampling": SAMPLING}


def open_step(rows: list[int]) -> OpenStep:
    """After one update; the second of two mini-batches has a reference pass of samples of 2 + row
    tokens.
    """
    reference = {("reference", row): np.full(2 + row, -row, np.float32) for row in rows}
    step = OpenStep(logprobs=[Logprobs.from_rows({}), Logprobs.from_rows(reference)])
    step.add(
        UpdateReport(
            grad_norm=2.0,
            is_clipped=True,
            lr=1e-3,
            metrics={"x": 0.5, "mismatch/kl": 0.1, "x_max": 3.0},
        ),
        4,
    )
    return step


def test_every_rank_gets_what_all_replicas_saved() -> None:
    def on_rank(rank: int, world: int) -> Any:
        assert dist.group.WORLD is not None
        return open_step([1, 3] if rank == 0 else [0, 2]).to_record(
            rank_of(rank, dp=world), SETTINGS
        )

    record, nothing = run_ranks(on_rank, 2)
    assert nothing is None
    header = json.loads(json.dumps(record[0]))
    loaded = OpenStep.from_record((header, record[1]), SETTINGS)
    assert loaded.updates == 1 and loaded.sums == open_step([]).sums
    assert loaded.logprobs is not None and loaded.logprobs[0].columns == {}
    expected = open_step([0, 1, 2, 3]).logprobs
    assert expected is not None
    np.testing.assert_equal(loaded.logprobs[1].by_row(), expected[1].by_row())


def test_a_rank_of_another_layout_gets_the_columns_of_its_samples() -> None:
    saved = {
        ("reference", row): np.arange(row, row + 2 + row, dtype=np.float32) for row in range(5)
    }
    own = np.array([1, 4])
    lens = [3, 6]
    tokens = TokenBuffers(
        index=own,
        token_ids=np.zeros(9, np.int32),
        offsets=np.cumsum([0, *lens]),
        writers=np.ones(9, np.uint8),
        sampler_logprobs=np.zeros(9, np.float32),
        response_offsets=np.cumsum([0, *lens]),
    )
    columns = Logprobs.from_rows(saved).columns_of(tokens, torch.device("cpu"))
    assert columns["reference"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_settings_may_not_change_inside_a_step() -> None:
    header = {"updates": 1, "minibatches": 0, "settings": SETTINGS, "sums": {}, "extremes": {}}
    with pytest.raises(CheckpointError, match=r"batch\.updates_per_step is 2, but .* with 3: "):
        OpenStep.from_record((header, {}), {**SETTINGS, "batch.updates_per_step": 2})
    with pytest.raises(
        CheckpointError, match=r"objective\.\* is \[\], but .* with \['reference'\]: "
    ):
        OpenStep.from_record((header, {}), {**SETTINGS, "objective.*": []})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (
            "objective.* (first update)",
            {
                "objective": {
                    "name": "grpo",
                    "kl_coef": 0.1,
                    "kl_in": "reward",
                    "kl_estimator": "k1",
                }
            },
        ),
        ("admission.truncated", {"admission": {"truncated": "drop"}}),
        ("admission.drop_one_class_groups", {"admission": {"drop_one_class_groups": True}}),
        ("rollout.max_staleness", {"rollout": ROLLOUT | {"max_staleness": 1}}),
        (
            "rollout.sampling.temperature",
            {"rollout": ROLLOUT | {"sampling": SAMPLING | {"temperature": 0.7}}},
        ),
    ],
)
def test_no_key_that_selects_samples_or_log_probs_changes_inside_a_step(
    tmp_path: Path, key: str, changes: dict[str, Any]
) -> None:
    """Other samples would get the log-probs of the saved ones.

    A missing pass ends in an exception.
    """
    base = {"objective": {"name": "grpo", "kl_coef": 0.1, "kl_in": "loss"}, "rollout": ROLLOUT}

    def settings(values: dict[str, Any]) -> dict[str, Any]:
        config = load_config(write_run(tmp_path, base | values)).config
        return saving._settings(
            SimpleNamespace(
                config=config, objective=build_objective(config.objective, updates_per_step=2)
            )  # type: ignore[arg-type]
        )

    header = {"updates": 1, "minibatches": 0, "settings": settings({}), "sums": {}, "extremes": {}}
    OpenStep.from_record((header, {}), settings({}))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(key)} is .*, but"):
        OpenStep.from_record((header, {}), settings(changes))


def test_the_record_of_an_earlier_release_is_rejected_by_name(tmp_path: Path) -> None:
    assert read_open_step(tmp_path) is None
    (tmp_path / "begun.json").write_text("{}")
    with pytest.raises(CheckpointError, match="saved inside a step by an earlier release"):
        read_open_step(tmp_path)


def test_only_the_first_update_reports_the_mismatch_to_the_sampler() -> None:
    step = open_step([])
    step.add(
        UpdateReport(
            grad_norm=4.0,
            is_clipped=False,
            lr=1e-3,
            metrics={"x": 0.5, "mismatch/kl": 9.0, "x_max": 1.0},
        ),
        4,
    )
    assert step.sums.values() == {
        "x": 0.5,
        "mismatch/kl": 0.1,
        "x_max": 3.0,
        "optimizer/grad_norm": 3.0,
        "optimizer/clipped_frac": 0.5,
        "optimizer/lr": 1e-3,
    }


def test_every_metric_keeps_its_denominator_over_several_updates() -> None:
    step = OpenStep()
    for positives, psi in ((6.0, 0.1), (2.0, 0.5)):
        report = UpdateReport(
            grad_norm=1.0,
            is_clipped=False,
            lr=1e-3,
            metrics={"pacs/psi_mean_pos": psi, "pacs/truncated_frac": psi},
            denominators={"pacs/psi_mean_pos": positives},
        )
        step.add(report, 8)
    values = step.sums.values()
    assert values["pacs/psi_mean_pos"] == pytest.approx(
        (6 * 0.1 + 2 * 0.5) / 8
    )  # of the correct samples
    assert values["pacs/truncated_frac"] == pytest.approx(0.3)  # of all samples
