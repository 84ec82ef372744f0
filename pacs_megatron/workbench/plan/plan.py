"""`plan`: estimates memory, time and fit of a run from its configuration, without GPU, Slurm,
network or torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pacs_megatron.config import LoadedConfig, RunConfig
from pacs_megatron.config.checks import layout_problems, min_server_context
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec, read_spec
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.runtime.gpus import GPUS, Gpu
from pacs_megatron.workbench.plan import constants, memory, state, timing
from pacs_megatron.workbench.plan.known_models import need_config
from pacs_megatron.workbench.plan.lengths import Lengths, assumed_lengths

_MAX_MEM_FRACTION = 0.95
"""A larger rollout.servers.mem_fraction is not recommended."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory, time and disk space of a run.

    For a run without GPUs it has memory, but no times and no limits.
    """

    config: RunConfig
    spec: ModelSpec
    layout: Layout
    gpu: Gpu | None
    lengths: Lengths
    stages: tuple[memory.StageMemory, ...]
    rollout: memory.StageMemory | None
    phases: tuple[timing.Phase, ...]

    # ---------------------------------------------------------------------------------------- time
    @property
    def is_ahead(self) -> bool:
        """Whether servers sample later steps during training."""
        return self.config.rollout.sglang is not None and self.config.rollout.steps_ahead > 0

    @property
    def step_s(self) -> float:
        """Seconds of one step: the sum of all phases.

        With sampling ahead of training: the longer of the servers' and the trainer's phases (the
        sync belongs to both).
        """
        return self._step_s([phase.seconds for phase in self.phases])

    @property
    def step_span(self) -> tuple[float, float]:
        """Shortest and longest step, by the ranges of the assumed constants."""
        low = self._step_s([phase.span_s[0] for phase in self.phases])
        high = self._step_s([phase.span_s[1] for phase in self.phases])
        return low, high

    def _step_s(self, seconds: Sequence[float]) -> float:
        """`step_s` with other times of the phases.

        Args:
            seconds: of each phase.
        """
        if not self.is_ahead:
            return sum(seconds)
        rollout = self._sum_of("rollout", seconds)
        sync = self._sum_of("weight sync", seconds)
        return max(rollout + sync, sum(seconds) - rollout)

    @property
    def idle(self) -> dict[str, float]:
        """Shares of a step that a side's GPUs wait for the other side.

        `trainer` and `servers`. Both are 0 where servers have the trainer's own GPUs, because one
        of the two always works. The weight sync belongs to both. Empty for a run without SGLang or
        without a GPU.
        """
        if self.config.rollout.sglang is None or self.gpu is None:
            return {}
        if self.config.rollout.on_trainer_gpus:
            return {"trainer": 0.0, "servers": 0.0}

        seconds = [phase.seconds for phase in self.phases]
        rollout_s = self._sum_of("rollout", seconds)
        sync_s = self._sum_of("weight sync", seconds)
        trainer_s = sum(seconds) - rollout_s
        return {
            "trainer": 1 - trainer_s / self.step_s,
            "servers": 1 - (rollout_s + sync_s) / self.step_s,
        }

    @property
    def idle_share(self) -> float:
        """`idle` of all GPUs of the job."""
        resources = self.config.resources
        if not self.idle or not resources.rollout_nodes:
            return 0.0
        trainer = self.idle["trainer"] * resources.nodes
        servers = self.idle["servers"] * resources.rollout_nodes
        return (trainer + servers) / (resources.nodes + resources.rollout_nodes)

    def _sum_of(self, name: str, seconds: Sequence[float]) -> float:
        """Sum over the phases whose names start with `name`."""
        pairs = zip(seconds, self.phases, strict=True)
        return sum(value for value, phase in pairs if phase.name.startswith(name))

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer and of rollout nodes."""
        resources = self.config.resources
        return (resources.nodes + resources.rollout_nodes) * resources.gpus_per_node

    # ---------------------------------------------------------------------------------- GPU memory
    @property
    def parts(self) -> tuple[memory.StageMemory, ...]:
        """The stages of training, and the rollout if this plan's GPUs sample."""
        if self.rollout is None:
            return self.stages
        return (*self.stages, self.rollout)

    @property
    def peak(self) -> memory.StageMemory:
        """The stage or phase with the highest total."""
        return max(self.parts, key=lambda part: part.total)

    @property
    def highest_bytes(self) -> float:
        """The highest total of all stages and phases, with the highest value of each assumption."""
        return max(part.span[1] for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether `may_fit` holds with the highest value of each assumption too."""
        if self.gpu is None:
            return True
        return self.may_fit and self.highest_bytes <= self.gpu.memory_bytes

    @property
    def may_fit(self) -> bool:
        """Whether every stage and phase fits with the assumptions' own values, and a server's cache
        fits one sample.
        """
        if self.gpu is None:
            return True
        return self.peak.total <= self.gpu.memory_bytes and self.small_cache is None

    @property
    def small_cache(self) -> str | None:
        """The key to change if a sample of maximum length exceeds a server's KV cache.

        Returns:
            None if the cache fits the sample, and for a run without GPUs or managed servers.
        """
        rollout = self.config.rollout.sglang
        servers = self.config.rollout.managed_servers
        if self.gpu is None or self.rollout is None or rollout is None or servers is None:
            return None

        width = state.WIDTH[rollout.dtype]
        per_token = memory.kv_bytes_per_token(self.spec, servers.tp, width)
        longest = min_server_context(self.config)
        capacity = int(memory.kv_cache_bytes(self.rollout) / per_token)
        if capacity >= longest:
            return None
        weight_bytes = memory.sampler_weight_bytes(rollout, self.spec) / servers.tp
        needed_bytes = weight_bytes + per_token * longest
        fraction = math.ceil(100 * needed_bytes / self.gpu.memory_bytes) / 100
        larger_share = ""
        if fraction < _MAX_MEM_FRACTION:
            larger_share = f"rollout.servers.mem_fraction (at least {fraction:.2f}) or "
        return (
            f"{larger_share}rollout.servers.tp (higher): beside the weights, {capacity} of "
            f"{longest} tokens fit"
        )

    # ------------------------------------------------------------------------ disk and host memory
    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint: trained weights, their fp32 master weights, two moments, and the frozen
        reference, if any.
        """
        width = state.WIDTH[self.config.precision.dtype]
        models = state.trained_models(self.config, self.spec).values()
        num_trained = sum(state.trained_elements(self.config, model) for model in models)
        num_bytes = num_trained * (state.SAVED_OPTIMIZER_BYTES + width)

        if state.needs_reference_snapshot(self.config):
            num_bytes += state.trained_elements(self.config, self.spec) * width
        return num_bytes

    @property
    def num_checkpoints(self) -> int:
        """Maximum number of checkpoints: the kept ones, the one being written, and possibly one
        inside a step.
        """
        inside_step = 1 if self.config.batch.num_updates > 1 else 0
        return self.config.checkpoint.keep_last + 1 + inside_step

    @property
    def disk_bytes(self) -> float:
        """The maximum number of checkpoints and the exported models."""
        models = state.trained_models(self.config, self.spec).values()
        width = state.WIDTH[self.config.precision.dtype]
        exported_bytes = width * sum(state.num_parameters(model) for model in models)
        checkpoints_bytes = self.checkpoint_bytes * self.num_checkpoints
        return (checkpoints_bytes + exported_bytes) * constants.FREE_DISK_FACTOR.value

    @property
    def host_bytes_per_rank(self) -> float:
        """Host memory of the reference snapshot, of the off-loaded state and, with a GPU, of a save
        on the fullest rank.
        """
        num_bytes = state.most_offloaded_bytes(self.config, self.spec, self.layout)
        if self.gpu is not None:
            num_bytes += state.host_state_bytes(self.config, self.spec, self.layout)
        if not state.needs_reference_snapshot(self.config):
            return num_bytes

        most_elements = max(
            state.trained_parameters(self.config, self.spec, self.layout, stage).total
            for stage in range(self.layout.pp)
        )
        return most_elements * state.WIDTH[self.config.precision.dtype] + num_bytes


def make_plan(loaded: LoadedConfig, lengths: Lengths | None = None) -> Plan:
    """The plan of a loaded configuration.

    Args:
        loaded: the configuration.
        lengths: of the samples; None: assumed ones.

    Raises ConfigError for an invalid layout.
    """
    config = loaded.config
    spec = read_spec(need_config(config.model.path, loaded.where("model.path")))

    problems = layout_problems(config, ranks_to_start(config))
    problems += shape_problems(config, spec, Path(config.model.path).name)
    if problems:
        raise loaded.fail(problems[0])
    return plan_of(config, spec, lengths)


def plan_of(config: RunConfig, spec: ModelSpec, lengths: Lengths | None = None) -> Plan:
    """The plan of a configuration with a valid layout.

    Args:
        config: the run.
        spec: the architecture.
        lengths: of the samples; None: assumed ones.
    """
    layout = layout_of(config, ranks_to_start(config))
    lengths = lengths or assumed_lengths(config)
    gpu = None
    gpu_bytes = 0.0
    if config.resources.gpu is not None:
        gpu = GPUS[config.resources.gpu]
        gpu_bytes = gpu.memory_bytes

    stages = [memory.train_memory(config, spec, layout, stage) for stage in range(layout.pp)]
    rollout = memory.rollout_memory(config, spec, layout, gpu_bytes)
    phases = []
    if gpu is not None:
        phases = timing.step_phases(config, spec, layout, gpu, rollout, lengths)

    return Plan(
        config=config,
        spec=spec,
        layout=layout,
        gpu=gpu,
        lengths=lengths,
        stages=tuple(stages),
        rollout=rollout,
        phases=tuple(phases),
    )
