"""Computes the responses to `rollout` and `evaluate` and writes sample files.

`rollout`: the admitted samples of a step as arrays, and its metrics. `evaluate`: the counts of each
problem. The files, rollouts/step_*.jsonl and eval_*.jsonl, have all judged samples, also those that
admission drops.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from pacs_megatron.batching.tables import facts_to_arrays, tabulate, tokens_to_arrays
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Group, Sample
from pacs_megatron.data.prompts import PromptSet
from pacs_megatron.data.repeats import num_repeated
from pacs_megatron.observability.rollout_log import RECORD_SUFFIX, rollout_path, write_rollouts
from pacs_megatron.rollout.admission import Admitted, admit, shuffle_labels
from pacs_megatron.rollout.agent_metrics import agent_metrics
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.passk import count_problem
from pacs_megatron.rollout.resampling import is_rescued
from pacs_megatron.rollout.run_prompts import RunPrompts
from pacs_megatron.rollout.sample_arrays import Message, Reply, write_record
from pacs_megatron.rollout.step_rollouts import (
    SentWeights,
    StepRollouts,
    rollout_metrics,
    staleness_metrics,
)

logger = logging.getLogger(__name__)


class StepResults:
    """The responses of the driver, and the files of the samples behind them."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        prompts: RunPrompts,
        judge: Judge | None,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._prompts = prompts
        self._data = prompts.train
        self._judge = judge
        self._decode = decode
        self._min_group_size = 2 if config.objective.compares_siblings else 1
        self._to_write: Callable[[], None] | None = None

    def admits(self, group: Group) -> bool:
        """Whether a judged group will be trained, unless it is stale. Any thread may call it."""
        admitted = admit([group], self._config.admission, min_group_size=self._min_group_size)
        return bool(admitted.groups)

    def step(self, rollouts: StepRollouts, sent: SentWeights) -> Reply:
        """The admitted samples of a step, with metrics.

        Returns the prompts of unfinished groups to the data. Raises RewardError if too many samples
        could not be judged.

        Args:
            rollouts: all of its samples are judged.
            sent: the weights that the rollout engine has had.

        Returns:
            Header: `ids`, `metrics`, and `order`, the position in the data without `max_staleness`.
            Arrays of SampleFacts and TokenBuffers.
        """
        config = self._config
        step = rollouts.step
        max_staleness = config.rollout.steps_ahead
        is_sampled = config.rollout.is_sampled
        judged = rollouts.in_order()
        if self._judge is not None and is_sampled:
            self._judge.check(judged)
        if not rollouts.is_returned:
            self._data.put_back(rollouts.unfinished)
            rollouts.is_returned = True

        staleness: dict[str, int] = {}
        if is_sampled:
            staleness = {sample.id: sent.staleness(sample, step) for sample in judged}
        admitted = self._admit(rollouts, staleness)
        groups = admitted.groups[: rollouts.enough]
        if rollouts.enough is not None:
            num_surplus = len(admitted.groups) - len(groups)
            admitted.counts["surplus_groups"] = num_surplus + len(rollouts.unfinished)
        if config.data.shuffle_labels:
            groups = shuffle_labels(groups, seed=config.run.seed, step=step)
        if is_sampled:
            self._to_write = partial(self._write, rollouts, judged)

        facts, tokens = tabulate(groups, routing=config.policy.routing)
        arrays = facts_to_arrays(facts) | tokens_to_arrays(tokens)
        metrics = rollout_metrics(judged, admitted.counts) | {"data/epoch": float(rollouts.epoch)}
        agents = config.rollout.agents
        if agents is not None:
            metrics |= agent_metrics(judged, agents.tools)
        if self._data.repeats_problems:
            metrics["data/repeated_problems"] = float(num_repeated(rollouts.prompts))
        if config.admission.refill_rounds:
            metrics["admission/refills"] = float(rollouts.refills)
        if config.admission.resample is not None:
            metrics |= self._resample_metrics(rollouts)
        if max_staleness:
            trained: list[Sample] = []
            for group in groups:
                trained += group.samples
            metrics |= staleness_metrics(trained, [staleness[sample.id] for sample in trained])

        seconds = time.perf_counter() - rollouts.since
        logger.info("step %d: %d samples in %.2f s", step, len(judged), seconds)
        # Rank 0 keeps it, so that a run whose driver dies later can still save the checkpoint after
        # this step.
        order = None if max_staleness else self._prompts.position()
        return {"kind": "groups", "ids": facts.ids, "metrics": metrics, "order": order}, arrays

    def evaluation(self, rollouts: StepRollouts, benchmarks: Sequence[PromptSet]) -> Message:
        """The counts of every problem; writes the samples.

        Raises RewardError if too many samples could not be judged.
        """
        judged = rollouts.in_order()
        assert self._judge is not None
        self._judge.check(judged)
        self._write(rollouts, judged)

        samples_of = {group.prompt_id: group.samples for group in rollouts.groups()}
        counts = {}
        for benchmark in benchmarks:
            counts[benchmark.name] = [
                asdict(count_problem(prompt.id, samples_of[prompt.id]))
                for prompt in benchmark.prompts
            ]
        return {"kind": "evaluation", "benchmarks": counts}, {}

    def write_pending(self) -> None:
        """Writes the samples of the last step.

        Called between its response and the next request: rank 0 trains then, and writes the step's
        metrics later.
        """
        if self._to_write is not None:
            self._to_write()
            self._to_write = None

    def _resample_metrics(self, rollouts: StepRollouts) -> dict[str, float]:
        """The number of further samples, and of groups that only they made solvable."""
        num_first = self._config.batch.samples_per_prompt
        rescued = [is_rescued(group.samples, num_first) for group in rollouts.groups()]
        return {
            "admission/extra_samples": float(sum(rollouts.extra.values())),
            "admission/rescued_groups": float(sum(rescued)),
        }

    def _admit(self, rollouts: StepRollouts, staleness: dict[str, int]) -> Admitted:
        max_staleness = self._config.rollout.steps_ahead
        stale = {sample_id for sample_id, age in staleness.items() if age > max_staleness}
        # Synchronous training has stale samples only after an attempt with max_staleness; otherwise
        # it omits the metric.
        reports_stale = bool(stale) or max_staleness > 0
        return admit(
            rollouts.groups(),
            self._config.admission,
            min_group_size=self._min_group_size,
            stale=stale if reports_stale else None,
        )

    def _write(self, rollouts: StepRollouts, samples: Sequence[Sample]) -> None:
        path = rollout_path(self._run_dir, rollouts.step, "step" if rollouts.is_train else "eval")
        write_rollouts(path, samples, rollouts.by_id, self._decode)
        if self._config.logging.save_tokens:
            write_record(path.with_suffix(RECORD_SUFFIX), samples)
