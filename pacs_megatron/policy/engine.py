"""The trained model on Megatron-Core: log-probs, scores, one update, export."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

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
from pacs_megatron.batching.tables import ranges
from pacs_megatron.config.schema import (
    LoraOptions,
    OffloadKind,
    OptimizerOptions,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.contracts import MicroBatchPlan, MiniBatch, Prepared, SampleFacts, UpdateReport
from pacs_megatron.contracts.protocols import LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.models import ModelSpec, weight_table
from pacs_megatron.models.flops import PassedTokens
from pacs_megatron.models.lora import all_matrices, check_targets
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.shared.base import Objective, StepInputs
from pacs_megatron.objectives.shared.groups import build_table
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import all_gather_by_index, broadcast_json
from pacs_megatron.policy import lora, precision, schedule, weights
from pacs_megatron.policy.microbatch import (
    MAX_MISMATCH_LOG_RATIO,
    MicroBatch,
    MicroBatches,
    SampleStatistics,
    UpdateLoss,
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
T = TypeVar("T")
Span = Callable[[str], contextlib.AbstractContextManager[None]]
"""Opens a span with a name, such as `Timer.span`"""


class MegatronPolicy:
    """The policy on one rank.

    Every public method is collective. `version` counts updates of the weights.
    """

    loss_function = UpdateLoss

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
        offload: OffloadKind = "none",
        adapters: LoraOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Builds the model with arbitrary weights, and its optimizer.

        With `adapters` only these are trained; they have their initial values.

        Args:
            spec: the model.
            rank: this rank.
            parallel: of the section `parallel`.
            precision_options: of the section `precision`.
            optimizer: of the section `optimizer`.
            clip_grad: maximum global gradient norm; 0 disables clipping.
            total_updates: planned updates of the run, for the schedule.
            tokens_per_microbatch: the largest number of tokens in a micro-batch of new plans.
            temperature: divides the logits.
            offload: `policy.offload`.
            adapters: `policy.lora`; None trains all weights.
            seed: of the adapters' initial values.

        Raises:
            ConfigError: if this machine or Megatron-Core does not support the options.
        """
        machine = precision.inspect_machine()
        precision.check(precision_options, machine)
        if rank.rank == 0:
            logger.info("%s", precision.describe(precision_options, machine))

        self.spec = spec
        self.rank = rank
        self.table = weight_table(spec)
        self.adapters = adapters
        self.starts_at_base = adapters is not None
        """whether the policy of the start is the model without adapters"""
        if adapters is not None:
            check_targets(self.table, adapters)
        self.config = transformer_config(spec, parallel, precision_options, machine)
        self.version = 0
        self.compare_with_sampler = True
        """whether to report the distance between the sampler's and the trainer's log-probs; False
        for demonstrations
        """
        self.mismatch_threshold = 0.0
        """nats, for `mismatch/over_frac`"""
        self.num_passes: Counter[str] = Counter()
        """forward-only passes over a mini-batch so far, by kind: `step_start`, `reference`, `score`
        """
        self.forward_tokens = PassedTokens()
        """tokens of all ranks that passed the model in forward-only passes, since `take_tokens`"""
        self.trained_tokens = PassedTokens()
        """the same of updates"""
        self.routes: Routes | None = None
        """experts of the last `step_start` or score pass, of this rank's samples; None for a model
        without experts
        """
        self.measures_entropy = False
        """whether `step_start` passes compute entropies"""
        self.measures_certainty = False
        """whether `step_start` passes compute certainties and logits"""
        self.certainty: dict[str, Tensor] = {}
        """`certainty` and `logit`, response columns of the last `step_start` pass, if measured"""
        self.step_start_entropy: tuple[float, float] = (0.0, 0.0)
        """sum of the entropies in nats and number of tokens of the last `step_start` pass, over all
        ranks
        """
        self._tokens_per_microbatch = tokens_per_microbatch

        sequence_multiple = parallel.tp if parallel.sequence_parallel else 1
        self._multiple = precision.token_multiple(precision_options) * sequence_multiple
        """the number of input tokens of a rank in a micro-batch is a multiple of this"""
        if parallel.megatron.tp_comm_overlap:
            # The buffers have one size, so every micro-batch is padded to the largest one.
            num_multiples = -(-tokens_per_microbatch // (parallel.cp * self._multiple))
            self._multiple *= num_multiples
            precision.start_userbuffers(self.config, self._multiple)

        chunks = build_chunks(
            spec,
            self.table.padded_vocab,
            self.config,
            machine,
            rank,
            fp32_head=precision_options.head == "fp32",
            has_adapters=adapters is not None,
        )
        if adapters is not None:
            for model in map(unwrap, chunks):
                lora.attach(
                    model,
                    self.table,
                    adapters,
                    name_of=partial(weights.global_name, model=model, table=self.table),
                    seed=seed,
                    sequence_parallel=parallel.sequence_parallel,
                )
        self.chunks = wrap_for_training(chunks, self.config, parallel, machine)
        for model in self.models:
            model.temperature = temperature

        megatron_options = precision.megatron_options(
            OptimizerConfig, parallel.megatron, machine, self.config.params_dtype
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
        self.span: Span = _no_span
        """opens a span of an update: `score`, `forward_backward`, `reduce` or `optimizer`"""

        def finalize_gradients(*args: Any, **kwargs: Any) -> None:
            """Reduces the gradients; includes the wait for the slowest rank."""
            with self.span("reduce"):
                finalize_model_grads(*args, **kwargs)

        self.config.finalize_model_grads_func = finalize_gradients
        self.reference: weights.Snapshot | lora.BaseModel | None = None

    @property
    def models(self) -> list[PolicyModel]:
        """The Megatron models inside the wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def num_adapted(self) -> int | None:
        """Elements of the whole model's adapters; None without adapters."""
        if self.adapters is None:
            return None
        return sum(math.prod(each.shape) for each in all_matrices(self.table, self.adapters))

    def on_microbatch(self, hook: Callable[[], None]) -> None:
        """Calls `hook` before every micro-batch of every pass."""
        for model in self.models:
            model.on_microbatch = hook

    def load_weights(self, read: Callable[[str], Tensor]) -> None:
        """Fills the model from Hugging Face tensors, and the optimizer's master weights from it.

        Args:
            read: returns one whole tensor by name.
        """
        weights.load(self.models, self.table, read)
        self.optimizer.reload_weights()

    def load_adapters(self, read: Callable[[str], Tensor]) -> None:
        """Fills the adapters, and the optimizer's master weights from them.

        Args:
            read: returns one whole A or B by PEFT's name.
        """
        self.starts_at_base = False
        for adapter in lora.adapters_of(self.models):
            adapter.load(lambda matrix: read(matrix.name))
        self.optimizer.reload_weights()

    def take_tokens(self) -> tuple[PassedTokens, PassedTokens]:
        """Returns and clears the tokens of forward-only passes and of updates."""
        taken = self.forward_tokens, self.trained_tokens
        self.forward_tokens = PassedTokens()
        self.trained_tokens = PassedTokens()
        return taken

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor) in the table's order, on every rank.

        Every rank must iterate to the end.
        """
        weights.complete(self.chunks)
        return weights.export(self.models, self.table, self.offload.readable)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (PEFT's name, whole tensor) in the table's order, on every rank.

        Every rank must iterate to the end.
        """
        assert self.adapters is not None
        weights.complete(self.chunks)
        return weights.export_adapters(
            self.models, self.table, self.adapters, self.offload.readable
        )

    @property
    def has_snapshot(self) -> bool:
        """Whether the reference has weights of its own, which a checkpoint contains."""
        return isinstance(self.reference, weights.Snapshot)

    def take_reference(self, *, reset_optimizer: bool, is_start: bool = False) -> None:
        """Sets the reference to the current policy.

        Args:
            reset_optimizer: also set Adam's moments to 0.
            is_start: whether the reference is the policy of the start. If that is the model without
                adapters, it is the reference without a copy.
        """
        weights.complete(self.chunks)
        if is_start and self.starts_at_base:
            self.reference = lora.BaseModel(self.models)
        elif isinstance(self.reference, weights.Snapshot):
            self.reference.take()
        else:
            self.reference = weights.Snapshot(self.chunks, self.offload.readable)
        if reset_optimizer:
            self.optimizer.reset_moments()

    def _batches(self, minibatch: MiniBatch, *, with_tables: bool = False) -> MicroBatches:
        """This rank's micro-batches of the plan.

        Args:
            minibatch: with a plan.
            with_tables: whether micro-batches of whole groups get a table, for coefficients that
                depend on the forward.
        """
        return MicroBatches(
            minibatch,
            minibatch.plan.by_dp_rank[self.rank.dp],
            multiple=self._multiple,
            device=self.rank.device,
            with_tables=with_tables,
            num_uses=len(self.chunks),
        )

    def _routing(self, routes: Routes | None) -> Routing | None:
        """The routing of one pass that replays `routes`; None for a model without experts."""
        if self.spec.moe is None:
            return None
        return Routing(self.spec, self.models, routes)

    def _forward(
        self,
        minibatch: MiniBatch,
        should_stop: StopTest | None,
        read: Callable[..., T],
        routing: Routing | None = None,
        *,
        want: Collection[schedule.Output] = (),
    ) -> list[T]:
        """A forward-only pass.

        Args:
            minibatch: with a plan and this rank's tokens.
            should_stop: polled at each micro-batch on every rank; None: never.
            read: see `schedule.forward`.
            routing: of a model with experts; None: the routers select experts.
            want: what the head computes beside log-probs.

        Returns:
            The result of `read` for each micro-batch on the last pipeline stage; [] elsewhere.
        """
        _add_tokens(self.forward_tokens, minibatch)
        batches = self._batches(minibatch)
        stoppable = None
        if should_stop is not None:
            stoppable = StoppablePass(
                batches=batches,
                padding=batches.build(np.empty(0, dtype=np.int64)),
                should_stop=should_stop,
                num_polls=min(len(of_rank) for of_rank in minibatch.plan.by_dp_rank),
                # One more than pp, so that data-parallel replicas do not wait for each other.
                lag=self.rank.layout.pp + 1,
                group=self.rank.control,
            )
        return schedule.forward(self.chunks, batches, read, stoppable, routing, want=want)

    def logprobs(
        self,
        minibatch: MiniBatch,
        source: LogprobSource,
        should_stop: StopTest | None = None,
    ) -> Tensor:
        """log pi of this rank's samples.

        Args:
            minibatch: with a plan and this rank's tokens.
            source: the weights, and whether they are a critic's.
            should_stop: polled at each micro-batch on every rank; None: never.

        Returns:
            fp32 [sum of response lens], nats, a response column of the mini-batch (`MiniBatch`), on
            the device; NaN for samples outside the plan. [0] on other stages than the last one.

        Raises:
            Interrupted: on all ranks, after a stop request on one.
        """
        self.num_passes[source] += 1
        weights_of_source: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if source == "reference":
            assert self.reference is not None, "take_reference comes first"
            weights.complete(self.chunks)
            weights_of_source = self.reference.swapped_in()

        # The pass of the reference neither replays nor records experts.
        replayed = minibatch.routes if source == "step_start" else None
        routing = None if source == "reference" else self._routing(replayed)
        want: list[schedule.Output] = []
        if self.measures_entropy and source == "step_start":
            want.append("entropy")
        if self.measures_certainty and source == "step_start":
            want.append("certainty")

        def read(
            batch: MicroBatch, logprobs: Tensor, entropies: Tensor, *certainties: Tensor
        ) -> tuple[np.ndarray, Tensor, Tensor, list[Tensor]]:
            columns = [batch.gather(values) for values in certainties]
            return batch.rows, batch.gather(logprobs), entropies, columns

        with weights_of_source:
            results = self._forward(minibatch, should_stop, read, routing, want=want)
        if routing is not None:
            self.routes = replayed or routing.recorded()
        if "entropy" in want:
            self.step_start_entropy = self._sum_entropies([result[2] for result in results])
        if "certainty" in want:
            for number, name in enumerate(("certainty", "logit")):
                of_batches = [(result[0], result[3][number]) for result in results]
                self.certainty[name] = self._response_column(minibatch, of_batches)
        return self._response_column(minibatch, [result[:2] for result in results])

    def _response_column(
        self, minibatch: MiniBatch, results: Sequence[tuple[np.ndarray, Tensor]]
    ) -> Tensor:
        """The values of all micro-batches as a response column of the mini-batch.

        Args:
            minibatch: with this rank's tokens.
            results: rows int64 [samples], and values [k], of each micro-batch on the last pipeline
                stage; [] elsewhere.
        """
        if not results:
            return torch.empty(0, device=self.rank.device)

        tokens = minibatch.tokens
        rows = np.concatenate([of_batch for of_batch, _ in results])
        values = torch.cat([of_batch for _, of_batch in results])
        starts = np.zeros(minibatch.facts.num_samples, dtype=np.int64)
        starts[tokens.index] = tokens.response_offsets[:-1]
        places = ranges(starts[rows], minibatch.facts.response_lens[rows])

        column = values.new_full((int(tokens.response_offsets[-1]),), math.nan)
        return column.index_copy(0, torch.from_numpy(places).to(column.device), values)

    def _sum_entropies(self, entropies: Sequence[Tensor]) -> tuple[float, float]:
        """(sum in nats, number of tokens) over all ranks. Collective.

        Args:
            entropies: [local] of each micro-batch on the last pipeline stage; [] elsewhere.
        """
        reports = []
        for values in entropies:
            num_tokens = values.new_tensor(float(values.numel()))
            reports.append({"sum/entropy": values.double().sum(), "sum/tokens": num_tokens})
        sums = self._sum_reports(reports)
        return sums["sum/entropy"], sums["sum/tokens"]

    def scores(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        should_stop: StopTest | None = None,
    ) -> Tensor:
        """r_j of the whole mini-batch, from a forward-only pass.

        Returns:
            [n], fp64, on the CPU, the same bits on every rank.

        Raises:
            Interrupted: on all ranks, after a stop request on one.
            NonFiniteError: on all ranks, if a score is not finite.
        """
        return self._scores(minibatch, objective, _all_rows(minibatch.facts), should_stop)

    def _scores(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        rows: np.ndarray,
        should_stop: StopTest | None,
    ) -> Tensor:
        """Same as `scores`, for a plan of `rows`; NaN for the other samples."""
        statistics = self._score_pass(minibatch, objective, {"score"}, should_stop)
        return self._gathered(statistics, minibatch.facts, rows)["score"]

    def _score_pass(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        names: Collection[Statistic],
        should_stop: StopTest | None,
    ) -> SampleStatistics:
        """The statistics `names` of this rank's samples, from a forward-only pass."""
        self.num_passes["score"] += 1
        statistics = SampleStatistics(names=names)
        routing = self._routing(minibatch.routes)

        want: list[schedule.Output] = ["entropy"] if objective.score_has_entropy else []

        def read(batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> None:
            entropy = entropies if objective.score_has_entropy else None
            record = build_record(batch, logprobs, entropy, is_step_start=minibatch.index == 0)
            statistics.add(batch, record, objective)

        with torch.no_grad():
            self._forward(minibatch, should_stop, read, routing, want=want)

        self.routes = minibatch.routes
        if not self.routes:
            self.routes = None if routing is None else routing.recorded()
        return statistics

    def score_noise(
        self,
        minibatch: MiniBatch,
        objective: Pacs,
        rows: np.ndarray,
        should_stop: StopTest | None = None,
    ) -> dict[str, float]:
        """Metrics of the difference of the scores between two packings, with equal weights.

        Forward passes only.

        Args:
            minibatch: with this rank's tokens.
            objective: of the scores.
            rows: int64 [m], the samples to compare, whole groups.
            should_stop: as in `logprobs`.

        Returns:
            The metrics; empty if every sample fills a micro-batch, so both packings are the same.

        Raises:
            Interrupted: on all ranks, after a stop request on one.
            NonFiniteError: on all ranks, if a score is not finite.
        """
        plan = self._plan_of(minibatch, rows)
        if _has_single_samples_only(plan):
            return {}

        # With sequence parallelism an earlier pass recorded this rank's tokens of its own packing
        # only, so both passes replay the sampler's experts alone.
        routes = None if minibatch.tokens.routes is None else minibatch.routes
        packed = replace(minibatch, index=1, plan=plan, routes=routes)
        step_start_logprobs = self.logprobs(packed, "step_start", should_stop)
        packed = replace(packed, step_start_logprobs=step_start_logprobs)
        single = replace(packed, plan=one_by_one(plan, self.rank.layout))

        scores_of_packed = self._scores(packed, objective, rows, should_stop)
        scores_of_single = self._scores(single, objective, rows, should_stop)
        return objective.score_noise(scores_of_packed, scores_of_single, minibatch.facts, rows)

    def _gathered(
        self,
        statistics: SampleStatistics,
        facts: SampleFacts,
        rows: np.ndarray,
    ) -> dict[Statistic, Tensor]:
        """The statistics of all ranks. Collective.

        Args:
            statistics: of this rank's samples of a pass.
            facts: of the mini-batch, n samples.
            rows: int64 [m], the samples of the pass on all ranks.

        Returns:
            [n], fp64, on the CPU for each statistic, the same bits on every rank; NaN outside
            `rows`.

        Raises:
            NonFiniteError: on all ranks, if a value of `rows` is not finite.
        """
        gathered: dict[Statistic, Tensor] = {}
        for name in sorted(statistics.names):
            rows_of_rank, values_of_rank = statistics.column(name)
            values = all_gather_by_index(
                rows_of_rank, values_of_rank, facts.num_samples, group=self.rank.control
            )
            is_bad = ~torch.isfinite(values[rows])
            if is_bad.any():
                first_bad = int(is_bad.nonzero()[0, 0])
                raise NonFiniteError(
                    f"the {name} of sample {facts.ids[rows[first_bad]]} is not finite; no weight "
                    "was changed"
                )
            gathered[name] = values
        return gathered

    def with_sample_kl(
        self,
        facts: SampleFacts,
        minibatches: Sequence[MiniBatch],
        objective: Objective,
    ) -> SampleFacts:
        """The facts of a step with `Objective.sample_kl` of each sample. Collective.

        Args:
            facts: of the step, n samples.
            minibatches: of the step, with step-start and reference log-probs.
            objective: its `sample_kl` is used.

        Returns:
            The facts with `kl_to_reference`, the same bits on every rank.
        """
        kls = []
        for minibatch in minibatches:
            starts = on_host(minibatch, minibatch.step_start_logprobs)
            references = on_host(minibatch, minibatch.reference_logprobs)
            pairs = zip(starts, references, strict=True)
            kls.append([objective.sample_kl(start, reference) for start, reference in pairs])
        return replace(facts, kl_to_reference=self.by_sample(facts, minibatches, kls))

    def by_sample(
        self,
        facts: SampleFacts,
        minibatches: Sequence[MiniBatch],
        values: Sequence[Sequence[float]],
    ) -> np.ndarray:
        """The values of all ranks in the order of the step. Collective.

        Args:
            facts: of the step, n samples.
            minibatches: of the step.
            values: of this rank's samples in the order of `tokens.index`, for each mini-batch; none
                on a rank that does not have them.

        Returns:
            float64 [n], in the order of `facts`, the same bits on every rank.
        """
        by_sample = np.full(facts.num_samples, math.nan)
        for minibatch, of_rank in zip(minibatches, values, strict=True):
            index = minibatch.tokens.index[: len(of_rank)]
            gathered = all_gather_by_index(
                index,
                np.array(of_rank, dtype=np.float64),
                minibatch.facts.num_samples,
                group=self.rank.control,
            )
            by_sample[minibatch.rows] = gathered.numpy()
        return by_sample

    def update(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        step_inputs: StepInputs,
        should_stop: StopTest | None = None,
    ) -> UpdateReport:
        """Runs one optimizer update on the whole mini-batch.

        Coefficients that depend on this update's log-probs come from the forward of the micro-batch
        that contains the whole group. A score pass computes those of split groups.

        Args:
            minibatch: with its plan, this rank's tokens and the declared log-probs.
            objective: of the update.
            step_inputs: the mini-batch's rows of the columns of `Objective.prepare_step`.
            should_stop: polled during the score pass; None: never.

        Raises:
            NonFiniteError: on every rank, before any weight changes, if a statistic, coefficient or
                gradient is not finite.
            Interrupted: on every rank, before any weight changes, after a stop request on one
                during the score pass.
        """
        names = objective.statistics(minibatch.index)
        known: dict[str, Tensor] = {}
        split_statistics: dict[Statistic, Tensor] = {}
        if names:
            minibatch = _with_coupled_rows(minibatch, objective)
            known = objective.known(minibatch.facts, step_inputs)
            split_statistics = self._score_split_groups(minibatch, objective, names, should_stop)
            if split_statistics:
                # The update replays the experts of the score pass.
                minibatch = replace(minibatch, routes=self.routes)
            prepared = _prepare_split_groups(minibatch, objective, split_statistics, known)
        else:
            prepared = objective.prepare(None, minibatch.facts, step_inputs)
            minibatch = self._without_zero_gradient(minibatch, prepared)
        _check_finite(prepared)

        loss = self.loss_function(
            prepared=replace(prepared, per_sample=self._on_device(prepared.per_sample)),
            known=self._on_device(known),
            objective=objective,
            statistics=SampleStatistics(names=names),
            is_step_start=minibatch.index == 0,
            mismatch_threshold=self.mismatch_threshold,
        )
        with self.span("forward_backward"):
            reports = self._forward_backward(minibatch, loss)

        drift: dict[str, float] = {}
        if names:
            statistics = self._gathered(
                loss.statistics, minibatch.facts, _all_rows(minibatch.facts)
            )
            drift = _replace_split_groups(statistics, split_statistics, minibatch, objective)
            prepared = _prepare_with_statistics(minibatch, objective, statistics, step_inputs)

        metrics, denominators = self._metrics(prepared, self._sum_reports(reports))
        passes_and_plan = {
            "passes/step_start": float(minibatch.step_start_logprobs is not None),
            "passes/reference": float(minibatch.reference_logprobs is not None),
            "passes/score": float(bool(split_statistics)),
        } | plan_metrics(minibatch.plan, minibatch.facts, self.rank.layout)

        with self.span("optimizer"):
            norm, lr = self.optimizer.step()
        self.version += 1
        return UpdateReport(
            grad_norm=norm,
            is_clipped=self.optimizer.clips(norm),
            lr=lr,
            metrics=metrics | drift | passes_and_plan,
            denominators=denominators | dict.fromkeys(passes_and_plan, 1.0),
        )

    def _score_split_groups(
        self,
        minibatch: MiniBatch,
        objective: Objective,
        names: Collection[Statistic],
        should_stop: StopTest | None,
    ) -> dict[Statistic, Tensor]:
        """Statistics of the samples whose group is in several micro-batches, from a score pass.

        Returns:
            [n], fp64, on the CPU for each of `names`; NaN for samples of whole groups. Empty if all
            groups are whole, and then there is no pass.
        """
        split = _split_rows(minibatch)
        if not len(split):
            return {}

        plan = split_groups_only(minibatch.plan, self.rank.layout)
        of_split = replace(minibatch, plan=plan)
        with self.span("score"):
            statistics = self._score_pass(of_split, objective, names, should_stop)
        return self._gathered(statistics, minibatch.facts, split)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: values.to(self.rank.device) for name, values in tensors.items()}

    def _forward_backward(
        self,
        minibatch: MiniBatch,
        loss: UpdateLoss,
    ) -> list[Mapping[str, Tensor]]:
        """Computes the gradients of the mini-batch.

        Returns:
            The reports of `loss` of this rank's micro-batches on the last pipeline stage; []
            elsewhere.
        """
        _add_tokens(self.trained_tokens, minibatch)
        self.optimizer.zero_grad(self.chunks)
        batches = self._batches(minibatch, with_tables=bool(loss.statistics.names))
        routing = None
        if minibatch.routes is not None:
            routing = self._routing(minibatch.routes)
        return schedule.forward_backward(self.chunks, batches, loss, routing)

    def _metrics(
        self,
        prepared: Prepared,
        sums: Mapping[str, float],
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of an update.

        Args:
            prepared: of the whole mini-batch.
            sums: of the reports of the loss, over all ranks.

        Returns:
            The metrics.
            Their denominators, if not the number of samples.
        """
        metrics = {}
        for name, value in sums.items():
            if not name.startswith(("sum/", "max/")):
                metrics[name] = value
        metrics |= prepared.metrics
        metrics["objective/loss"] = sums["sum/loss"] if prepared.loss is None else prepared.loss

        num_tokens = sums["sum/tokens"]
        if not num_tokens:
            return metrics, dict(prepared.denominators)

        by_token = {
            "policy/entropy": sums["sum/entropy"] / num_tokens,
            "policy/logprob_mean": sums["sum/logprob"] / num_tokens,
        }
        if self.compare_with_sampler:
            by_token |= _mismatch_metrics(sums, num_tokens)
        return metrics | by_token, {**prepared.denominators, **dict.fromkeys(by_token, num_tokens)}

    def _without_zero_gradient(self, minibatch: MiniBatch, prepared: Prepared) -> MiniBatch:
        """The mini-batch without the samples whose gradient is exactly zero.

        The coefficients already contain N. If a log-prob pass has used the plan, the plan stays, so
        that the shapes stay the same.
        """
        if prepared.zero_gradient is None or minibatch.step_start_logprobs is not None:
            return minibatch
        rows = np.flatnonzero(~prepared.zero_gradient.numpy())
        return replace(minibatch, plan=self._plan_of(minibatch, rows))

    def _plan_of(self, minibatch: MiniBatch, rows: np.ndarray) -> MicroBatchPlan:
        """A plan of `rows` alone; each sample stays on the rank that has its tokens."""
        return plan_microbatches(
            minibatch.facts,
            layout=self.rank.layout,
            tokens_per_microbatch=self._tokens_per_microbatch,
            rows=rows,
            owner_of_row=minibatch.plan.owners(minibatch.facts.num_samples),
        )

    def _sum_reports(self, reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Totals over micro-batches and data-parallel ranks, the same on every rank. Collective.

        Args:
            reports: of this rank's micro-batches on the last pipeline stage; [] elsewhere.

        Returns:
            Sums, for names `max/...` maxima.
        """
        names = sorted(reports[0]) if reports else []
        names = broadcast_json(
            names, src=self.rank.model_parallel_ranks[-1], group=self.rank.model_parallel
        )

        totals = torch.zeros(len(names), dtype=torch.float64)
        largest = torch.zeros(len(names), dtype=torch.float64)
        # All tensor-parallel ranks have the same reports.
        if names and reports and self.rank.tp == 0:
            columns = [torch.stack([report[name].double() for name in names]) for report in reports]
            # One copy to the host for all micro-batches; added in their order.
            for values in torch.stack(columns).cpu():
                totals += values
                largest = torch.maximum(largest, values)
        dist.all_reduce(totals, group=self.rank.control)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.rank.control)

        sums: dict[str, float] = {}
        for name, total, top in zip(names, totals.tolist(), largest.tolist(), strict=True):
            sums[name] = top if name.startswith("max/") else total
        return sums


def _mismatch_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Distance between trainer and sampler log-probs.

    Args:
        sums: of `UpdateLoss._mismatch`, over all ranks.
        num_tokens: tokens of the update's forward; the metrics are means over them.
    """
    mean_log_ratio = sums["sum/mismatch_ratio"] / num_tokens
    return {
        "mismatch/logprob_abs_mean": sums["sum/mismatch_abs"] / num_tokens,
        "mismatch/logprob_abs_max": sums["max/mismatch_abs"],
        "mismatch/ratio": math.exp(min(mean_log_ratio, MAX_MISMATCH_LOG_RATIO)),
        "mismatch/kl": sums["sum/mismatch_kl"] / num_tokens,
        "mismatch/over_frac": sums["sum/mismatch_over"] / num_tokens,
    }


def on_host(minibatch: MiniBatch, column: Tensor | None) -> list[np.ndarray]:
    """The values of each sample in a response column of the mini-batch.

    Copies the column to the host, for computations over a whole response.

    Returns:
        [response] each, in the order of `tokens.index`; none without the column, or on a rank that
        does not have it.
    """
    if column is None:
        return []
    return minibatch.tokens.by_sample(column.cpu().numpy())


def _no_span(_name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _add_tokens(tokens: PassedTokens, minibatch: MiniBatch) -> None:
    """Counts the sequences of a pass, on all ranks. The last token of a sequence is no input."""
    facts = minibatch.facts
    rows = np.flatnonzero(minibatch.plan.owners(facts.num_samples) >= 0)
    tokens.add(facts.lens[rows] - 1, facts.response_lens[rows])


def _all_rows(facts: SampleFacts) -> np.ndarray:
    """int64 [n]"""
    return np.arange(facts.num_samples)


def _split_rows(minibatch: MiniBatch) -> np.ndarray:
    """int64 [m], samples that do not share a micro-batch with all coupled samples."""
    return np.flatnonzero(~minibatch.plan.together)


def _has_single_samples_only(plan: MicroBatchPlan) -> bool:
    sizes: list[int] = []
    for batches in plan.by_dp_rank:
        sizes += [len(rows) for rows in batches]
    return max(sizes) < 2


def _with_coupled_rows(minibatch: MiniBatch, objective: Objective) -> MiniBatch:
    """The mini-batch with a plan whose `together` follows the objective's coupling.

    `together` marks the samples that share a micro-batch with all coupled samples. With coupling
    `sample` these are all samples, because a micro-batch has all tokens of a sample.
    """
    if objective.coupling == "group":
        return minibatch
    together = np.full(minibatch.facts.num_samples, objective.coupling != "minibatch")
    return replace(minibatch, plan=replace(minibatch.plan, together=together))


def _prepare_split_groups(
    minibatch: MiniBatch,
    objective: Objective,
    statistics: Mapping[Statistic, Tensor],
    known: Mapping[str, Tensor],
) -> Prepared:
    """The coefficients of split groups; 0 for the samples of whole groups.

    Args:
        minibatch: with its plan.
        objective: its `couple` computes the coefficients.
        statistics: [n], fp64 each, of the score pass; empty if all groups are whole.
        known: [n], fp64 each, of `Objective.known`.
    """
    if not statistics:
        return Prepared(per_sample={})
    table = build_table(minibatch.facts, _split_rows(minibatch))
    of_rows = {name: values[table.rows] for name, values in statistics.items()}
    per_sample = coupled(objective, table, of_rows, known, minibatch.facts.num_samples)
    return Prepared(per_sample=per_sample)


def _check_finite(prepared: Prepared) -> None:
    for name, values in prepared.per_sample.items():
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"the objective's '{name}' is not finite; no weight was changed")


def _replace_split_groups(
    statistics: Mapping[Statistic, Tensor],
    split_statistics: Mapping[Statistic, Tensor],
    minibatch: MiniBatch,
    objective: Objective,
) -> dict[str, float]:
    """Replaces the statistics of split groups by those of the score pass, in place.

    The score pass computed the coefficients, so its statistics belong to the true loss.

    Args:
        statistics: [n], fp64 each, of the update's forward; changed.
        split_statistics: [n], fp64 each, of the score pass; empty if all groups are whole.
        minibatch: with its plan.
        objective: for the name of the metric.

    Returns:
        The metric of the largest difference of a score between the two passes, if there are two.
    """
    split = _split_rows(minibatch)
    drift: dict[str, float] = {}
    if "score" in split_statistics:
        change = (statistics["score"] - split_statistics["score"])[split].abs().max()
        drift[f"{objective.name}/score_drift_max"] = float(change)
    for name, values in split_statistics.items():
        statistics[name][split] = values[split]
    return drift


def _prepare_with_statistics(
    minibatch: MiniBatch,
    objective: Objective,
    statistics: Mapping[Statistic, Tensor],
    step_inputs: StepInputs,
) -> Prepared:
    """Loss and metrics of the whole mini-batch, from its statistics [n], fp64 each."""
    log_ratios = None
    if "sampler_ratio" in statistics:
        log_ratios = statistics["sampler_ratio"].numpy()
    facts = replace(minibatch.facts, log_ratio_to_sampler=log_ratios)
    return objective.prepare(statistics.get("score"), facts, step_inputs)
