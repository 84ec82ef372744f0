"""The whole loop, in this process's forks, over layouts and objectives that the other tests do not
combine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from tests.support.metrics import reproducible_bytes
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=262)


def run(folder: Path, model: Path, world: int, *overrides: str) -> Path:
    """Runs the tiny configuration and returns its folder."""
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)

    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        return int(run_rank(config, overrides))

    assert run_ranks(on_rank, world, init_process_group=False) == [ExitCode.OK] * world
    return folder / "runs" / "tiny"


VARIANTS = {
    "pp2": (2, ("parallel.tp=1", "parallel.pp=2")),
    "tp2-dp2": (4, ("parallel.tp=2", "parallel.distributed_optimizer=true")),
    "grpo-kl": (
        2,
        (
            "objective={name: grpo, kl_coef: 0.1, reset_every: 1, clip_high: 0.28}",
            "batch.updates_per_step=2",
        ),
    ),
    "frozen-dynamic": (
        1,
        (
            "parallel.tp=1",
            "objective.reference=frozen",
            "objective.weighting=none",
            "admission.drop_one_class_groups=true",
        ),
    ),
    "mean-log-prob": (
        1,
        (
            "parallel.tp=1",
            "objective={name: pacs, reward_proxy: mean_log_prob, score: grpo, score_std_floor: "
            "0.01}",
        ),
    ),
    "filtered-sampling": (
        2,
        (
            "rollout.sampling.top_p=0.9",
            "rollout.sampling.top_k=40",
            "rollout.sampling.temperature=0.8",
        ),
    ),
}


@pytest.mark.parametrize("variant", in_test(VARIANTS, "tp2-dp2", "grpo-kl", "filtered-sampling"))
def test_variant_runs_and_writes_finite_metrics(tmp_path: Path, model: Path, variant: str) -> None:
    world, overrides = VARIANTS[variant]
    run_dir = run(tmp_path, model, world, *overrides)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    assert (run_dir / "hf" / "model.safetensors").is_file()
    assert all(row["admission/num_samples"] for row in rows) or variant == "frozen-dynamic"


@pytest.mark.parametrize("objective", in_test(["pacs", "grpo"], "pacs"))
def test_a_step_without_an_admitted_group_changes_nothing_and_goes_on(
    tmp_path: Path, model: Path, objective: str
) -> None:
    everything_cut = (
        "rollout.sampling.max_response_tokens=1",
        "rollout.sampling.stop=[]",
        "admission.truncated=drop",
    )
    run_dir = run(tmp_path, model, 2, f"objective={{name: {objective}}}", *everything_cut)
    rows = read_metrics(run_dir)
    assert [row["admission/num_groups"] for row in rows] == [0.0, 0.0]
    assert all("optimizer/grad_norm" not in row for row in rows)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run_dir / "hf"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_results_do_not_depend_on_the_data_parallel_size(tmp_path: Path, model: Path) -> None:
    """Sampling is bit-identical on any number of ranks as long as the weights are: compare the
    first step.
    """
    one = run(tmp_path / "one", model, 1, "parallel.tp=1", "run.steps=1")
    two = run(tmp_path / "two", model, 2, "parallel.tp=1", "run.steps=1")
    names = [path.name for path in sorted((one / "rollouts").iterdir())]
    assert names and names == [path.name for path in sorted((two / "rollouts").iterdir())]
    for name in names:
        assert (one / "rollouts" / name).read_bytes() == (two / "rollouts" / name).read_bytes()
    again = run(tmp_path / "again", model, 2, "parallel.tp=1", "run.steps=1")
    assert reproducible_bytes(again) == reproducible_bytes(two)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("objective.reference=step_start", "objective.reference=frozen"),
        ("objective={name: grpo}", "objective={name: grpo, kl_coef: 1.0e-9}"),
    ],
)
def test_a_reference_that_a_resume_adds_is_the_policy_of_the_checkpoint(
    tmp_path: Path, model: Path, first: str, later: str
) -> None:
    """In the step after the checkpoint it is the policy at the step's start, so nothing else
    changes.
    """
    one = "parallel.tp=1"
    whole = run(tmp_path / "whole", model, 1, one, first)
    run(tmp_path / "changed", model, 1, one, first, "run.steps=1")
    changed = run(tmp_path / "changed", model, 1, one, later)
    weights, expected = (
        load_file(folder / "hf" / "model.safetensors") for folder in (changed, whole)
    )
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=2e-6, rtol=0, msg=name)


def test_a_filter_changes_no_log_prob(tmp_path: Path, model: Path) -> None:
    """Sampler and trainer have the same weights: their log-probs agree, though top_k excludes most
    tokens.
    """
    run_dir = run(tmp_path, model, 1, "parallel.tp=1", "rollout.sampling.top_k=3")
    for row in read_metrics(run_dir):
        assert row["mismatch/logprob_abs_max"] < 1e-3 and abs(row["mismatch/ratio"] - 1) < 1e-4


def test_mismatch_is_reported_and_the_breaker_saves_and_stops(tmp_path: Path, model: Path) -> None:
    run_dir = run(
        tmp_path / "healthy", model, 2, "mismatch.max_abs_mean=1e-3", "mismatch.threshold=1e-3"
    )
    for row in read_metrics(run_dir):
        assert row["mismatch/logprob_abs_mean"] < 1e-4 and row["mismatch/over_frac"] == 0.0
        assert row["mismatch/logprob_abs_max"] < 1e-3 and abs(row["mismatch/ratio"] - 1) < 1e-4
        assert 0 <= row["mismatch/kl"] < 1e-6
    config = write_tiny_run(tmp_path, model)
    overrides = ("mismatch.max_abs_mean=1e-3", "rollout.dtype=bf16")

    def on_rank(_rank: int, _world: int) -> str:
        from pacs_megatron.errors import RolloutError
        from pacs_megatron.training.main import run_rank

        with pytest.raises(RolloutError, match=r"mismatch\.max_abs_mean=0\.001; saved") as caught:
            run_rank(config, overrides)
        return str(caught.value)

    messages = run_ranks(on_rank, 2, init_process_group=False)
    assert messages[0] == messages[1]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000001" / "manifest.json").is_file()


@pytest.mark.full
def test_a_converted_checkpoint_trains_like_its_source(tmp_path: Path, model: Path) -> None:
    from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron

    converted = tmp_path / "converted"
    hf_to_megatron(str(model), ConversionOptions(out=converted))
    expected = run(tmp_path / "hf", model, 2)
    got = run(tmp_path / "megatron", converted, 2)
    assert reproducible_bytes(got) == reproducible_bytes(expected)


@pytest.mark.full
def test_score_noise_is_measured_when_due_and_changes_no_other_number(
    tmp_path: Path, model: Path
) -> None:
    plain = run(tmp_path / "plain", model, 2, "batch.updates_per_step=2")
    measured = run(
        tmp_path / "measured", model, 2, "batch.updates_per_step=2", "mismatch.score_noise_every=2"
    )
    added = {
        "pacs/score_noise",
        "pacs/score_noise_bias",
        "pacs/score_noise_exponent",
        "pacs/score_snr",
    }
    rows = read_metrics(measured)
    for row, other in zip(rows, read_metrics(plain), strict=True):
        if row["step"] == 2:
            assert (
                added <= row.keys() and 0 < row["pacs/score_noise"] < 1e-3 < row["pacs/score_snr"]
            )
        else:
            assert not added & row.keys()
        same = {
            key: value
            for key, value in row.items()
            if key not in added and not key.startswith("time/")
        }
        assert {key: other[key] for key in same if key != "tokens_per_s"} == {
            key: value for key, value in same.items() if key != "tokens_per_s"
        }
    assert rows[-1]["step"] >= 2
    assert (plain / "hf/model.safetensors").read_bytes() == (
        measured / "hf/model.safetensors"
    ).read_bytes()


def test_each_microbatch_is_progress_for_the_watchdog(tmp_path: Path, model: Path) -> None:
    """An update of minutes is no hang."""
    config = write_tiny_run(tmp_path, model)

    def on_rank(_rank: int, _world: int) -> tuple[int, list[str]]:
        from pacs_megatron.training import loop
        from pacs_megatron.training.main import run_rank

        hooks: list[str] = []
        real = loop.train

        def look(run: Any) -> Any:
            for policy in run.models:
                hooks.extend(one.on_microbatch.__qualname__ for one in policy.models)
            return real(run)

        # This process ends with the test.
        loop.train = look
        return int(run_rank(config, ("parallel.tp=1",))), hooks

    [(code, hooks)] = run_ranks(on_rank, 1, init_process_group=False)
    assert code == ExitCode.OK
    assert hooks == ["Watchdog.alive"]
