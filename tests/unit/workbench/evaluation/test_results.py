"""`results.json`: the counts of problems with several orders of choices."""

from __future__ import annotations

import numpy as np

from pacs_megatron.config.schema import BenchmarkOptions, EvaluationOptions
from pacs_megatron.contracts import Prompt, SamplingOptions
from pacs_megatron.data import PromptSet
from pacs_megatron.rollout.requests import evaluation_requests
from pacs_megatron.workbench.evaluation.results import row_counts, summarize
from pacs_megatron.workbench.evaluation.sample_file import Outcome


def test_the_orders_of_a_problem_count_as_one_problem() -> None:
    """Three problems in two orders; the interval draws problems, not orders."""
    benchmark = BenchmarkOptions(path="x.json", preset="gpqa", name="gpqa", choice_orders=2)
    options = EvaluationOptions(
        benchmarks=(benchmark,),
        samples_per_prompt=1,
        sampling=SamplingOptions(max_response_tokens=1),
    )
    prompts = []
    for name in ("gpqa/0", "gpqa/0~1", "gpqa/4", "gpqa/4~1", "gpqa/5", "gpqa/5~1"):
        prompts.append(
            Prompt(id=name, text="", token_ids=np.zeros(1, np.int32), answer="A", problem="")
        )
    prompt_set = PromptSet(
        name="gpqa",
        prompts=tuple(prompts),
        num_rows=7,
        num_too_long=1,
        num_filtered=5,
        prompt_lens=np.arange(7),
        limit="",
    )
    requests = evaluation_requests(options, [prompt_set], run_seed=0, step=0)
    labels = {"gpqa/0": 1, "gpqa/0~1": 0, "gpqa/4": 1, "gpqa/4~1": 1, "gpqa/5": 0, "gpqa/5~1": 0}
    outcomes = {}
    for request in requests:
        outcomes[request.id] = Outcome(
            request.prompt_id, labels[request.prompt_id], None, None, False, 3
        )

    [result] = summarize(options, [prompt_set], requests, outcomes)
    counts = [(p.problem_id, p.num_samples, p.num_correct) for p in result.problems]
    assert counts == [("gpqa/0", 2, 1), ("gpqa/4", 2, 2), ("gpqa/5", 2, 0)]
    assert result.metrics["eval/gpqa/pass@1"] == 0.5
    assert result.metrics["eval/gpqa/num_problems"] == 3
    assert row_counts(options, [prompt_set]) == {
        "gpqa": {"read": 12, "where": {}, "outside_where": 5, "too_long": 1, "used": 6}
    }
