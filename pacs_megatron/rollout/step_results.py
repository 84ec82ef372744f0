"""Computes the responses to `rollout` and `evaluate` (admitted samples, metrics, counts) and writes
sample files.
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
from pacs_megatron.observability.rollout_log import RECORD_SUFFIX, rollout_path, write_rollouts
from pacs_megatron.rollout.admission import admit, shuffle_labels
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.passk import count_problem
from pacs_megatron.rollout.sample_arrays import Message, write_record
from pacs_megatron.rollout.step_rollouts import (
    SentWeights,
    StepRollouts,
    rollout_metrics,
    staleness_metrics,
)
from pacs_megatron.rollout.train_data import TrainData

logger = logging.getLogger(__name__)


class StepResults:
    def __init__(
        self, config: RunConfig, run_dir: Path, data: TrainData, judge: Judge | None,
        decode: Callable[[np.ndarray], str],
    ) -> None:  # fmt: skip
        self._config = config
        self._run_dir = run_dir
        self._data = data
        self._judge = judge
        self._decode = decode
        self._min_group_size = 2 if config.objective.compares_siblings else 1
        self._to_write: Callable[[], None] | None = None

    def admits(self, group: Group) -> bool:
        """Whether a judged group will be trained, if it is not too stale."""
        return bool(
            admit([group], self._config.admission, min_group_size=self._min_group_size).groups
        )

    def step(self, rollouts: StepRollouts, sent: SentWeights) -> Message:
        """The admitted samples of a step.

        Raises RewardError if too many samples could not be judged.
        """
        config = self._config
        step = rollouts.step
        max_staleness = self._config.rollout.steps_ahead
        judged = rollouts.in_order()
        is_sampled = config.rollout.is_sampled
        if self._judge is not None and is_sampled:
            self._judge.check(judged)
        if not rollouts.is_returned:
            self._data.put_back(rollouts.unfinished)
            rollouts.is_returned = True
        staleness = {s.id: sent.staleness(s, step) for s in judged} if is_sampled else {}
        stale = {sample_id for sample_id, age in staleness.items() if age > max_staleness}
        # Synchronous training has stale samples only after an attempt with max_staleness; otherwise
        # it omits the metric.
        checked = stale if stale or max_staleness else None
        admitted = admit(
            rollouts.groups(), config.admission, min_group_size=self._min_group_size, stale=checked
        )
        kept = admitted.groups[: rollouts.enough]
        if rollouts.enough is not None:
            admitted.counts["surplus_groups"] = (
                len(admitted.groups) - len(kept) + len(rollouts.unfinished)
            )
        if config.data.shuffle_labels:
            kept = shuffle_labels(kept, seed=config.run.seed, step=step)
        if is_sampled:
            self._to_write = partial(self._write, rollouts, judged)
        facts, tokens = tabulate(kept, routing=config.policy.routing)
        arrays = facts_to_arrays(facts) | tokens_to_arrays(tokens)
        metrics = rollout_metrics(judged, admitted.counts) | {"data/epoch": float(rollouts.epoch)}
        if config.admission.refill_rounds:
            metrics["admission/refills"] = float(rollouts.refills)
        if max_staleness:
            trained = [sample for group in kept for sample in group.samples]
            metrics |= staleness_metrics(trained, [staleness[sample.id] for sample in trained])
        logger.info(
            "step %d: %d samples in %.2f s", step, len(judged), time.perf_counter() - rollouts.since
        )
        # Rank 0 keeps it, so that a run whose driver dies later can still save the checkpoint after
        # this step.
        order = None if max_staleness else self._data.order.state_dict()
        return {"kind": "groups", "ids": facts.ids, "metrics": metrics, "order": order}, arrays

    def evaluation(self, rollouts: StepRollouts, benchmarks: Sequence[PromptSet]) -> Message:
        """The counts of every problem. Raises RewardError if too many samples could not be judged."""
        judged = rollouts.in_order()
        assert self._judge is not None
        self._judge.check(judged)
        self._write(rollouts, judged)
        of_problem = {group.prompt_id: group.samples for group in rollouts.groups()}
        counts = {
            benchmark.name: [
                asdict(count_problem(prompt.id, of_problem[prompt.id]))
                for prompt in benchmark.prompts
            ]
            for benchmark in benchmarks
        }
        return {"kind": "evaluation", "benchmarks": counts}, {}

    def write_pending(self) -> None:
        """Writes the samples of the last step.

        Called between its response and the next request: rank 0 trains then, and writes the step's
        metrics later.
        """
        if self._to_write is not None:
            self._to_write()
            self._to_write = None

    def _write(self, rollouts: StepRollouts, samples: Sequence[Sample]) -> None:
        path = rollout_path(self._run_dir, rollouts.step, "step" if rollouts.is_train else "eval")
        write_rollouts(path, samples, rollouts.by_id, self._decode)
        if self._config.logging.save_tokens:
            write_record(path.with_suffix(RECORD_SUFFIX), samples)
