"""The trained model on Megatron-Core: log-probs, scores, one update, export."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

from pacs_megatron.batching.split import (
    one_by_one,
    plan_metrics,
    plan_microbatches,
    split_groups_only,
)
from pacs_megatron.config.schema import (
    OffloadKind,
    OptimizerOptions,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.contracts import MicroBatchPlan, MiniBatch, Prepared, SampleFacts, UpdateReport
from pacs_megatron.contracts.protocols import LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.models import ModelSpec, weight_table
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.objectives.shared.groups import build_table
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import all_gather_by_index, broadcast_json
from pacs_megatron.policy import precision, schedule, weights
from pacs_megatron.policy.microbatch import (
    MAX_LOG_RATIO,
    MicroBatch,
    SampleStatistics,
    UpdateLoss,
    build_microbatch,
    build_record,
    coupled,
)
from pacs_megatron.policy.model import (
    PolicyModel,
    build_chunks,
    transformer_config,
    unwrap,
    wrap_for_training,
)
from pacs_megatron.policy.offload import Offload
from pacs_megatron.policy.optimizer import Optimizer
from pacs_megatron.policy.routing import Routes, Routing
from pacs_megatron.policy.stoppable import StoppablePass, StopTest

logger = logging.getLogger(__name__)


class MegatronPolicy:
    """The policy on one rank.

    Every public method is collective. `version` counts updates of the weights.
    """

    loss_function = UpdateLoss

    def __init__(
        self,
        spec: ModelSpec,
        rank: Rank,
        *,
        parallel: ParallelOptions,
        precision_options: PrecisionOptions,
        optimizer: OptimizerOptions,
        clip_grad: float,
        total_updates: int,
        tokens_per_microbatch: int,
        temperature: float = 1.0,
        offload: OffloadKind = "none",
    ) -> None:
        machine = precision.inspect_machine()
        precision.check(precision_options, machine)
        if rank.rank == 0:
            logger.info("%s", precision.describe(precision_options, machine))
        self.spec = spec
        self.rank = rank
        self.table = weight_table(spec)
        self.config = transformer_config(spec, parallel, precision_options, machine)
        self.version = 0
        self.compare_with_sampler = True
        """whether to report the distance between the sampler's and the trainer's log-probs; False
        for demonstrations
        """
        self.mismatch_threshold = 0.0  # nats, for `mismatch/over_frac`
        self.num_passes: Counter[str] = Counter()
        """forward-only passes over a mini-batch so far, by kind: `step_start`, `reference`, `score`
        """
        self.routes: Routes | None = None
        """experts of the last `step_start` or score pass, of this rank's samples; None for a model
        without experts
        """
        self._tokens_per_microbatch = tokens_per_microbatch
        sequence_multiple = parallel.tp if parallel.sequence_parallel else 1
        self._multiple = precision.token_multiple(precision_options) * sequence_multiple
        if parallel.megatron.tp_comm_overlap:
            self._multiple = (
                -(-tokens_per_microbatch // (parallel.cp * self._multiple)) * self._multiple
            )
            precision.start_userbuffers(self.config, self._multiple)
        fp32_head = precision_options.head == "fp32"
        dtype = self.config.params_dtype
        chunks = build_chunks(
            spec, self.table.padded_vocab, self.config, machine, rank, fp32_head=fp32_head
        )
        self.chunks = wrap_for_training(chunks, self.config, parallel, machine)
        megatron_options = precision.megatron_options(
            OptimizerConfig, parallel.megatron, machine, dtype
        )
        megatron_options["use_distributed_optimizer"] = parallel.distributed_optimizer
        self.optimizer = Optimizer(
            optimizer,
            self.chunks,
            self.config,
            clip_grad=clip_grad,
            total_updates=total_updates,
            megatron_options=megatron_options,
        )
        self.offload = Offload(offload, self.chunks, self.optimizer, rank.device)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.reference: weights.Snapshot | None = None
        for model in self.models:
            model.temperature = temperature

    @property
    def models(self) -> list[PolicyModel]:
        """The Megatron models inside the wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    def load_weights(self, read: Callable[[str], Tensor]) -> None:
        """Fills the model from Hugging Face tensors (`read(name)`), and the optimizer's master
        weights from the model.
        """
        weights.load(self.models, self.table, read)
        self.optimizer.reload_weights()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) in the table's order, on every rank.

        Every rank must iterate to the end.
        """
        weights.complete(self.chunks)
        return weights.export(self.models, self.table, self.offload.readable)

    def take_reference(self, *, reset_optimizer: bool) -> None:
        """Sets the reference to the current policy; `reset_optimizer` also sets Adam's moments to
        0.
        """
        weights.complete(self.chunks)
        if self.reference is None:
            self.reference = weights.Snapshot(self.chunks, self.offload.readable)
        else:
            self.reference.take()
        if reset_optimizer:
            self.optimizer.reset_moments()

    def _batches(self, minibatch: MiniBatch, *, with_tables: bool = False) -> list[MicroBatch]:
        together = minibatch.plan.together
        return [
            self._batch(minibatch, rows, with_table=with_tables and bool(together[rows].all()))
            for rows in minibatch.plan.by_dp_rank[self.rank.dp]
        ]

    def _batch(
        self, minibatch: MiniBatch, rows: np.ndarray, *, with_table: bool = False
    ) -> MicroBatch:
        return build_microbatch(
            minibatch, rows, multiple=self._multiple, device=self.rank.device, with_table=with_table
        )

    def _forward(
        self, minibatch: MiniBatch, should_stop: StopTest | None, routing: Routing | None = None
    ) -> tuple[list[MicroBatch], list[Tensor]]:
        """This rank's micro-batches and their log-probs [local] (on the last pipeline stage)."""
        batches = self._batches(minibatch)
        if should_stop is None:
            return batches, schedule.forward(self.chunks, batches, routing=routing)
        stoppable = StoppablePass(
            batches=batches,
            padding=self._batch(minibatch, np.empty(0, dtype=np.int64)),
            should_stop=should_stop,
            num_polls=min(len(own) for own in minibatch.plan.by_dp_rank),
            # One more than pp, so that data-parallel replicas do not wait for each other.
            lag=self.rank.layout.pp + 1,
            group=self.rank.control,
        )
        return batches, schedule.forward(self.chunks, batches, stoppable, routing)

    def logprobs(
        self, minibatch: MiniBatch, source: LogprobSource, should_stop: StopTest | None = None
    ) -> dict[int, np.ndarray]:
        """log pi of this rank's samples: row -> float32 [response], nats; empty except on the last
        pipeline stage.

        Polls `should_stop` at each micro-batch on every rank; raises Interrupted on all ranks after
        a stop request on one.
        """
        self.num_passes[source] += 1
        swapped: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if source == "reference":
            assert self.reference is not None, "take_reference comes first"
            weights.complete(self.chunks)
            swapped = self.reference.swapped_in()
        given = minibatch.routes if source == "step_start" else None
        routing = None if source == "reference" else self._routing(given)
        with swapped:
            batches, results = self._forward(minibatch, should_stop, routing)
        self.routes = self.routes if routing is None else given or routing.recorded()
        found: dict[int, np.ndarray] = {}
        for batch, logprobs in zip(batches, results, strict=False):
            pieces = np.split(
                batch.gather(logprobs).cpu().numpy(), np.cumsum(batch.response_lens)[:-1]
            )
            found.update({int(row): piece for row, piece in zip(batch.rows, pieces, strict=False)})
        return found

    def scores(
        self, minibatch: MiniBatch, objective: Objective, should_stop: StopTest | None = None
    ) -> Tensor:
        """r_j of the whole mini-batch, float64 [n] on the CPU, the same bits on every rank: a
        forward-only pass. Raises Interrupted as `logprobs`, and NonFiniteError.
        """
        statistics = self._score_pass(minibatch, objective, {"score"}, should_stop)
        return self._gathered(statistics, minibatch.facts, np.arange(minibatch.facts.num_samples))[
            "score"
        ]

    def _routing(self, given: Routes | None) -> Routing | None:
        return None if self.spec.moe is None else Routing(self.spec, self.models, given)

    def _score_pass(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        names: Collection[Statistic],
        should_stop: StopTest | None,
    ) -> SampleStatistics:
        self.num_passes["score"] += 1
        statistics = SampleStatistics(names=names)
        routing = self._routing(minibatch.routes)
        with torch.no_grad():
            for batch, logprobs in zip(
                *self._forward(minibatch, should_stop, routing), strict=False
            ):
                record = build_record(batch, logprobs, None, is_step_start=minibatch.index == 0)
                statistics.add(batch, record, objective)
        self.routes = minibatch.routes or (None if routing is None else routing.recorded())
        return statistics

    def score_noise(
        self,
        minibatch: MiniBatch,
        objective: Pacs,
        rows: np.ndarray,
        should_stop: StopTest | None = None,
    ) -> dict[str, float]:
        """Metrics of the difference of the scores of `rows` (whole groups) between two packings,
        with equal weights. Forward passes only. Empty if every sample fills a micro-batch, so both
        packings are the same.
        """
        facts = minibatch.facts
        plan = self._plan_of(minibatch, rows)
        if all(len(own) < 2 for batches in plan.by_dp_rank for own in batches):
            return {}
        # With sequence parallelism an earlier pass recorded this rank's tokens of its own packing
        # only.
        routes = None if minibatch.tokens.routes is None else minibatch.routes
        packed = replace(minibatch, index=1, plan=plan, routes=routes)
        packed = replace(
            packed, step_start_logprobs=self.logprobs(packed, "step_start", should_stop)
        )
        before, after = (
            self._gathered(self._score_pass(part, objective, {"score"}, should_stop), facts, rows)[
                "score"
            ]
            for part in (packed, replace(packed, plan=one_by_one(plan, self.rank.layout)))
        )
        return objective.score_noise(before, after, facts, rows)

    def _gathered(
        self, statistics: SampleStatistics, facts: SampleFacts, rows: np.ndarray
    ) -> dict[Statistic, Tensor]:
        """float64 [n] of each statistic, the same bits on every rank; NaN outside `rows`.

        The pass must have all `rows`. Raises NonFiniteError on all ranks.
        """
        gathered: dict[Statistic, Tensor] = {}
        for name in sorted(statistics.names):
            values = all_gather_by_index(
                statistics.by_row(name), facts.num_samples, group=self.rank.control
            )
            bad = (~torch.isfinite(values[rows])).nonzero()[:, 0].tolist()
            if bad:
                raise NonFiniteError(
                    f"the {name} of sample {facts.ids[rows[bad[0]]]} is not finite; no weight was "
                    "changed"
                )
            gathered[name] = values
        return gathered

    def with_sample_kl(
        self, facts: SampleFacts, minibatches: Sequence[MiniBatch], objective: Objective
    ) -> SampleFacts:
        """The facts of a step with `Objective.sample_kl` of each sample, the same bits on every
        rank. Collective.
        """
        own: list[dict[int, float]] = []
        for minibatch in minibatches:
            starts = minibatch.step_start_logprobs
            references = minibatch.reference_logprobs
            assert starts is not None and references is not None, (
                "the objective declares both passes"
            )
            own.append(
                {row: objective.sample_kl(start, references[row]) for row, start in starts.items()}
            )
        return replace(facts, kl_to_reference=self._by_sample(facts, minibatches, own))

    def _by_sample(
        self, facts: SampleFacts, minibatches: Sequence[MiniBatch], own: Sequence[dict[int, float]]
    ) -> np.ndarray:
        """float64 [n], as `facts`, from this rank's rows of each mini-batch.

        The same bits on every rank. Collective.
        """
        found: dict[str, float] = {}
        for minibatch, values in zip(minibatches, own, strict=True):
            gathered = all_gather_by_index(
                values, minibatch.facts.num_samples, group=self.rank.control
            )
            found |= zip(minibatch.facts.ids, gathered.tolist(), strict=True)
        return np.array([found[sample_id] for sample_id in facts.ids])

    def update(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        step_inputs: Any,
        should_stop: StopTest | None = None,
    ) -> UpdateReport:
        """Runs one optimizer update on the whole mini-batch.

        Coefficients that depend on this update's log-probs come from the forward of the micro-batch
        that contains the whole group. A score pass computes those of split groups. Before any
        weight changes, raises NonFiniteError on every rank if a statistic, coefficient or gradient
        is not finite, and Interrupted as `logprobs`.
        """
        names = objective.statistics(minibatch.index)
        before: dict[Statistic, Tensor] = {}
        known: dict[str, Tensor] = {}
        if names:
            minibatch = _with_coupled_rows(minibatch, objective)
            split = np.flatnonzero(~minibatch.plan.together)
            known = objective.known(minibatch.facts, step_inputs)
            prepared = Prepared(per_sample={})
            if len(split):
                subset = replace(
                    minibatch, plan=split_groups_only(minibatch.plan, self.rank.layout)
                )
                statistics = self._score_pass(subset, objective, names, should_stop)
                before = self._gathered(statistics, minibatch.facts, split)
                table = build_table(minibatch.facts, split)
                of_rows = {name: values[table.rows] for name, values in before.items()}
                per_sample = coupled(objective, table, of_rows, known, minibatch.facts.num_samples)
                prepared = Prepared(per_sample=per_sample)
                minibatch = replace(minibatch, routes=self.routes)
        else:
            prepared = objective.prepare(None, minibatch.facts, step_inputs)
            minibatch = self._without_zero_gradient(minibatch, prepared)
        for name, values in prepared.per_sample.items():
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(
                    f"the objective's '{name}' is not finite; no weight was changed"
                )
        loss = self.loss_function(
            prepared=replace(
                prepared,
                per_sample={k: v.to(self.rank.device) for k, v in prepared.per_sample.items()},
            ),
            known={name: values.to(self.rank.device) for name, values in known.items()},
            objective=objective,
            statistics=SampleStatistics(names=names),
            is_step_start=minibatch.index == 0,
            mismatch_threshold=self.mismatch_threshold,
        )
        reports = self._forward_backward(minibatch, loss)
        drift: dict[str, float] = {}
        if names:
            found = self._gathered(
                loss.statistics, minibatch.facts, np.arange(minibatch.facts.num_samples)
            )
            if "score" in before:
                change = (found["score"] - before["score"])[split].abs().max()
                drift[f"{objective.name}/score_drift_max"] = float(change)
            for name, values in before.items():
                found[name][split] = values[split]
            ratios = found["sampler_ratio"].numpy() if "sampler_ratio" in found else None
            facts = replace(minibatch.facts, log_ratio_to_sampler=ratios)
            prepared = objective.prepare(found.get("score"), facts, step_inputs)
        metrics, denominators = self._metrics(prepared, self._sum_reports(reports))
        passes_and_plan = {
            "passes/step_start": float(minibatch.step_start_logprobs is not None),
            "passes/reference": float(minibatch.reference_logprobs is not None),
            "passes/score": float(bool(before)),
        } | plan_metrics(minibatch.plan, minibatch.facts, self.rank.layout)
        norm, lr = self.optimizer.step()
        self.version += 1
        return UpdateReport(
            grad_norm=norm,
            is_clipped=self.optimizer.clips(norm),
            lr=lr,
            metrics=metrics | drift | passes_and_plan,
            denominators=denominators | dict.fromkeys(passes_and_plan, 1.0),
        )

    def _forward_backward(
        self, minibatch: MiniBatch, loss: UpdateLoss
    ) -> list[Mapping[str, Tensor]]:
        """Computes the gradients of the mini-batch; returns the reports of `loss`."""
        self.optimizer.zero_grad(self.chunks)
        batches = self._batches(minibatch, with_tables=bool(loss.statistics.names))
        routing = None if minibatch.routes is None else self._routing(minibatch.routes)
        return schedule.forward_backward(self.chunks, batches, loss, routing)

    def _metrics(
        self, prepared: Prepared, sums: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(metrics, their denominators other than the number of samples)"""
        metrics = {
            name: value for name, value in sums.items() if not name.startswith(("sum/", "max/"))
        }
        metrics |= prepared.metrics
        metrics["objective/loss"] = sums["sum/loss"] if prepared.loss is None else prepared.loss
        if not (num_tokens := sums["sum/tokens"]):
            return metrics, dict(prepared.denominators)
        entropy = sums["sum/entropy"] / num_tokens
        logprob = sums["sum/logprob"] / num_tokens
        by_token = {"policy/entropy": entropy, "policy/logprob_mean": logprob}
        if self.compare_with_sampler:
            by_token |= _mismatch_metrics(sums, num_tokens)
        return metrics | by_token, {**prepared.denominators, **dict.fromkeys(by_token, num_tokens)}

    def _without_zero_gradient(self, minibatch: MiniBatch, prepared: Prepared) -> MiniBatch:
        """The mini-batch without the samples whose gradient is exactly zero, if no earlier pass has
        used the plan. The coefficients already contain N. After a log-prob pass the plan stays, so
        that the shapes stay the same.
        """
        if prepared.zero_gradient is None or minibatch.step_start_logprobs is not None:
            return minibatch
        return replace(
            minibatch,
            plan=self._plan_of(minibatch, np.flatnonzero(~prepared.zero_gradient.numpy())),
        )

    def _plan_of(self, minibatch: MiniBatch, rows: np.ndarray) -> MicroBatchPlan:
        """A plan of `rows` alone; each sample stays on the rank that has its tokens."""
        return plan_microbatches(
            minibatch.facts,
            layout=self.rank.layout,
            tokens_per_microbatch=self._tokens_per_microbatch,
            rows=rows,
            owner_of_row=minibatch.plan.owners(minibatch.facts.num_samples),
        )

    def _sum_reports(self, reports: list[Mapping[str, Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks, the same on every rank. Collective."""
        # Only the last pipeline stage has reports.
        names = sorted(reports[0]) if reports else []
        names = broadcast_json(
            names, src=self.rank.model_parallel_ranks[-1], group=self.rank.model_parallel
        )
        counted = reports if self.rank.tp == 0 else []
        totals, largest = torch.zeros(2, len(names), dtype=torch.float64)
        for report in counted:
            values = torch.tensor([float(report[name]) for name in names], dtype=torch.float64)
            totals += values
            largest = torch.maximum(largest, values)
        dist.all_reduce(totals, group=self.rank.control)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.rank.control)
        pairs = zip(names, totals.tolist(), largest.tolist(), strict=True)
        return {name: top if name.startswith("max/") else total for name, total, top in pairs}


def _mismatch_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Distance between trainer and sampler log-probs; means over the `num_tokens` tokens of the
    update's forward.
    """
    return {
        "mismatch/logprob_abs_mean": sums["sum/mismatch_abs"] / num_tokens,
        "mismatch/logprob_abs_max": sums["max/mismatch_abs"],
        "mismatch/ratio": math.exp(min(sums["sum/mismatch_ratio"] / num_tokens, MAX_LOG_RATIO)),
        "mismatch/kl": sums["sum/mismatch_kl"] / num_tokens,
        "mismatch/over_frac": sums["sum/mismatch_over"] / num_tokens,
    }


def _with_coupled_rows(minibatch: MiniBatch, objective: Objective) -> MiniBatch:
    """`minibatch` with a plan whose `together` marks the samples that share a micro-batch with all
    coupled samples. With coupling `sample` that is every sample, because a micro-batch has all
    tokens of a sample.
    """
    if objective.coupling == "group":
        return minibatch
    together = np.full(minibatch.facts.num_samples, objective.coupling != "minibatch")
    return replace(minibatch, plan=replace(minibatch.plan, together=together))
