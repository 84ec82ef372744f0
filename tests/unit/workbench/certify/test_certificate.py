"""The certificate's file, what `train` does with it, the reference's imports, and the tiny cases of
shipped runs.
"""

from __future__ import annotations

import ast
import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import MegatronOptions, RecomputeOptions
from pacs_megatron.errors import CheckpointError, ConfigError
from pacs_megatron.launch.certified import certificate_folder, certificate_line, digest_of
from pacs_megatron.models import read_spec
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.runtime.shipped import run_file
from pacs_megatron.workbench import certify as certify_package
from pacs_megatron.workbench.certify import formulas
from pacs_megatron.workbench.certify import run as certify_run
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.compare import TOLERANCES, Deviations
from pacs_megatron.workbench.certify.run import certify, make_case
from pacs_megatron.workbench.certify.samples import write_samples
from pacs_megatron.workbench.plan.known_models import need_config
from tests.support.imports import imports
from tests.support.policies.certify_runs import write_run

SHIPPED = sorted(
    path.stem for path in (Path(__file__).parents[4] / "configs" / "runs").glob("*.yaml")
)


CERTIFY = Path(str(certify_package.__file__)).parent
REFERENCE = sorted(
    path.relative_to(CERTIFY).with_suffix("").as_posix().replace("/", ".")
    for path in [
        CERTIFY / "expected.py",
        *CERTIFY.glob("reference*.py"),
        *CERTIFY.glob("formulas/*.py"),
    ]
)
"""Modules of the independent reference"""


def test_the_reference_imports_nothing_of_the_package_but_its_own_files() -> None:
    own = {f"{certify_package.__name__}.{name.removesuffix('.__init__')}" for name in REFERENCE}
    assert {name.rpartition(".")[2] for name in own} >= {"expected", "pacs", "policy_gradient"}
    external = set()
    for name in REFERENCE:
        path = (CERTIFY / name.replace(".", "/")).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
        imported = {target for target, _, _ in imports(tree, f"{certify_package.__name__}.{name}")}
        external |= {target for target in imported if not is_of(target, own)}
    roots = {name.split(".")[0] for name in external} - set(sys.stdlib_module_names)
    assert roots == {"numpy", "safetensors", "torch", "transformers"}


def is_of(target: str, modules: set[str]) -> bool:
    """Whether an import's target is one of these modules, or a name in one."""
    return target in modules or target.rpartition(".")[0] in modules


def test_on_a_cpu_a_case_leaves_out_and_lists_options_that_need_a_gpu(tmp_path: Path) -> None:
    given = [
        f"parallel.megatron.{name}=true"
        for name in ("overlap_grad_reduce", "moe_permute_fusion", "tp_comm_overlap")
    ]
    given += ["parallel.recompute={granularity: selective, modules: [layernorm, core_attn]}"]
    loaded = load_config(
        run_file("pacs-qwen3-30b-a3b-4n8g-ep8"),
        [*given, "parallel.tp=2", "parallel.sequence_parallel=true"],
    )
    case = make_case(loaded, None)
    changed = {
        key: value
        for key, value in case.config.parallel.megatron
        if value != getattr(MegatronOptions(), key)
    }
    assert changed == {"overlap_grad_reduce": True}
    assert case.config.parallel.recompute == RecomputeOptions(
        granularity="selective", modules=("core_attn",)
    )
    assert {note.split(":")[0] for note in case.changes} >= {
        "parallel.megatron",
        "parallel.recompute",
    }
    case = make_case(
        load_config(
            loaded.path, ["parallel.recompute={granularity: selective, modules: [moe_act]}"]
        ),
        None,
    )
    assert case.config.parallel.recompute == RecomputeOptions()
    on_gpus = make_case(loaded, 8).config.parallel
    assert (on_gpus.megatron, on_gpus.recompute) == (
        loaded.config.parallel.megatron,
        loaded.config.parallel.recompute,
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("name", [name for name in SHIPPED if name.endswith("fp8")])
def test_on_gpus_a_case_has_sizes_that_fp8_supports_in_both_layouts(name: str, recipe: str) -> None:
    loaded = load_config(run_file(name), [f"precision.fp8={{recipe: {recipe}, format: e4m3}}"])
    case = make_case(loaded, 32)
    assert case.config.precision.fp8 == loaded.config.precision.fp8
    for attempt in (0, 1):
        config = case.config.model_copy(update={"parallel": case.parallel(attempt)})
        assert not [
            text
            for text in shape_problems(config, read_spec(case.hf_config), "tiny")
            if "fp8" in text
        ]


def test_a_job_in_fp32_has_the_model_of_processes_on_this_host() -> None:
    """The sizes for FP8 have larger heads, and so rounding of fp32 above the tolerances."""
    here, job = (
        make_case(load_config(run_file("quickstart"), ["parallel.tp=2"]), world)
        for world in (None, 2)
    )
    assert here.hf_config == job.hf_config


def certificate(folder: Path, deviations: Deviations, **overrides: Any) -> tuple[Any, Certificate]:
    loaded = load_config(write_run(folder, {"run": {"dir": str(folder / "runs")} | overrides}))
    case = make_case(loaded, None)
    return loaded, Certificate.of(
        loaded, case, deviations, certificate_folder(loaded), seconds=1.0, on_gpu=False
    )


def compared(*, value: float = 1.0) -> Deviations:
    deviations = Deviations(is_bf16=False)
    deviations.check("gradient norm", "update 1", value, 1.0)
    return deviations


def test_train_reports_a_certificate_that_fits_and_rejects_others(tmp_path: Path) -> None:
    loaded, green = certificate(tmp_path, compared())
    assert certificate_line(loaded) is None
    green.write()
    assert green.is_green
    line = certificate_line(loaded)
    assert line is not None and "fits this configuration" in line and "version of" not in line
    other = load_config(loaded.path, ["optimizer.lr=1e-5"])
    with pytest.raises(
        ConfigError, match=r"is of another configuration.*certify .*again, or remove"
    ):
        certificate_line(other)
    content = json.loads((green.folder / "certificate.json").read_text())
    content["versions"]["torch"] = "0.1"
    (green.folder / "certificate.json").write_text(json.dumps(content))
    assert "not the version of torch" in str(certificate_line(loaded))
    (green.folder / "certificate.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"certificate\.json"):
        certificate_line(loaded)


def test_a_red_certificate_names_the_first_deviation(tmp_path: Path) -> None:
    deviations = compared(value=1.5)
    deviations.check("learning rate", "update 1", 2.0, 1.0)
    loaded, red = certificate(tmp_path, deviations)
    red.write()
    assert (
        not red.is_green
        and "update 1: gradient norm" in red.line()
        and "learning rate" not in red.line()
    )
    with pytest.raises(ConfigError, match="is red: update 1: gradient norm"):
        certificate_line(loaded)
    assert "gradient norm" in (red.folder / "certificate.html").read_text()


@pytest.mark.parametrize("value", [np.nan, np.inf, np.zeros(2)])
def test_a_number_that_is_none_or_of_another_shape_is_a_deviation(value: Any) -> None:
    for name in TOLERANCES:
        for found, expected in ((value, 0.0), (0.0, value)):
            deviations = Deviations(is_bf16=True)
            deviations.check(name, "update 1", found, expected)
            assert deviations.first


@pytest.mark.parametrize("bound", [None, 1e9])
def test_a_value_within_its_bound_is_not_clipped(bound: float | None) -> None:
    """1e8 + (0.1 - 1e8) is 0.1 - 6e-9."""
    start, value, target = (
        torch.tensor([number], dtype=torch.float64) for number in (1e8, 0.1, 1.0)
    )
    _, metrics = formulas.value_loss(
        {"value_clip": bound, "value_coef": 0.5, "loss_mean": "token", "constant_length": None},
        [value],
        [start],
        [target],
    )
    assert metrics["critic/clip_frac"] == (0.0, 1.0)


def test_the_digest_covers_what_is_computed(tmp_path: Path) -> None:
    path = write_run(tmp_path, {})
    base = digest_of(load_config(path).config)
    for same in (
        "run.name=other",
        "run.steps=7",
        "logging.tensorboard=false",
        "parallel.hang_timeout_s=900",
    ):
        assert digest_of(load_config(path, [same]).config) == base, same
    for other in (
        "parallel.tp=2",
        "objective.beta=2.0",
        "optimizer.weight_decay=0.1",
        "precision.dtype=bf16",
        "rollout.agent={function: 'a.py:solve'}",
    ):
        assert digest_of(load_config(path, [other]).config) != base, other


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_run_has_a_tiny_case(name: str) -> None:
    loaded = load_config(run_file(name))
    parallel = loaded.config.parallel
    case = make_case(loaded, None)
    first, second = case.layouts
    assert max(first.world_size, second.world_size) <= 8
    assert first != second
    axes = (first.tp, first.pp, first.cp, first.ep)
    shipped = (parallel.tp, parallel.pp, parallel.cp, parallel.ep)
    if parallel.tp * parallel.pp * parallel.cp <= 8:
        assert axes == shipped
    else:
        # Smaller, but every axis that the run has is there.
        assert all(
            1 < small <= large for small, large in zip(axes, shipped, strict=True) if large > 1
        )

    spec = read_spec(case.hf_config)
    for layout in case.layouts:
        assert spec.num_heads % layout.tp == 0 == spec.num_kv_heads % layout.tp
        assert spec.num_layers % (layout.pp * (layout.vpp or 1)) == 0
        assert layout.world_size % layout.model_parallel_size == 0
    assert spec.num_heads // max(first.tp, second.tp) % 2 == 1
    assert spec.vocab_size % 2 == 1
    user_model = need_config(loaded.config.model.path, loaded.where("model.path"))
    assert spec.tied == read_spec(user_model).tied
    if loaded.config.precision.dtype == "bf16":
        assert "precision.dtype: fp32 for bf16" in case.changes


@pytest.mark.parametrize("name", SHIPPED)
def test_samples_have_uneven_groups_and_groups_of_one_class(tmp_path: Path, name: str) -> None:
    loaded = load_config(run_file(name))
    case = make_case(loaded, None)
    write_samples(case, tmp_path, 0)
    steps = np.load(tmp_path / "steps.npz")
    sizes: set[int] = set()
    is_one_class = []
    for step in range(1, case.steps + 1):
        groups = steps[f"{step}.groups"]
        labels = steps[f"{step}.labels"]
        sizes.update(np.bincount(groups).tolist())
        for group in np.unique(groups):
            is_one_class.append(len(np.unique(labels[groups == group])) == 1)

    assert any(is_one_class)
    if loaded.config.rollout.is_sampled:
        assert len(sizes) > 1
        assert not all(is_one_class)


def test_samples_of_an_agent_have_random_spans(tmp_path: Path) -> None:
    agent = "rollout.agent={function: 'a.py:solve'}"
    case = make_case(load_config(write_run(tmp_path, {}), [agent]), None)
    (tmp_path / "run.d").mkdir()
    write_samples(case, tmp_path / "run.d", 0)
    steps = np.load(tmp_path / "run.d" / "steps.npz")
    lens = steps["1.response_lens"] + steps["1.environment_lens"]
    ends = np.cumsum(lens)
    is_policy = steps["1.is_policy"]
    assert is_policy[ends - 1].all() and len(is_policy) == ends[-1]
    assert len(steps["1.noise"]) == is_policy.sum() == steps["1.response_lens"].sum()
    assert 0.2 < is_policy.mean() < 0.9


def test_a_layout_that_does_not_fit_its_model_is_rejected(tmp_path: Path) -> None:
    loaded = load_config(write_run(tmp_path, {"parallel": {"tp": 8}, "run": {"nproc": 8}}))
    with pytest.raises(ConfigError, match=r"parallel\.tp=8 does not divide"):
        make_case(loaded, None)


def test_a_full_disk_is_no_red_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise certify_run._FailedError("preparation, rank 0: SafetensorError: I/O error")

    path = write_run(tmp_path, {})
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match=r"needs 0\.02 GB and .* has 0\.00 GB"),
    ):
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=300_000))
        certify(path, [], out=tmp_path / "out")
    monkeypatch.setattr(certify_run, "_run", fail)
    monkeypatch.setattr(
        certify_run, "disk_error", lambda _: OSError(errno.ENOSPC, "No space left on device")
    )
    with pytest.raises(OSError, match=r"No space left on device: '.*/out/\.work'"):
        certify(path, [], out=tmp_path / "out")
    assert (
        not (tmp_path / "out" / "certificate.json").exists()
        and not (tmp_path / "out" / ".work").exists()
    )
