"""Composition, overrides and messages of the configuration loader."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import PAPER_SUFFIX
from pacs_megatron.errors import ConfigError
from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import ObjectiveOptions
from tests.support.run_files import BASE


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def fail(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_values_and_origins(base: Path) -> None:
    loaded = load_config(base, ["batch.updates_per_step=2"])
    assert loaded.config.optimizer.lr == 1e-6  # a plain 1e-6 is text in YAML 1.1
    assert loaded.config.objective == PacsOptions(name="pacs", beta=2.0)
    assert loaded.config.batch.updates_per_step == 2
    assert loaded.origins["optimizer.lr"] == "base.yaml:25"
    assert loaded.origins["batch.updates_per_step"] == "override"
    assert loaded.origins["optimizer.weight_decay"] == "default"
    assert loaded.origins["rollout.sampling.max_response_tokens"] == "base.yaml:16"
    assert loaded.origins["rollout.sampling.stop"] == "default"


def test_resolved_yaml_loads_back_equal(base: Path, tmp_path: Path) -> None:
    loaded = load_config(
        base, ["optimizer.lr=3.5e-7", "rollout.sampling.stop=['</a>', 'no']", "data.prompt_suffix="]
    )
    assert loaded.config.data.prompt_suffix == ""
    again = load_config(write(tmp_path, "resolved.yaml", loaded.to_yaml()))
    assert again.config == loaded.config


def test_include_later_wins_and_mappings_merge(base: Path, tmp_path: Path) -> None:
    write(tmp_path, "parts/a.yaml", "optimizer:\n  lr: 1.0e-3\n  weight_decay: 0.1\n")
    write(tmp_path, "parts/b.yaml", "include: a.yaml\noptimizer:\n  lr: 2.0e-3\n")
    run = write(tmp_path, "run.yaml", "include: [base.yaml, parts/b.yaml]\nrun:\n  name: mine\n")
    loaded = load_config(run)
    assert (loaded.config.run.name, loaded.config.run.steps) == ("mine", 10)
    assert (loaded.config.optimizer.lr, loaded.config.optimizer.weight_decay) == (2e-3, 0.1)
    assert loaded.origins["optimizer.lr"] == "parts/b.yaml:3"
    assert loaded.origins["optimizer.weight_decay"] == "parts/a.yaml:3"
    assert loaded.origins["run.steps"] == "base.yaml:3"


def test_another_strategy_replaces_its_options_as_a_whole(base: Path, tmp_path: Path) -> None:
    run = write(
        tmp_path, "run.yaml", "include: base.yaml\nobjective:\n  name: grpo\n  clip_high: 0.28\n"
    )
    assert load_config(run).config.objective == GrpoOptions(
        name="grpo", clip_high=0.28
    )  # without beta: 2
    same = write(
        tmp_path, "same.yaml", "include: base.yaml\nobjective:\n  name: pacs\n  score: naive\n"
    )
    assert load_config(same).config.objective == PacsOptions(name="pacs", beta=2.0, score="naive")


def test_an_override_can_change_the_strategy(base: Path) -> None:
    loaded = load_config(base, ["objective.clip_low=0.1", "objective.name=grpo"])
    assert loaded.config.objective == GrpoOptions(name="grpo", clip_low=0.1)


@pytest.mark.parametrize(("objective", "limit"), [("pacs", 0.0), ("grpo", 1.0), ("sft", 1.0)])
def test_each_objective_has_its_own_default_of_clip_grad(objective: str, limit: float) -> None:
    options: TypeAdapter[Any] = TypeAdapter(ObjectiveOptions)
    assert options.validate_python({"name": objective}).clip_grad == limit


def test_overriding_an_element_of_a_list(base: Path, tmp_path: Path) -> None:
    text = "include: base.yaml\nevaluation:\n  sampling: {max_response_tokens: 9}\n  benchmarks:\n"
    run = write(
        tmp_path,
        "run.yaml",
        text + "    - {path: a.jsonl, preset: aime}\n    - {path: b.jsonl, preset: aime, name: "
        "second}\n",
    )
    loaded = load_config(run, ["evaluation.benchmarks.1.limit=7"])
    assert [dataset.limit for dataset in loaded.config.evaluation.benchmarks] == [None, 7]
    assert loaded.origins["evaluation.benchmarks.1.limit"] == "override"
    assert loaded.origins["evaluation.benchmarks.1.path"] == "run.yaml:6"


def test_words_of_yaml_1_1_stay_text(base: Path) -> None:
    assert load_config(base, ["run.name=no"]).config.run.name == "no"
    assert load_config(base, ["run.name=12:30"]).config.run.name == "12:30"
    assert load_config(base, ["run.name=2024-01-01"]).config.run.name == "2024-01-01"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["optimizer.lrr=1"],
            "unknown key `optimizer.lrr`; did you mean `optimizer.lr`? (override)",
        ),
        (
            ["data.train.where={day: {mni: 1}}"],
            "unknown key `data.train.where.day.mni`; did you mean `data.train.where.day.min`? "
            "(override)",
        ),
        ([f"run.seed={'9' * 30}"], "run.seed: a number of 30 digits, expected at most 24"),
        (
            ["optimizer.lr=1e−4"],
            "expected a number, not text (− is the letter U+2212); write a plain",
        ),
        (
            ["data.train=[{path: a.jsonl, weight: 3}]"],
            "the other files of a mixture belong to data.mix, each with its weight (override)",
        ),
        (
            ["optimizer.clip_grad=1"],
            "unknown key `optimizer.clip_grad`; it is now called `objective.clip_grad`",
        ),
        (
            ["lr=4"],
            "unknown key `lr`; did you mean `objective.critic.lr` or `optimizer.lr`? (override)",
        ),
        (["optimiser.lr=1"], "unknown key `optimiser`; did you mean `optimizer`? (override)"),
        (
            ["objective.gamma=0.9"],
            "unknown key `objective.gamma`; it belongs to objective.name=ppo, and "
            "objective.name=pacs does not use it; remove the key (override)",
        ),
        (
            ["run.steps='3'"],
            "run.steps='3': expected an integer, not text; write a plain value without quotes and "
            "units, such as 8192 (override)",
        ),
        (["run.steps=1.5"], "run.steps=1.5: expected an integer (override)"),
        (["run.steps=true"], "run.steps=True: expected an integer (override)"),
        (["run.steps=0"], "run.steps=0: expected greater than 0 (override)"),
        (["run.name=3"], "run.name=3: expected a string; put it in quotes (override)"),
        (["optimizer.lr=.nan"], "optimizer.lr=nan: expected a finite number (override)"),
        (
            ["reward.name=maths"],
            "reward.name='maths': expected one of math, arithmetic, format, code, http, custom, "
            "weighted, agent; did you mean math? (override)",
        ),
        (
            ["objective.reward_proxy=sum_log"],
            "sum_log_ratio, mean_log_prob; did you mean sum_log_ratio? (override)",
        ),
        (
            ["precision.dtype=bf61"],
            "precision.dtype='bf61': expected one of fp32, bf16; did you mean bf16? (override)",
        ),
        (
            ["batch=3"],
            "batch=3: expected a mapping; write batch: {prompts_per_step: ...}, with any of ",
        ),
        (["reward.timeout_s=[1]"], "reward.timeout_s=[1]: expected a number (override)"),
        (["data.train.limit=-1"], "data.train.limit=-1: expected greater than 0 (override)"),
        (["evaluation.k=[]"], "evaluation.k=[]: expected at least 1 item (override)"),
        (["evaluation.k=3"], "evaluation.k=3: expected a list: [a, b] (override)"),
        (
            ["optimizer.lr"],
            "override 'optimizer.lr': expected key=value with a dotted key, such as "
            "optimizer.lr=1e-6",
        ),
        (
            ["a..b=1"],
            "override 'a..b=1': expected key=value with a dotted key, such as optimizer.lr=1e-6",
        ),
        (["run.steps=1", "nope=1", "objective.bta=3"], "(and 1 more)"),
    ],
)
def test_wrong_overrides(base: Path, overrides: list[str], expected: str) -> None:
    assert expected in fail(base, *overrides)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "  steps: 10\n",
            "",
            "`run.steps` is missing; add it: Number of training steps (rollout batches). "
            "(bad.yaml:1)",
        ),
        (
            "  name: math\n",
            "  workers: 2\n",
            "`reward.name` is missing; set it to one of math, arithmetic, format, code, http, "
            "custom, weighted, agent (bad.yaml:17)",
        ),
        (
            "  beta: 2\n",
            "  beta: 2\n  beta: 3\n",
            "key `beta` is written twice in one mapping, first at bad.yaml:8; keep one "
            "(bad.yaml:9)",
        ),
        ("  beta: 2\n", "  beta: [2\n", "not valid YAML: "),
        (
            "  beta: 2\n",
            "  beta: !!python/object/apply:os.system ['true']\n",
            "is not supported; write a plain value (bad.yaml:8)",
        ),
        (
            "  beta: 2\n",
            "  beta: &x 2\n  actor_term: *x\n",
            "YAML anchors and aliases are not supported",
        ),
        ("  beta: 2\n", "  ? [a, b]\n  : 2\n", "expected a plain word as key, got a sequence"),
        (
            "  beta: 2\n",
            "  btea: 2\n",
            "unknown key `objective.btea`; did you mean `objective.beta`? (bad.yaml:8)",
        ),
        (
            "run:\n",
            "include: nothere.yaml\nrun:\n",
            "include='nothere.yaml': no such file nothere.yaml; paths are relative to the "
            "including file (bad.yaml:1)",
        ),
        (
            "run:\n",
            "include: 3\nrun:\n",
            "include=3: expected a file name or a list of file names; fix it (bad.yaml:1)",
        ),
    ],
)
def test_wrong_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert old in BASE
    assert expected in fail(write(tmp_path, "bad.yaml", BASE.replace(old, new, 1)))


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cannot read the configuration nope.yaml: No such file or directory" in fail(
        tmp_path / "nope.yaml"
    )
    assert "expected a mapping" in fail(write(tmp_path, "list.yaml", "- 1\n"))
    assert "got nothing" in fail(write(tmp_path, "empty.yaml", ""))
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe9\n")
    assert "not UTF-8" in fail(tmp_path / "latin.yaml")


def test_include_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.yaml", "include: b.yaml\n")
    write(tmp_path, "b.yaml", "include: a.yaml\n")
    assert (
        fail(tmp_path / "a.yaml")
        == "include cycle: a.yaml -> b.yaml -> a.yaml; remove one of these includes"
    )


def test_a_shared_include_is_no_cycle(base: Path, tmp_path: Path) -> None:
    write(tmp_path, "x.yaml", "include: base.yaml\n")
    write(tmp_path, "y.yaml", "include: base.yaml\n")
    assert (
        load_config(write(tmp_path, "run.yaml", "include: [x.yaml, y.yaml]\n")).config.run.name
        == "demo"
    )


@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        ((), PAPER_SUFFIX),
        (("data.train={preset: null, columns: {problem: q, answer: a}}",), ""),
        (("data.train.preset=gpqa",), ""),
        (("data.prompt_suffix=null",), PAPER_SUFFIX),
        (("data.prompt_suffix=",), ""),
        (("data.prompt_suffix=Be brief.", "data.train.preset=gpqa"), "Be brief."),
    ],
)
def test_the_default_suffix_is_for_presets_of_mathematics_only(
    base: Path, words: tuple[str, ...], suffix: str
) -> None:
    loaded = load_config(base, words)
    assert loaded.config.data.prompt_suffix == suffix
    assert "put your final answer within \\boxed{}" in PAPER_SUFFIX
    base.write_text(loaded.to_yaml())
    assert load_config(base).config == loaded.config, "the record of a run has the suffix"
