"""The paper's configurations have the values of docs/paper.md, and its sweeps expand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import draws_of, ranks_to_start
from pacs_megatron.launch.submit import _axis

PAPER = Path(__file__).resolve().parents[3] / "configs" / "paper"


@pytest.mark.parametrize(("size", "steps"), [("4b", 120), ("8b", 320)])
@pytest.mark.parametrize("method", ["pacs", "grpo", "ppo"])
def test_the_values_of_the_document(method: str, size: str, steps: int) -> None:
    config = load_config(PAPER / f"{method}-qwen3-{size}.yaml").config
    assert (config.model.path, config.run.steps) == (f"Qwen/Qwen3-{size.upper()}", steps)
    batch = config.batch
    optimizer = config.optimizer
    assert (batch.prompts_per_step, batch.samples_per_prompt, batch.updates_per_step) == (
        1024,
        8,
        4,
    )
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (
        1e-6,
        0.9,
        0.999,
        0.01,
    )
    assert (optimizer.schedule, optimizer.warmup_updates) == ("constant", 0)
    assert config.data.system_prompt == "You are a helpful assistant."
    assert config.data.max_prompt_tokens == 1024 and config.data.train.preset == "deepscaler"
    sampling = config.rollout.sampling
    evaluation = config.evaluation.sampling
    assert (sampling.max_response_tokens, sampling.temperature, sampling.top_p) == (8192, 1.0, 1.0)
    assert evaluation is not None
    assert (evaluation.max_response_tokens, evaluation.temperature, evaluation.top_p) == (
        8192,
        0.6,
        0.95,
    )
    assert config.reward is not None and config.reward.model_dump()["label_rule"] == "authors"
    assert config.admission.truncated == "judge"
    assert not layout_problems(config, ranks_to_start(config))
    objective = config.objective.model_dump()
    wanted = {
        "clip_grad": 1.0,
        "loss_mean": "dr_grpo",
        "constant_length": 1024,
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    wanted |= {"kl_coef": 0.0, "entropy_coef": 0.0}
    if method == "ppo":
        assert objective["critic"]["lr"] == 1e-5
        wanted |= {"gamma": 1.0, "lam": 1.0, "value_clip": 0.5}
    if method == "pacs":
        wanted = {
            "clip_grad": 0.0,
            "beta": 1.0,
            "score": "rloo",
            "weighting": "question",
            "reference": "step_start",
        }
    assert objective == objective | wanted


def test_the_evaluation_has_draws_for_every_k_and_pinned_data() -> None:
    config = load_config(PAPER / "eval.yaml").config
    assert all(
        re.fullmatch(r"[0-9a-f]{40}", benchmark.revision or "")
        for benchmark in config.evaluation.benchmarks
    )
    draws = {
        benchmark.name: draws_of(config.evaluation, benchmark)
        for benchmark in config.evaluation.benchmarks
    }
    names = ("math500", "amc23", "aime24", "aime25", "beyondaime")
    assert draws == dict.fromkeys(names, (128, (1, 4, 8, 16, 32, 64)))


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in (PAPER.parents[1] / "docs/paper.md").read_text().splitlines()
        if "--sweep" in line
    ],
)
def test_the_ablations_of_the_document_load(line: str) -> None:
    words = line.partition("--sweep ")[2].partition("  #")[0].strip("' ")
    values = [
        load_config(PAPER / "pacs-qwen3-4b.yaml", [text]).config.objective for text in _axis(words)
    ]
    assert len(values) == len(set(map(repr, values))) > 1


def test_bad_draws_of_a_benchmark_name_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"evaluation\.benchmarks\.0\.k=256"):
        load_config(PAPER / "eval.yaml", ["evaluation.benchmarks.0.k=[256]"])


def test_the_benchmarks_out_of_domain() -> None:
    gpqa = load_config(PAPER / "eval-gpqa.yaml").config
    assert [(b.preset, b.subset, len(b.revision or "")) for b in gpqa.evaluation.benchmarks] == [
        ("gpqa", "gpqa_diamond", 40)
    ]
    assert (
        gpqa.reward is not None
        and gpqa.reward.name == "math"
        and "letter" in gpqa.data.prompt_suffix
    )
    code = load_config(PAPER / "eval-livecodebench.yaml").config
    assert [(b.preset, len(b.revision or "")) for b in code.evaluation.benchmarks] == [
        ("livecodebench", 40)
    ]
    assert code.reward is not None and code.reward.name == "code"
