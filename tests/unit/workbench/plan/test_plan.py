"""`plan` against independent counts, and every shipped configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.contracts import Layout
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.models import load_spec
from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.runtime.files import GIB
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import (
    activations,
    command,
    constants,
    memory,
    state,
    timing,
)
from pacs_megatron.workbench.plan.known_models import KNOWN_MODELS, find_spec
from pacs_megatron.workbench.plan.lengths import assumed_lengths
from pacs_megatron.workbench.plan.plan import make_plan, plan_of
from pacs_megatron.workbench.plan.search import search_layouts
from pacs_megatron.workbench.plan.state import num_parameters

ROOT = Path(__file__).parents[4]
RUNS = sorted((ROOT / "configs" / "runs").glob("*.yaml"))
GPU_RUNS = [path for path in RUNS if load_config(path).config.resources.gpus_per_node]
ADAPTER_RUNS = [path for path in GPU_RUNS if path.stem.endswith("-lora")]
CLUSTER_RUNS = [path for path in GPU_RUNS if path not in ADAPTER_RUNS]
BIG = ROOT / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml"
AHEAD = ROOT / "configs" / "runs" / "grpo-qwen3-14b-7n8g-tp2-ahead.yaml"


def run_plan(path: Path, overrides: list[str], **options: bool) -> tuple[str, bool]:
    """(text, whether the run fits)"""
    text, code = command.run_plan(path, overrides, **options)
    return text, code == ExitCode.OK


def test_published_parameter_counts() -> None:
    # As printed on the models' pages or counted from their index files, independently of our table.
    published = {
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "Qwen/Qwen3-14B": 14_768_307_200,
        "Qwen/Qwen3-32B": 32_762_123_264,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen2.5-72B": 72_706_203_648,
    }
    for name, count in published.items():
        spec = find_spec(name)
        assert spec is not None
        assert num_parameters(spec) == count
    assert set(published) <= set(KNOWN_MODELS)


def test_the_quickstart_can_be_planned_before_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.quickstart import hybrid
    from examples.quickstart.model import build_config, build_tokenizer

    monkeypatch.chdir(tmp_path)  # nothing is made here
    build_config(build_tokenizer()).save_pretrained(tmp_path / "made")
    hybrid.build_config(build_tokenizer()).save_pretrained(tmp_path / "hybrid")
    for path in sorted(set(RUNS) - set(GPU_RUNS)):
        made = load_spec(tmp_path / ("hybrid" if "hybrid" in path.stem else "made"))
        assert find_spec(load_config(path).config.model.path) == made
        text, fits = run_plan(path, [])
        assert fits
        assert "exact" in text
        assert "of one process]" not in text and "NCCL" not in text, "it runs on the CPU"


def test_known_names() -> None:
    assert find_spec("models/Qwen/Qwen3-14B") == find_spec("Qwen/Qwen3-14B") is not None
    assert find_spec("someone/else") is None


@pytest.mark.parametrize("path", CLUSTER_RUNS, ids=lambda path: path.stem)
def test_shipped_configs_plan_and_fit(path: Path) -> None:
    loaded = load_config(path)
    plan = make_plan(loaded)
    assert plan.fits
    assert plan.gpu is GPUS["h200"]
    assert plan.peak.total > 0.6 * plan.gpu.memory_bytes  # else the layout wastes GPUs
    resources = loaded.config.resources
    parallel = loaded.config.parallel
    objective, rest = path.stem.split("-", 1)
    assert loaded.config.objective.name == objective
    assert loaded.config.run.name == path.stem
    assert loaded.config.model.path.split("/")[-1].lower() in rest
    assert f"{resources.nodes + resources.rollout_nodes}n{resources.gpus_per_node}g" in rest
    layout = f"ep{parallel.ep}" if parallel.ep > 1 else f"tp{parallel.tp}"
    assert layout in rest or rest.endswith("-tools")
    assert path.stem.endswith("-fp8") == (loaded.config.precision.fp8 is not None)


@pytest.mark.parametrize("path", ADAPTER_RUNS, ids=lambda path: path.stem)
def test_shipped_runs_of_adapters_fit_an_h100_where_full_training_does_not(path: Path) -> None:
    loaded = load_config(path)
    config = loaded.config
    plan = make_plan(loaded)
    assert plan.fits
    assert plan.gpu is GPUS["h100"]
    assert plan.host_bytes_per_rank < 64 * GIB
    assert config.run.name == path.stem
    assert config.model.path.split("/")[-1].lower() in path.stem
    assert f"1n{config.resources.gpus_per_node}g" in path.stem
    assert config.policy.offload == "all"
    whole = config.policy.model_copy(update={"lora": None})
    whole_plan = plan_of(config.model_copy(update={"policy": whole}), plan.spec)
    assert not whole_plan.fits
    assert whole_plan.checkpoint_bytes > 50 * plan.checkpoint_bytes


@pytest.mark.parametrize("path", CLUSTER_RUNS, ids=lambda path: path.stem)
def test_shipped_layouts_are_the_smallest_that_fit(path: Path) -> None:
    """Without recomputation, and with the file's token budget, which leaves no score pass."""
    plan = make_plan(load_config(path))
    config = plan.config
    assert config.parallel.recompute.granularity == "none"
    assert plan.layout.cp == 1
    passes = timing.num_forward_passes(config, groups_together=True)
    is_together = timing.keeps_groups_together(config, plan.lengths)
    assert timing.num_forward_passes(config, groups_together=is_together) == passes

    for axis in ("tp", "pp"):
        size = getattr(config.parallel, axis)
        if size == 1:
            continue
        has_sequences = axis != "tp" or size > 2
        smaller = [
            f"parallel.{axis}={size // 2}",
            f"parallel.sequence_parallel={str(has_sequences).lower()}",
        ]
        assert not make_plan(load_config(path, smaller)).fits


@pytest.mark.parametrize("path", CLUSTER_RUNS, ids=lambda path: path.stem)
def test_servers_have_most_of_the_memory_and_neither_side_waits(path: Path) -> None:
    """Colocated: the trainer's state is in host memory while servers sample. Ahead of training: the
    rollout and the trainer's phases take nearly equally long.
    """
    plan = make_plan(load_config(path))
    servers = plan.config.rollout.managed_servers
    assert servers is not None and servers.mem_fraction is not None
    assert servers.mem_fraction >= 0.85
    if servers.colocated:
        assert plan.config.policy.offload == "all"
        num_gpus = plan.config.resources.nodes * plan.config.resources.gpus_per_node
        assert servers.count * servers.tp == num_gpus
        assert plan.idle == {"trainer": 0.0, "servers": 0.0}
        return
    assert plan.is_ahead
    assert max(plan.idle.values()) <= 0.1


@pytest.mark.parametrize("path", CLUSTER_RUNS, ids=lambda path: path.stem)
def test_the_h100_include_fits_every_shipped_config(path: Path, tmp_path: Path) -> None:
    """And `h100-groups` leaves no score pass of PACS."""
    kinds = ("h100", "h100-groups") if path.stem.startswith("pacs") else ("h100",)
    for kind in kinds:
        both = tmp_path / "both.yaml"
        both.write_text(f"include: [{path}, {ROOT / 'configs' / 'gpus' / kind}.yaml]\n")
        plan = make_plan(load_config(both))
        assert plan.gpu is GPUS["h100"]
        assert plan.fits
        assert plan.step_s > make_plan(load_config(path)).step_s
    assert kind == "h100" or timing.keeps_groups_together(plan.config, plan.lengths)


PACS_RUNS = [path for path in CLUSTER_RUNS if path.stem.startswith("pacs")]


@pytest.mark.parametrize("path", PACS_RUNS, ids=lambda path: path.stem)
def test_plan_prints_that_groups_are_whole(path: Path) -> None:
    text, fits = run_plan(path, [])
    assert fits and "keeps most of them whole, without a score pass" in text


def test_the_search_finds_a_token_budget_for_whole_groups() -> None:
    """It is the largest that fits: 1,024 tokens more do not, or it holds the longest group."""
    plan = make_plan(load_config(BIG, ["batch.tokens_per_microbatch=9216"]))
    found = search_layouts(plan)
    assert (
        found[0].fits
        and found[0].config.batch.tokens_per_microbatch
        >= timing.group_tokens(plan.config, plan.lengths)[0]
    )
    for each in found:
        budget = each.config.batch.tokens_per_microbatch
        if budget > plan.config.batch.tokens_per_microbatch:
            batch = each.config.batch.model_copy(update={"tokens_per_microbatch": budget + 1024})
            more = plan_of(each.config.model_copy(update={"batch": batch}), plan.spec)
            assert each.fits and (not more.fits or budget == 8 * 9216)
    grpo = make_plan(load_config(BIG.with_name("grpo-qwen3-14b-2n8g-tp2.yaml")))
    assert {each.config.batch.tokens_per_microbatch for each in search_layouts(grpo)} == {9216}


def compared(path: Path) -> list[dict[str, str]]:
    """Rows of `plan --compare`, by title; all of them are of other GPUs, recomputation or
    off-loading.
    """
    text, _ = run_plan(path, [], compare=True)
    lines = [
        line.replace(" GiB", "").replace(" s:", "").split()
        for line in text.splitlines()[2:]
        if line[:2] == "  "
    ]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[1:]]


QUICK = ("pacs-qwen3-8b-1n8g-tp2", "pacs-qwen3-14b-2n8g-tp4")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else (pytest.mark.full,))
        for path in CLUSTER_RUNS
    ],
)
def test_compare_prints_h100_and_h200_side_by_side(path: Path) -> None:
    """For each shipped file: its own row is what `plan` prints for it."""
    rows = compared(path)
    is_colocated = load_config(path).config.rollout.on_trainer_gpus
    offloads = ("none", "all") if is_colocated else ("none",)
    wanted = product(("h100", "h200"), ("none", "full"), offloads)
    assert [(row["gpu"], row["recompute"], row["offload"]) for row in rows] == list(wanted)
    plan = make_plan(load_config(path))
    config = plan.config
    own = (config.resources.gpu, config.parallel.recompute.granularity, config.policy.offload)
    [mine] = [row for row in rows if (row["gpu"], row["recompute"], row["offload"]) == own]
    assert plan.rollout is not None
    assert mine["train"] == f"{max(stage.total for stage in plan.stages) / GIB:.1f}"
    assert mine["servers"] == f"{plan.rollout.total / GIB:.1f}"
    assert mine["step"] == f"{plan.step_s:.1f}" and mine["fits"] == (
        "yes" if plan.fits else "maybe"
    )
    assert float(mine["sync"]) == pytest.approx(
        next(phase.seconds for phase in plan.phases if "sync" in phase.name), abs=0.06
    )
    by = {(row["gpu"], row["recompute"], row["offload"]): row for row in rows}
    for gpu in ("h100", "h200"):
        steps_s = [float(by[gpu, kind, "none"]["step"]) for kind in ("none", "full")]
        # Ahead of training, the servers may take longer than either.
        assert steps_s[0] < steps_s[1] or (plan.is_ahead and steps_s[0] == steps_s[1])
        assert float(by[gpu, "none", "none"]["train"]) > float(by[gpu, "full", "none"]["train"])
        if is_colocated:  # off-loading makes memory for the servers
            assert float(by[gpu, "none", "all"]["servers"]) < float(
                by[gpu, "none", "none"]["servers"]
            )
    assert float(by["h200", "none", "none"]["servers"]) > float(
        by["h100", "none", "none"]["servers"]
    )


def test_every_model_has_both_objectives_and_precisions() -> None:
    names = {path.stem for path in CLUSTER_RUNS}
    for model in ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen2.5-7b"):
        mine = {name for name in names if f"-{model}-" in name}
        assert {name.split("-")[0] for name in mine} == {"pacs", "grpo"}
        assert {name.endswith("-fp8") for name in mine} == {True, False}


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; from pacs_megatron.cli import main; c = main(sys.argv[1:]); print('torch' in "
        "sys.modules); sys.exit(c)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(BIG)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert "FITS: " in done.stdout


def test_a_plan_that_does_not_fit_names_what_to_change() -> None:
    text, fits = run_plan(
        BIG,
        [
            "parallel.tp=1",
            "parallel.sequence_parallel=false",
            "parallel.distributed_optimizer=false",
        ],
    )
    assert not fits
    assert "DOES NOT FIT" in text
    assert "change parallel.distributed_optimizer=true" in text


@pytest.mark.parametrize(
    ("config", "overrides", "advice"),
    [
        (
            "pacs-qwen3-14b-2n8g-tp4",
            ["parallel.recompute.granularity=none", "batch.tokens_per_microbatch=60000"],
            "parallel.recompute.granularity=full",
        ),
        (
            "pacs-qwen3-4b-1n8g-tp2",
            ["rollout.servers.mem_fraction=0.99"],
            "rollout.servers.mem_fraction (lower)",
        ),
        (
            "pacs-qwen3-32b-4n8g-tp8",
            ["rollout.servers.tp=1", "rollout.servers.mem_fraction=0.4"],
            "rollout.servers.mem_fraction (at least 0.46) or rollout.servers.tp (higher): beside "
            "the weights, 0 of",
        ),
        (
            "pacs-qwen3-14b-2n8g-tp4",
            ["parallel.sequence_parallel=false", "batch.tokens_per_microbatch=200000"],
            "parallel.sequence_parallel=true",
        ),
    ],
)
def test_advice_fits_what_is_too_large(config: str, overrides: list[str], advice: str) -> None:
    text, fits = run_plan(ROOT / "configs" / "runs" / f"{config}.yaml", overrides)
    assert not fits
    assert f"change {advice}" in text


def test_search_without_a_layout_that_fits() -> None:
    huge = ["batch.tokens_per_microbatch=4000000"]
    text, fits = run_plan(BIG, huge, search=True)
    assert not fits and "no layout fits with the highest assumptions: raise" in text


def test_a_run_that_fits_only_with_average_assumptions() -> None:
    """30B-A3B: 111 GiB of an H200's 140, and more if one rank's experts have twice the mean
    load.
    """
    path = ROOT / "configs" / "runs" / "pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
    larger = ["batch.tokens_per_microbatch=43008"]
    plan = make_plan(load_config(path, larger))
    assert plan.may_fit and not plan.fits
    text, is_planned = run_plan(path, larger)
    assert is_planned
    assert "\nMAY NOT FIT: " in text and f"but {plan.highest_bytes / GIB:5.1f} GiB" in text

    found = search_layouts(plan)
    assert plan.gpu is not None
    assert found[0].fits and found[0].highest_bytes <= plan.gpu.memory_bytes
    kinds = [(each.fits, each.may_fit) for each in found]
    assert kinds == sorted(kinds, reverse=True)


def test_the_imbalance_of_experts_is_in_the_range() -> None:
    """Twice and 1.05 times the mean load instead of 1.3, by hand for a peak in the last layer.

    Of each of 8 copies of a token: its input (2048), and three halves of the MLP (768), in bf16;
    three copies more while they are exchanged and sorted.
    """
    plan = make_plan(
        load_config(
            ROOT / "configs" / "runs" / "grpo-qwen3-30b-a3b-4n8g-ep8.yaml",
            ["parallel.recompute.granularity=full", "batch.tokens_per_microbatch=30720"],
        )
    )
    [item] = [each for each in plan.stages[0].items if each.name.startswith("working tensors")]
    copies = 8 * (4 * 2048 + 3 * 768) * 2 * 30720
    assert item.num_bytes * (item.span[1] - 1) == pytest.approx(0.7 * copies)
    assert item.num_bytes * (1 - item.span[0]) == pytest.approx(0.25 * copies)


def test_the_range_contains_the_other_moment() -> None:
    """Without recomputation the peak is in the output layer, and with most imbalance in a layer."""
    plan = make_plan(
        load_config(
            ROOT / "configs" / "runs" / "grpo-qwen3-30b-a3b-4n8g-ep8.yaml",
            ["resources.gpu=h100", "batch.tokens_per_microbatch=16384"],
        )
    )
    config = plan.config
    items = activations.activation_items(config, plan.spec, plan.layout, 0)
    assert any(item.name.startswith("output layer") for item in items)

    high = activations.activation_items(config, plan.spec, plan.layout, 0, imbalance=2.0)
    assert any(item.name.startswith("working tensors") for item in high)
    highest = sum(item.num_bytes * item.span[1] for item in items)
    assert highest == pytest.approx(sum(item.num_bytes for item in high))


def test_the_pipeline_bubble_uses_the_given_lengths() -> None:
    one_replica = ["parallel.pp=2", "resources.nodes=1", "rollout.servers.count=8"]
    loaded = load_config(BIG, [*one_replica, "batch.tokens_per_microbatch=9216"])
    plan = make_plan(loaded)
    for response in (500, 8000):
        lengths = replace(plan.lengths, response=response)
        tokens = 1024 * 8 / 4 * lengths.total  # of one update, on one replica
        assert timing.bubble(loaded.config, plan.layout, lengths) == pytest.approx(
            1 / round(tokens / 9216)
        )


@pytest.mark.parametrize(("budget", "is_tight"), [(36864, True), (9216, False)])
def test_a_plan_prints_a_range_that_does_not_fit(budget: int, is_tight: bool) -> None:
    run = ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"
    text, fits = run_plan(run, [f"batch.tokens_per_microbatch={budget}"])
    assert (
        fits
        and ("but 145.5 GiB with the highest assumptions, which does not fit" in text) == is_tight
    )


def test_a_colocated_server_leaves_something_behind() -> None:
    loaded = load_config(ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml")
    items = {item.name: item.num_bytes for item in make_plan(loaded).stages[0].items}
    assert items["SGLang server that released its memory"] == constants.SGLANG_RELEASED_BYTES.value
    assert not [
        item for item in make_plan(load_config(AHEAD)).stages[0].items if "released" in item.name
    ]


def test_the_critic_counts_in_a_save() -> None:
    """Qwen3-8B at tp=2 and dp=4, as below: a second model of the same size without its output
    matrix, and no reference.
    """
    path = ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"
    ppo = ["objective.name=ppo", "mismatch.score_noise_every=null", "mismatch.max_score_noise=null"]
    alone, both = (
        make_plan(load_config(path, ["policy.offload=none", *options])).host_bytes_per_rank
        for options in ([], ppo)
    )
    assert both - alone == pytest.approx(14 / 4 * (4.0956e9 - 151936 * 4096 / 2), rel=2e-3)


def test_offloaded_state_by_hand() -> None:
    """Qwen3-8B at tp=2 and dp=4:

    4,095,552,512 parameters a rank (8,190,735,360 in all, norms on both ranks), padded.
    """
    path = ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"
    plans = {
        kind: make_plan(load_config(path, [f"policy.offload={kind}"]))
        for kind in ("none", "optimizer", "all")
    }
    number = 4.0956e9
    resident = {"none": (2 + 4 + 12 / 4) * number, "optimizer": 2 * number, "all": 0.0}
    moved = {"none": 0.0, "optimizer": 12 / 4 * number, "all": (2 + 12 / 4) * number}
    for kind, plan in plans.items():
        assert plan.rollout is not None
        assert sum(
            item.num_bytes for item in plan.rollout.items if item.name.startswith("trainer's")
        ) == pytest.approx(resident[kind], rel=1e-3)
        saved = (
            (12 + 2) / 4 * number
        )  # fp32 weights, two moments, bf16 weights: this rank's quarter
        assert plan.host_bytes_per_rank == pytest.approx(moved[kind] + saved, rel=1e-3)
        seconds = [phase.seconds for phase in plan.phases if phase.name == "off-load"]
        assert seconds == ([pytest.approx(2 * moved[kind] / 40e9, rel=1e-3)] if moved[kind] else [])
        assert plan.stages[0].total == plans["none"].stages[0].total
    larger = ["rollout.servers.mem_fraction=0.8"]
    assert not make_plan(load_config(path, [*larger, "policy.offload=none"])).fits
    assert make_plan(load_config(path, [*larger, "policy.offload=optimizer"])).fits


def test_host_memory_of_the_samples() -> None:
    config = load_config(BIG).config
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    limits = config.data.max_prompt_tokens
    response = config.rollout.sampling.max_response_tokens  # type: ignore[union-attr]
    one = samples * (4 * (limits + response) + 4 * response)
    assert memory.host_step_bytes(config) == one
    ahead = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_staleness": 2})}
    )
    assert memory.host_step_bytes(ahead) == 3 * one


@pytest.mark.parametrize(
    ("options", "samples", "words"),
    [
        # A prompt without a correct sample counts as p = 1/16, so S = 2 * 1/16 * 15/16; further
        # samples raise 8 S to 4: (4 - 0.9375) / 0.1171875 = 26.1.
        (
            "admission={resample: {schedule: equal, max_samples: 40}}",
            16 * (8 + 27),
            "432 further samples a step (admission: resample, at most 27 a prompt)",
        ),
        (
            "admission={resample: {schedule: equal}}",
            16 * (8 + 24),
            "384 further samples a step (admission: resample, at most 24 a prompt)",
        ),
        # At the start, and in each of two rounds, 1.5 times 16 prompts.
        (
            "admission={drop_one_class_groups: true, oversample: 1.5, refill_rounds: 2}",
            3 * 24 * 8,
            "448 further samples a step (admission: oversample=1.5, refill_rounds=2)",
        ),
    ],
    ids=["resample", "its limit", "oversample and refill_rounds"],
)
def test_samples_that_admission_may_add_by_hand(options: str, samples: int, words: str) -> None:
    overrides = ["batch.prompts_per_step=16", "batch.samples_per_prompt=8"]
    plain = load_config(BIG, overrides).config
    assert "further samples" not in run_plan(BIG, overrides)[0]

    config = load_config(BIG, [*overrides, options]).config
    assert memory.most_samples_per_step(config) == samples
    ratio = memory.host_step_bytes(config) / memory.host_step_bytes(plain)
    assert ratio == samples / (16 * 8)
    assert f"not counted: at most {words}" in run_plan(BIG, [*overrides, options])[0]


def test_the_longest_group_has_the_further_samples() -> None:
    config = load_config(BIG, ["admission={resample: {schedule: equal}}"]).config
    groups = timing.group_tokens(config, assumed_lengths(config))
    assert groups is not None
    assert groups[1] == 32 * max_sequence_tokens(config)


@pytest.mark.full
def test_search_over_experts() -> None:
    plans = search_layouts(
        make_plan(load_config(ROOT / "configs" / "runs" / "pacs-qwen3-30b-a3b-4n8g-ep8.yaml"))
    )
    assert {plan.layout.ep for plan in plans} >= {1, 2, 4, 8}


def test_activations_of_experts() -> None:
    """By hand for Qwen3-30B-A3B in bf16: hidden 2048, 32 query and 4 KV heads of 128, 8 of 128
    experts of 768.
    """
    spec = find_spec("Qwen/Qwen3-30B-A3B")
    assert spec is not None
    base = load_config(ROOT / "configs" / "runs" / "grpo-qwen3-30b-a3b-4n8g-ep8.yaml").config

    def bytes_of(**parallel: Any) -> float:
        config = base.model_copy(update={"parallel": base.parallel.model_copy(update=parallel)})
        return activations.layer_activation_bytes(config, spec)

    attention = (4096 + 512) + 2 * 4096 + 2 * 512
    experts = 8 * (2048 + 3 * 768)
    # fp32 scales of the norms and the softmax. Routing: a bool and two places for each expert;
    # index, probability and three places for each of the top 8.
    scales = 4 * (32 + 32 + 4)
    routing = 9 * 128 + 24 * 8
    one = 2 * (4 * 2048 + attention + experts) + 8 + scales + routing
    assert bytes_of(tp=1, ep=1) == pytest.approx(one)
    imbalance = constants.EXPERT_IMBALANCE.value
    assert bytes_of(tp=1, ep=8) == pytest.approx(one + 2 * experts * (imbalance - 1))
    # Whole experts and a divided sequence: everything is divided by tp.
    assert bytes_of(tp=2, ep=8, sequence_parallel=True) == pytest.approx(bytes_of(tp=1, ep=8) / 2)
    # Cut experts: all ranks of the group hold every token's copy, and a part of each expert.
    cut = 2 * (4 * 2048 / 2 + attention / 2 + 8 * (2048 + 3 * 768 / 2))
    cut += (8 + scales + routing) / 2
    assert bytes_of(tp=2, ep=1, sequence_parallel=True) == pytest.approx(cut)


def test_search_finds_a_layout_that_fits() -> None:
    loaded = load_config(BIG, ["parallel.tp=1", "parallel.sequence_parallel=false"])
    plans = search_layouts(make_plan(loaded))
    assert plans[0].fits
    fitting = [plan.step_s for plan in plans if plan.fits]
    assert fitting == sorted(fitting)
    assert all(plan.layout.world_size == 16 for plan in plans)
    layouts = {(plan.layout.tp, plan.layout.pp) for plan in plans}
    assert {(1, 1), (8, 1), (2, 4)} <= layouts
    assert (3, 1) not in layouts


def test_search_needs_gpus(tmp_path: Path, tiny_qwen3: Path) -> None:
    from tests.support.run_files import BASE

    (tmp_path / "run.yaml").write_text(BASE)
    loaded = load_config(tmp_path / "run.yaml", [f"model.path={tiny_qwen3}"])
    with pytest.raises(ConfigError, match=r"set resources\.gpus_per_node"):
        search_layouts(make_plan(loaded))


def test_steps_ahead_take_as_long_as_the_slower_side() -> None:
    turns = make_plan(load_config(AHEAD, ("rollout.max_staleness=0",)))
    ahead = make_plan(load_config(AHEAD))
    seconds = {phase.name.split(" (")[0]: phase.seconds for phase in turns.phases}
    rollout = seconds["rollout"]
    sync = seconds["weight sync"]
    assert turns.step_s == pytest.approx(sum(seconds.values()))
    assert ahead.step_s == pytest.approx(max(rollout + sync, turns.step_s - rollout))
    assert ahead.step_s < turns.step_s

    # In turns, each side waits for the other one.
    trainer_s = turns.step_s - rollout
    servers_s = rollout + sync
    waits = {"trainer": rollout / turns.step_s, "servers": (trainer_s - sync) / turns.step_s}
    assert turns.idle == pytest.approx(waits)
    waits = {"trainer": 1 - trainer_s / ahead.step_s, "servers": 1 - servers_s / ahead.step_s}
    assert ahead.idle == pytest.approx(waits)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp32", 4)])
def test_an_embedded_sampler_reads_its_own_dtype(dtype: str, width: int) -> None:
    config = load_config(ROOT / "configs" / "runs" / "quickstart.yaml").config
    embedded = config.rollout.embedded.model_copy(update={"dtype": dtype})
    rollout = config.rollout.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"rollout": rollout})
    assert config.rollout.embedded.dtype == embedded.dtype

    spec = find_spec("Qwen/Qwen3-4B")
    assert timing._read_weight_bytes(config, spec, 1, 8) == width * num_parameters(spec)


def test_every_constant_has_a_source() -> None:
    assert constants.DISK_GB_S in constants.MEASURABLE
    for constant in constants.MEASURABLE:
        measured = constant.source.startswith("docs/measurements/")
        assert (
            constant.source.startswith("assumed")
            or (ROOT / constant.source.split("#")[0]).is_file() == measured
        )


def test_flops_are_what_torch_counts(tiny_qwen3: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    spec = load_spec(tiny_qwen3)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, attn_implementation="eager")
    batch = 3
    length = 48
    ids = torch.randint(0, 250, (batch, length))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    tokens = batch * length
    ours = timing.forward_flops(spec, tokens, length, tokens)
    # Eager attention computes the masked half too, and transformers makes all the rotary angles by
    # a matrix product.
    masked_half = 2 * length * spec.num_heads * spec.head_dim * spec.num_layers * tokens
    assert counter.get_total_flops() == pytest.approx(ours + masked_half, rel=0.01)


@pytest.mark.parametrize("groups", ["together", "apart"])
@pytest.mark.parametrize("updates", [1, 4])
def test_forward_passes_are_the_objectives_own(updates: int, groups: str) -> None:
    from pacs_megatron.objectives.registry import build_objective

    options: list[PacsOptions | GrpoOptions] = [
        PacsOptions(name="pacs"),
        PacsOptions(name="pacs", reference="frozen"),
        PacsOptions(name="pacs", reward_proxy="mean_log_prob"),
        PacsOptions(name="pacs", importance_cap=2.0),
        PacsOptions(name="pacs", reference="frozen", importance_cap=2.0),
        GrpoOptions(name="grpo"),
        GrpoOptions(name="grpo", kl_coef=0.1),
    ]
    base = load_config(BIG).config
    for objective in options:
        config = base.model_copy(
            update={
                "objective": objective,
                "batch": base.batch.model_copy(update={"updates_per_step": updates}),
            }
        )
        real = build_objective(objective, updates_per_step=updates)
        passes = sum(len(real.logprob_passes(index)) for index in range(updates))
        if groups == "apart":
            passes += sum(bool(real.statistics(index)) for index in range(updates))
        assert timing.num_forward_passes(config, groups_together=groups == "together") == passes
        assert state.needs_reference_snapshot(config) == ("reference" in real.logprob_passes(0))


def test_layers_are_dealt_as_megatron_does() -> None:
    assert state.layers_of_stage(8, Layout(world_size=2, pp=2), 1) == [4, 5, 6, 7]
    assert state.layers_of_stage(8, Layout(world_size=2, pp=2, vpp=2), 0) == [0, 1, 4, 5]
    assert activations.microbatches_in_flight(Layout(world_size=4, pp=4), 0) == 4
    assert activations.microbatches_in_flight(Layout(world_size=4, pp=4), 3) == 1


def test_parallel_axes_divide_what_they_should() -> None:
    spec = find_spec("Qwen/Qwen3-30B-A3B")
    assert spec is not None
    for tp, pp, ep in product((1, 2, 4), (1, 2, 4), (1, 8)):
        layout = Layout(world_size=32, tp=tp, pp=pp, ep=ep)
        parts: list[Any] = [state.rank_parameters(spec, layout, stage) for stage in range(pp)]
        experts = sum(sum(part.experts) for part in parts) * layout.expert_tp * ep
        assert experts == 48 * 128 * 3 * 2048 * 768
    config = load_config(BIG).config
    spec14 = find_spec("Qwen/Qwen3-14B")
    assert spec14 is not None
    one = plan_of(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 1})}), spec14
    )
    four = plan_of(config, spec14)
    assert one.stages[0].items[0].num_bytes > 3.9 * four.stages[0].items[0].num_bytes
