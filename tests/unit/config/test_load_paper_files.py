"""The paper's configurations have the values of docs/paper.md, and its sweeps expand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import draws_of, ranks_to_start
from pacs_megatron.config.schema import RowCondition
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
    assert config.logging.step_start_entropy  # figure 5(a)
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
        wanted |= {"gamma": 1.0, "lam": 1.0, "value_clip": 0.5, "value_coef": 1.0}
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
    [benchmark] = code.evaluation.benchmarks
    assert (benchmark.preset, len(benchmark.revision or "")) == ("livecodebench", 40)
    # The window of the paper, 2024-07-01 to 2025-01-01, in the files that contain it.
    assert benchmark.where == {"contest_date": RowCondition(min="2024-07-01", max="2025-01-01")}
    assert [path.rpartition("/")[2] for path in benchmark.paths] == [
        "test3.jsonl",
        "test4.jsonl",
        "test5.jsonl",
    ]
    assert code.reward is not None and code.reward.name == "code"


def test_the_toolkits_settings_are_selectable() -> None:
    """zai-org/glm-simple-evals db7fdc8: evaluate.py (repeats), evals/ (limits, letters)."""
    gpqa = load_config(PAPER / "eval-gpqa-toolkit.yaml").config
    [benchmark] = gpqa.evaluation.benchmarks
    assert (benchmark.choice_orders, draws_of(gpqa.evaluation, benchmark)) == (8, (1, (1,)))
    assert gpqa.reward is not None and gpqa.reward.name == "custom"
    assert gpqa.reward.function.endswith("toolkit:gpqa_letter")
    code = load_config(PAPER / "eval-livecodebench-toolkit.yaml").config
    [benchmark] = code.evaluation.benchmarks
    assert draws_of(code.evaluation, benchmark) == (2, (1,)) and "contest_date" in benchmark.where
    assert code.reward is not None and code.reward.name == "code"
    assert (code.reward.timeout_s, code.reward.test_timeout_s) == (30, 30)


@pytest.mark.parametrize("size", ["4b", "8b"])
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_both_means_of_the_baselines_are_presets(method: str, size: str) -> None:
    """Appendix B of the paper: 1/|o| sum over tokens, then the mean over responses."""
    objective = load_config(PAPER / f"{method}-qwen3-{size}-appendix.yaml").config.objective
    script = load_config(PAPER / f"{method}-qwen3-{size}.yaml").config.objective
    changed = {"loss_mean": "sequence", "constant_length": None}
    assert objective.model_dump() == script.model_dump() | changed


@pytest.mark.parametrize("size", ["3b", "7b"])
@pytest.mark.parametrize("method", ["pacs", "grpo", "ppo"])
def test_version_1_has_the_values_of_the_scripts(method: str, size: str) -> None:
    """ritzz-ai/PACS bbe1dc6: scripts/pacs/pacs_beta_1.0.sh, scripts/baseline/, and
    configs/ppo_trainer.yaml for what they leave at its default.
    """
    config = load_config(PAPER / "v1" / f"{method}-qwen2.5-{size}.yaml").config
    assert (config.model.path, config.run.steps) == (f"Qwen/Qwen2.5-{size.upper()}", 300)
    assert (config.resources.nodes, config.resources.gpus_per_node) == (8, 8)
    assert (config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens) == (
        512,
        4096,
    )
    batch = config.batch
    assert (batch.prompts_per_step, batch.samples_per_prompt, batch.updates_per_step) == (
        1024,
        8,
        4,
    )
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.adam_beta2) == (1e-6, 0.01, 0.999)
    assert (config.rollout.sampling.temperature, config.checkpoint.every) == (1.0, 20)
    assert config.data.system_prompt is None
    assert not layout_problems(config, ranks_to_start(config))

    evaluation = config.evaluation
    assert evaluation.sampling is not None and evaluation.sampling.temperature == 0.0
    assert evaluation.sampling.max_response_tokens == 4096
    assert (evaluation.samples_per_prompt, evaluation.k) == (1, (1,))
    assert evaluation.every == (None if method == "ppo" else 5)  # trainer.test_freq
    assert [benchmark.path for benchmark in evaluation.benchmarks] == [
        "openai/gsm8k",
        "HuggingFaceH4/MATH-500",
        "Maxwell-Jia/AIME_2024",
        "yentinglin/aime_2025",
        "zwhe99/amc23",
    ]
    objective = config.objective.model_dump()
    if method == "pacs":
        assert (objective["clip_grad"], objective["beta"], objective["score"]) == (0.0, 1.0, "rloo")
    else:
        # seq-mean-token-sum-norm divides by the width of the mask; a micro-batch has 8 samples.
        assert (objective["loss_mean"], objective["constant_length"]) == ("dr_grpo", 4096 // 8)
