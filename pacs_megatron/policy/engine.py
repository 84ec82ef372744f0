"""The trained model on Megatron-Core: log-probs, scores, one update, export. Implements contracts.PolicyEngine."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from pacs_megatron.batching.split import plan_microbatches
from pacs_megatron.config.schema import OptimizerOptions, ParallelOptions, PrecisionOptions
from pacs_megatron.contracts import MiniBatch, Objective, Prepared, UpdateReport
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.models import ModelSpec, weight_table
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import all_gather_by_index, broadcast_json
from pacs_megatron.policy import passes, precision, weights
from pacs_megatron.policy.microbatch import MicroBatch, build_microbatch
from pacs_megatron.policy.model import PolicyModel, build_chunks, transformer_config, unwrap, wrap_for_training
from pacs_megatron.policy.optimizer import Optimizer
from pacs_megatron.policy.snapshot import Snapshot
from pacs_megatron.policy.stoppable import StoppablePass, StopTest
from pacs_megatron.policy.update_loss import MAX_LOG_RATIO, UpdateLoss, score_sums

logger = logging.getLogger(__name__)


class MegatronPolicy:
    """One rank's part of the policy. Every public method is collective. `version` counts updates of the weights."""

    def __init__(  # noqa: PLR0913  (keyword-only, and each from its own section of the config)
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
        """report how far the sampler's log-probs are from the trainer's; off where nothing was sampled"""
        self.mismatch_threshold = 0.0
        """nats, for `mismatch/over_frac`"""
        self.num_score_passes = 0
        """counted, so that a test (and a user) can see when none was needed"""
        self._tokens_per_microbatch = tokens_per_microbatch
        sequence_multiple = parallel.tp if parallel.sequence_parallel else 1
        self._multiple = math.lcm(sequence_multiple, precision.token_multiple(precision_options) * sequence_multiple)
        chunks = build_chunks(spec, self.table.padded_vocab, self.config, machine, rank)
        self.chunks = wrap_for_training(
            chunks, self.config, distributed_optimizer=parallel.distributed_optimizer, overlap=False
        )
        self.optimizer = Optimizer(
            optimizer,
            self.chunks,
            self.config,
            clip_grad=clip_grad,
            total_updates=total_updates,
            distributed=parallel.distributed_optimizer,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = None
        self.reference: Snapshot | None = None
        for model in self.models:
            model.temperature = temperature

    @property
    def models(self) -> list[PolicyModel]:
        """The Megatron models inside the wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    # ------------------------------------------------------------------------------------------------------- weights
    def load_weights(self, read: Callable[[str], Tensor]) -> None:
        """Fill the model from Hugging Face tensors (`read(name)`), and the optimizer's master weights from the model."""
        weights.load(self.models, self.table, read)
        self.optimizer.megatron.reload_model_params()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) in the table's order, on every rank; iterate to the end on all ranks."""
        return weights.export(self.models, self.table)

    def take_reference(self, *, reset_optimizer: bool) -> None:
        """The reference becomes the current policy; at a reset Adam's moments go to 0."""
        if self.reference is None:
            self.reference = Snapshot(self.chunks)
        else:
            self.reference.take()
        if reset_optimizer:
            self.optimizer.reset_moments()

    # -------------------------------------------------------------------------------------------------------- passes
    def _batches(self, minibatch: MiniBatch) -> list[MicroBatch]:
        return [
            build_microbatch(minibatch, rows, multiple=self._multiple, device=self.rank.device)
            for rows in minibatch.plan.by_dp_rank[self.rank.dp]
        ]

    def _forward(self, minibatch: MiniBatch, should_stop: StopTest | None) -> tuple[list[MicroBatch], list[Tensor]]:
        batches = self._batches(minibatch)
        if should_stop is None:
            return batches, passes.forward(self.chunks, batches)
        none = np.empty(0, dtype=np.int64)
        stoppable = StoppablePass(
            batches,
            build_microbatch(minibatch, none, multiple=self._multiple, device=self.rank.device),
            should_stop,
            num_polls=min(len(own) for own in minibatch.plan.by_dp_rank),
            # One more than needed, so that data-parallel replicas do not march in step.
            lag=self.rank.layout.pp + 1,
            group=self.rank.control,
        )
        return batches, passes.forward(self.chunks, batches, stoppable)

    def logprobs(
        self, minibatch: MiniBatch, source: LogprobSource, should_stop: StopTest | None = None
    ) -> dict[int, np.ndarray]:
        """log pi of this rank's samples: row -> float32 [response], nats. Filled on the last pipeline stage only.

        With `should_stop`, asked at each micro-batch on every rank, raises Interrupted on all ranks when one says yes.
        """
        if source == "reference":
            assert self.reference is not None, "take_reference comes first"
            with self.reference.swapped_in():
                batches, results = self._forward(minibatch, should_stop)
        else:
            batches, results = self._forward(minibatch, should_stop)
        found: dict[int, np.ndarray] = {}
        for batch, logprobs in zip(batches, results, strict=False):
            pieces = np.split(logprobs.cpu().numpy(), np.cumsum(batch.response_lens)[:-1])
            found.update({int(row): piece for row, piece in zip(batch.rows, pieces, strict=False)})
        return found

    def with_log_ratio_to_sampler(self, minibatch: MiniBatch) -> MiniBatch:
        """`part` whose facts carry mean(log pi_step_start - log pi_sampler) of every sample."""
        assert minibatch.step_start_logprobs is not None
        bounds = minibatch.tokens.response_offsets
        means = {
            int(row): float(
                np.mean(
                    minibatch.step_start_logprobs[int(row)].astype(np.float64)
                    - minibatch.tokens.sampler_logprobs[bounds[at] : bounds[at + 1]]
                )
            )
            for at, row in enumerate(minibatch.tokens.index)
            if int(row) in minibatch.step_start_logprobs
        }
        ratios = self._gather_by_row(means, minibatch.facts.num_samples).numpy()
        return replace(minibatch, facts=replace(minibatch.facts, log_ratio_to_sampler=ratios))

    def scores(self, minibatch: MiniBatch, objective: Objective, should_stop: StopTest | None = None) -> Tensor:
        """r_j of the whole mini-batch, float64 [n] on the CPU, the same bits on every rank. One forward, no grad.

        With `should_stop`, asked at each micro-batch on every rank, raises Interrupted on all ranks when one says yes.
        """
        self.num_score_passes += 1
        batches, results = self._forward(minibatch, should_stop)
        sums: dict[int, float] = {}
        for batch, logprobs in zip(batches, results, strict=False):
            sums.update(score_sums(minibatch, batch, logprobs, objective))
        scores = self._gather_by_row(sums, minibatch.facts.num_samples)
        if not bool(torch.isfinite(scores).all()):
            worst = minibatch.facts.ids[int((~torch.isfinite(scores)).nonzero()[0])]
            raise NonFiniteError(f"the score of sample {worst} is not finite; no weight was changed")
        return scores

    def _gather_by_row(self, values: dict[int, float], size: int) -> Tensor:
        index = np.fromiter(values.keys(), dtype=np.int64, count=len(values))
        numbers = np.fromiter(values.values(), dtype=np.float64, count=len(values))
        return all_gather_by_index(index, numbers, size, group=self.rank.control, device=torch.device("cpu"))

    # -------------------------------------------------------------------------------------------------------- update
    def update(
        self, minibatch: MiniBatch, prepared: Prepared, objective: Objective, scores: Tensor | None
    ) -> UpdateReport:
        """One optimizer update on the whole mini-batch.

        Raises NonFiniteError on every rank, before any weight changes, when a coefficient or gradient is not finite.
        """
        _check_finite(prepared)
        minibatch = self._without_zero_gradient(minibatch, prepared, scores)
        self.optimizer.zero_grad(self.chunks)
        loss = UpdateLoss(
            minibatch=minibatch,
            prepared=prepared,
            objective=objective,
            with_scores=scores is not None,
            mismatch_threshold=self.mismatch_threshold,
        )
        for model in self.models:
            model.want_entropy = True
        batches = self._batches(minibatch)
        reports = passes.forward_backward(self.chunks, batches, loss)
        for model in self.models:
            model.want_entropy = False
        sums = self._sum_reports(reports)
        metrics = {name: value for name, value in sums.items() if not name.startswith(("sum/", "max/"))}
        metrics |= prepared.metrics
        metrics["objective/loss"] = sums["sum/loss"] if prepared.loss is None else prepared.loss
        num_tokens = sums["sum/tokens"]
        if num_tokens:
            metrics["policy/entropy"] = sums["sum/entropy"] / num_tokens
            metrics["policy/logprob_mean"] = sums["sum/logprob"] / num_tokens
            if self.compare_with_sampler:
                metrics |= _mismatch_metrics(sums, num_tokens)
        if scores is not None:
            difference = self._gather_by_row(loss.scores, minibatch.facts.num_samples) - scores
            metrics[f"{objective.name}/score_drift_max"] = float(difference.abs().max())
        norm, lr = self.optimizer.step()
        self.version += 1
        return UpdateReport(grad_norm=norm, is_clipped=self.optimizer.clips(norm), lr=lr, metrics=metrics)

    def _without_zero_gradient(self, minibatch: MiniBatch, prepared: Prepared, scores: Tensor | None) -> MiniBatch:
        """Leave samples out whose gradient is exactly zero, where no earlier pass fixed the plan.

        Their log-probs would be computed for nothing; N is in the coefficients already. After a score pass the plan
        stays as it was, or the update's forward would not reproduce the scores bit for bit.
        """
        if prepared.zero_gradient is None or scores is not None or minibatch.step_start_logprobs is not None:
            return minibatch
        rows = np.flatnonzero(~prepared.zero_gradient.numpy())
        plan = plan_microbatches(
            minibatch.facts,
            layout=self.rank.layout,
            tokens_per_microbatch=self._tokens_per_microbatch,
            rows=rows,
            owner_of_row=minibatch.plan.owners(minibatch.facts.num_samples),
        )
        return replace(minibatch, plan=plan)

    def _sum_reports(self, reports: list[Mapping[str, Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks, the same on every rank. Collective."""
        counts = len(reports) > 0 and parallel_state.get_tensor_model_parallel_rank() == 0
        names: list[str] = sorted(reports[0]) if reports else []
        names = _broadcast_names(names, self.rank)
        totals, largest = torch.zeros(2, len(names), dtype=torch.float64)
        if counts:
            for report in reports:
                values = torch.tensor([float(report[name]) for name in names], dtype=torch.float64)
                totals += values
                largest = torch.maximum(largest, values)
        dist.all_reduce(totals, group=self.rank.control)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.rank.control)
        pairs = zip(names, totals.tolist(), largest.tolist(), strict=True)
        return {name: top if name.startswith("max/") else total for name, total, top in pairs}


def _mismatch_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """How far trainer and sampler disagree on the same tokens; means over `num_tokens` trained tokens."""
    return {
        "mismatch/logprob_abs_mean": sums["sum/mismatch_abs"] / num_tokens,
        "mismatch/logprob_abs_max": sums["max/mismatch_abs"],
        "mismatch/ratio": math.exp(min(sums["sum/mismatch_ratio"] / num_tokens, MAX_LOG_RATIO)),
        "mismatch/kl": sums["sum/mismatch_kl"] / num_tokens,
        "mismatch/over_frac": sums["sum/mismatch_over"] / num_tokens,
    }


def _broadcast_names(names: list[str], rank: Rank) -> list[str]:
    """Metric names from the last stage to the earlier ones, which have no reports."""
    if rank.layout.pp == 1:
        return names
    source = rank.model_parallel_ranks[-1]
    received: list[str] = broadcast_json(names, src=source, group=rank.model_parallel)
    return received


def _check_finite(prepared: Prepared) -> None:
    for name, values in prepared.per_sample.items():
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"the objective's '{name}' is not finite; no weight was changed")
