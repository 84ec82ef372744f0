"""One rank's step of the product's own policy on fake CUDA."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from pacs_megatron.batching.split import plan_microbatches
from pacs_megatron.batching.tables import select_tokens
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.config.load import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Layout, MiniBatch, SampleFacts
from pacs_megatron.models import ModelSpec, read_spec
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan.known_models import need_config
from pacs_megatron.workbench.trace import linear_attention
from pacs_megatron.workbench.trace.collectives import CollectiveTrace, join_fake_world
from pacs_megatron.workbench.trace.cuda import DEVICE, GpuFacts, replace_cuda
from pacs_megatron.workbench.trace.ledger import Moment
from pacs_megatron.workbench.trace.mode import FakeCuda
from pacs_megatron.workbench.trace.rank import TraceRequest
from pacs_megatron.workbench.trace.samples import build_samples

if TYPE_CHECKING:
    from pacs_megatron.policy.critic import Critic
    from pacs_megatron.policy.engine import MegatronPolicy

GIB = 2**30
_DEFAULT_GPU = "h200"
_REPORTED = (
    *("entropy", "logprob", "loss", "mismatch_abs", "mismatch_kl", "mismatch_over"),
    *("return", "return_square", "error", "error_square"),
)
"""sums of an update's report, which the last stage of a pipeline broadcasts"""


def trace_step(request: TraceRequest) -> dict[str, Any]:
    """Executes the request's paths. Once per process, after the guard is installed.

    Returns:
        Peaks, live bytes, work and collectives by phase, in plain JSON values; see `_result`.
    """
    mode = FakeCuda(CollectiveTrace())
    fake_gpus(request, mode)
    return _result(execute(request, mode), mode)


def fake_gpus(request: TraceRequest, mode: FakeCuda) -> None:
    """Gives this process the GPUs of the request's run, before the first import of Megatron."""
    resources = load_config(Path(request.config), request.overrides).config.resources
    gpu = GPUS[resources.gpu or _DEFAULT_GPU]
    facts = GpuFacts(
        name=f"NVIDIA {gpu.name.upper()}",
        memory_bytes=int(gpu.memory_bytes),
        per_node=resources.gpus_per_node or 1,
    )
    replace_cuda(facts, mode.ledger.resize, mode.count_wait)
    linear_attention.install()
    if sys.modules.get("transformer_engine", "absent") is not None:
        from pacs_megatron.workbench.trace import transformer_engine

        transformer_engine.replace_kernels(mode)


def execute(request: TraceRequest, mode: FakeCuda) -> TracedRank:
    """Executes the request's paths, after `fake_gpus`. Once per process."""
    config = load_config(Path(request.config), request.overrides).config
    world_size = ranks_to_start(config)
    per_node = config.resources.gpus_per_node or 1
    with mode:
        mode.start_phase("build")
        join_fake_world(mode.collectives, request.rank, world_size, per_node)
        run = TracedRank(
            request, config, _spec_of(config, request), layout_of(config, world_size), mode
        )
        run.execute()
    return run


def _spec_of(config: RunConfig, request: TraceRequest) -> ModelSpec:
    shape = dict(request.shape)
    if request.num_layers is not None:
        shape["num_hidden_layers"] = request.num_layers
    return read_spec({**need_config(config.model.path, "model.path"), **shape})


class TracedRank:
    """The policy of one rank, and the phases that it went through."""

    def __init__(
        self,
        request: TraceRequest,
        config: RunConfig,
        spec: ModelSpec,
        layout: Layout,
        mode: FakeCuda,
    ) -> None:
        # After `replace_cuda`: the first import of Megatron looks for a GPU.
        from pacs_megatron.parallel import groups
        from pacs_megatron.policy.critic import Critic, critic_optimizer
        from pacs_megatron.policy.engine import MegatronPolicy
        from pacs_megatron.training.context import build_model

        self.request = request
        self.config = config
        self.spec = spec
        self.mode = mode
        self.num_microbatches = 0
        """of this rank's update"""
        self.seconds: dict[str, float] = {}
        self.live_after: dict[str, int] = {}
        self.outcome = ""
        """of a whole step: `trained` or `stopped`"""
        rank = groups.initialize(layout, seed=1, control_timeout_s=600.0)
        self.rank = replace(rank, device=DEVICE)  # a process has one fake GPU
        _replace_norms()
        if mode.collectives.exchange is None:
            _stand_in_for_other_ranks(mode)

        self.policy = build_model(config, self.rank, spec, config.optimizer, MegatronPolicy)
        self.models: list[MegatronPolicy] = [self.policy]
        self.critic: Critic | None = None
        if isinstance(config.objective, PpoOptions):
            optimizer = critic_optimizer(config.optimizer, config.objective.critic.lr)
            self.critic = build_model(config, self.rank, spec.critic(), optimizer, Critic)
            self.models.append(self.critic)
        for model in self.models:
            self._follow_modules(model)
            self._follow_hidden_shape(model)
            self._follow_update(model)

    def execute(self) -> None:
        """Runs the paths that the request names."""
        runs: dict[str, Callable[[MiniBatch], None]] = {
            "step": self._step,
            "reference": self._reference,
            "offload": self._offload,
            "export": self._export,
            "checkpoint": self._checkpoint,
            "whole step": self._whole_step,
        }
        self.objective = build_objective(
            self.config.objective,
            updates_per_step=max(self.config.batch.num_updates, self.request.index + 1),
        )
        self.samples = build_samples(self.request, self.config, self.spec)
        minibatch = self._minibatch(self.objective)
        for path in self.request.paths:
            runs[path](minibatch)

    # ------------------------------------------------------------------------------------ paths
    def _step(self, minibatch: MiniBatch) -> None:
        objective = self.objective
        self.policy.measures_certainty = self.config.objective.needs_certainty
        logprobs = {}
        for name in sorted(objective.logprob_passes(self.request.index) - {"value"}):
            logprobs[f"{name}_logprobs"] = self._phase(
                f"log-probs: {name}", functools.partial(self.policy.logprobs, minibatch, name)
            )
        minibatch = replace(minibatch, **logprobs)
        facts = minibatch.facts
        if self.critic is not None:
            facts, minibatch = self._phase(
                "critic: values", functools.partial(self._estimates, self.critic, minibatch)
            )
        elif objective.has_estimates:
            from pacs_megatron.policy.estimates import with_estimates

            facts, [minibatch] = with_estimates(self.policy, facts, [minibatch], objective)
        elif self.config.objective.needs_certainty:
            from pacs_megatron.policy.estimates import with_certainty

            minibatch = replace(minibatch, estimates=self.policy.certainty)
            facts = with_certainty(self.policy, facts, [minibatch])

        step_inputs = objective.prepare_step(facts)
        for _ in range(self.request.updates):
            self._phase("update", lambda: self.policy.update(minibatch, objective, step_inputs))
            if self.critic is not None:
                update = functools.partial(self._update_critic, self.critic, minibatch)
                self._phase("critic: update", update)

    def _estimates(self, critic: Critic, minibatch: MiniBatch) -> tuple[SampleFacts, MiniBatch]:
        """The facts and the mini-batch with the critic's values and advantages."""
        from pacs_megatron.policy.estimates import with_estimates

        values = critic.logprobs(minibatch, "value")
        with_values = replace(minibatch, estimates={"value": values})
        facts, minibatches = with_estimates(
            self.policy, minibatch.facts, [with_values], self.objective
        )
        return facts, minibatches[0]

    def _update_critic(self, critic: Critic, minibatch: MiniBatch) -> None:
        assert self.objective.critic is not None
        critic.update(replace(minibatch, routes=None), self.objective.critic, {})

    def _whole_step(self, minibatch: MiniBatch) -> None:
        """Needs the other ranks."""
        from pacs_megatron.workbench.trace.whole_step import run_whole_step

        self.outcome = run_whole_step(
            request=self.request,
            config=self.config,
            rank=self.rank,
            models=self.models,
            objective=self.objective,
            samples=self.samples,
            mode=self.mode,
        )

    def _reference(self, minibatch: MiniBatch) -> None:
        self._phase("take reference", lambda: self.policy.take_reference(reset_optimizer=True))
        self._phase("log-probs: reference", lambda: self.policy.logprobs(minibatch, "reference"))

    def _offload(self, minibatch: MiniBatch) -> None:
        from pacs_megatron.policy.offload import Offload

        for model in self.models:
            model.offload = Offload("all", model.chunks, model.optimizer, self.rank.device)

        def to_host() -> None:
            for model in self.models:
                model.offload.to_host()

        def to_device() -> None:
            for model in self.models:
                model.offload.to_device()

        self._phase("off-load to the host", to_host)
        self._phase("export while off-loaded", self._send_weights)
        self._phase("off-load to the device", to_device)

    def _export(self, minibatch: MiniBatch) -> None:
        self._phase("export", self._send_weights)

    def _send_weights(self) -> None:
        """Exports through the run's transport to a server that exists only in part."""
        from pacs_megatron.workbench.trace.servers import send_weights

        send_weights(self.config, self.spec, self.policy)

    def _checkpoint(self, minibatch: MiniBatch) -> None:
        """Writes this rank's shards; without those of the others it cannot be loaded."""
        from megatron.core.dist_checkpointing import state_dict_utils

        from pacs_megatron.checkpoint.dist_files import prepare_sharded
        from pacs_megatron.policy.state import own_copy, sharded_state

        # Megatron checks that all ranks together cover every tensor; the others do not exist.
        state_dict_utils.validate_sharding_integrity = lambda *_args, **_options: None
        alone = self._group_of_this_rank()
        for model in self.models:
            has_reference = model.has_snapshot
            name = "checkpoint" if model is self.policy else "critic: checkpoint"
            with tempfile.TemporaryDirectory(prefix="pacs-trace-") as folder:
                path = Path(folder)

                def prepare(
                    model: MegatronPolicy = model,
                    path: Path = path,
                    has_reference: bool = has_reference,
                ) -> Any:
                    state = sharded_state(model, is_loading=False, with_reference=has_reference)
                    return prepare_sharded(state, path, own_copy(model))

                prepared = self._phase(f"{name}: prepare", prepare)
                write = functools.partial(prepared.write, path, alone)
                self._phase(f"{name}: write", write)

    def _group_of_this_rank(self) -> Any:
        groups = [
            dist.new_group([number], backend="gloo") for number in range(dist.get_world_size())
        ]
        return groups[self.rank.rank]

    # -------------------------------------------------------------------------------- recording
    def _phase(self, name: str, call: Callable[[], Any]) -> Any:
        self.mode.start_phase(name)
        begin = time.perf_counter()
        returned = call()
        self.seconds[name] = time.perf_counter() - begin
        self.live_after[name] = self.mode.ledger.live_bytes
        return returned

    def _prefix(self, model: MegatronPolicy) -> str:
        """Of the critic's phases and parts."""
        return "critic: " if model is self.critic else ""

    def _follow_modules(self, model: MegatronPolicy) -> None:
        """Labels what a module's forward allocates with its path, without layer numbers."""
        modules = self.mode.modules
        prefix = self._prefix(model)
        for chunk in model.chunks:
            for path, module in chunk.named_modules():
                inside = path.removeprefix("module.module.")
                kind = prefix + ".".join(part for part in inside.split(".") if not part.isdigit())

                def enter(*_args: Any, kind: str = kind) -> None:
                    modules.append(kind)

                def leave(*_args: Any) -> None:
                    modules.pop()

                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave, always_call=True)

    def _follow_hidden_shape(self, model: MegatronPolicy) -> None:
        """Gives the mode the shape that a neighbour of the pipeline sends first."""
        layout = self.rank.layout
        build_batches = model._batches

        def batches(*args: Any, **options: Any) -> Any:
            built = build_batches(*args, **options)
            sequence = built[0].input_ids.shape[1]
            if layout.sequence_parallel:
                sequence //= layout.tp
            self.mode.hidden_shape = (sequence, 1, self.spec.hidden_size)
            return built

        model._batches = batches  # type: ignore[method-assign]

    def _follow_update(self, model: MegatronPolicy) -> None:
        """Gives the parts of an update phases of their own."""
        prefix = self._prefix(model)

        def in_phase(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*args: Any, **options: Any) -> Any:
                outer = self.mode.phase
                self.mode.start_phase(f"{prefix}{name}")
                returned = call(*args, **options)
                self.mode.start_phase(outer)
                return returned

            return traced

        replaced: Any = model
        replaced._forward_backward = in_phase("forward and backward", model._forward_backward)
        replaced.optimizer.step = in_phase("optimizer", model.optimizer.step)

    # ------------------------------------------------------------------------------------- data
    def _minibatch(self, objective: Objective) -> MiniBatch:
        facts, tokens = self.samples
        plan = plan_microbatches(
            facts,
            layout=self.rank.layout,
            tokens_per_microbatch=self.config.batch.tokens_per_microbatch,
            keep_groups=bool(objective.statistics(self.request.index)),
        )
        self.num_microbatches = len(plan.by_dp_rank[self.rank.dp])
        own = np.flatnonzero(plan.owners(facts.num_samples) == self.rank.dp)
        return MiniBatch(
            facts=facts,
            rows=np.arange(facts.num_samples),
            tokens=select_tokens(tokens, own, own),
            plan=plan,
            index=self.request.index,
        )


def _stand_in_for_other_ranks(mode: FakeCuda) -> None:
    """Replaces values that only another rank has.

    A broadcast value is this rank's own, or the names of an update's report. Rows of other
    data-parallel ranks are 0.
    """
    from pacs_megatron.policy import engine

    replaced: Any = engine
    names = ["max/mismatch_abs", "sum/mismatch_ratio", "sum/tokens"]
    names += [f"sum/{name}" for name in _REPORTED]
    gather = replaced.all_gather_by_index

    def broadcast(value: Any, src: int, group: dist.ProcessGroup) -> Any:
        mode.collectives.meet_objects("broadcast_json", group, None)
        return value or sorted(names)

    def gather_own(*args: Any, **options: Any) -> Any:
        return gather(*args, **options).nan_to_num(0.0)

    replaced.broadcast_json = broadcast
    replaced.all_gather_by_index = gather_own


def _replace_norms() -> None:
    """Without Apex and Transformer Engine Megatron builds a tensor from a list of CUDA scalars,
    which reads them below the dispatcher.
    """
    from megatron.core.optimizer import clip_grads

    if sys.modules.get("transformer_engine", "absent") is not None:
        return

    def norms(_size: int, _overflow: Any, lists: Any, *_args: Any) -> tuple[Any, None]:
        squares = torch.stack([tensor.float().pow(2).sum() for tensor in lists[0]])
        return squares.sum().sqrt().reshape(1), None

    clip_grads.l2_norm_impl = norms


def _result(run: TracedRank, mode: FakeCuda) -> dict[str, Any]:
    peaks = {}
    for phase, peak in mode.ledger.peaks().items():
        labels = [
            {**asdict(label), "num_bytes": size} for label, size in peak.by_label.most_common()
        ]
        peaks[phase] = {"num_bytes": peak.num_bytes, "by_label": labels}

    moments = [
        {"phase": moment.phase, **_at(moment), "by_part": moment.by_part}
        for moment in mode.ledger.moments()
    ]
    syncs = [
        {"phase": phase, "operation": operation, "place": place, "function": name, "count": count}
        for (phase, operation, place, name), count in mode.host_syncs.items()
    ]
    work = mode.work
    return {
        "rank": run.rank.rank,
        "place": {name: getattr(run.rank, name) for name in ("tp", "pp", "dp", "ep")},
        "num_layers": run.spec.num_layers,
        "num_microbatches": run.num_microbatches,
        "groups": _group_names(),
        "seconds": run.seconds,
        "live_after": run.live_after,
        "peaks": peaks,
        "moments": moments,
        "flops": dict(work.flops),
        "moved_bytes": dict(work.moved_bytes),
        "kernels": dict(work.kernels),
        "work": [[*kernel, count] for kernel, count in work.by_kernel.items()],
        "host_to_device_bytes": dict(work.host_to_device_bytes),
        "collectives": [call.to_json() for call in mode.collectives.calls],
        "host_syncs": syncs,
        "invented": dict(mode.invented),
        "unknown_shapes": dict(mode.unknown_shapes),
    }


def _at(moment: Moment) -> dict[str, Any]:
    label = moment.label
    return {"part": label.part, "operation": label.operation, "num_bytes": moment.num_bytes}


def _group_names() -> dict[str, list[int]]:
    """Global ranks of this rank's groups, by axis; the first name of equal ranks counts."""
    from megatron.core import parallel_state

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "dp and cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "dp of experts": parallel_state.get_expert_data_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
        "all": dist.group.WORLD,
    }
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
