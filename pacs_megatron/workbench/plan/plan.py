"""`plan`: estimates memory, time and fit of a run from its configuration, without GPU, Slurm,
network or torch.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from pacs_megatron.config import LoadedConfig, RunConfig
from pacs_megatron.config.checks import (
    divisors,
    find_problems,
    layout_problems,
    max_sequence_tokens,
)
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import ModelSpec, read_spec
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.runtime.files import GIB
from pacs_megatron.workbench.plan import constants, memory, timing
from pacs_megatron.workbench.plan.constants import Gpu
from pacs_megatron.workbench.plan.known_models import need_config


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory, time and disk space of a run.

    For a run without GPUs it has memory, but no times and no limits.
    """

    config: RunConfig
    spec: ModelSpec
    layout: Layout
    gpu: Gpu | None
    lengths: timing.Lengths
    stages: tuple[memory.StageMemory, ...]
    rollout: memory.StageMemory | None
    phases: tuple[timing.Phase, ...]

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
        low, high = (self._step_s([phase.span_s[end] for phase in self.phases]) for end in (0, 1))
        return low, high

    def _step_s(self, seconds: Sequence[float]) -> float:
        if not self.is_ahead:
            return sum(seconds)
        rollout, sync = (
            sum(
                value
                for value, phase in zip(seconds, self.phases, strict=True)
                if phase.name.startswith(name)
            )
            for name in ("rollout", "weight sync")
        )
        return max(rollout + sync, sum(seconds) - rollout)

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer and of rollout nodes."""
        resources = self.config.resources
        return (resources.nodes + resources.rollout_nodes) * resources.gpus_per_node

    @property
    def parts(self) -> tuple[memory.StageMemory, ...]:
        """The stages of training, and the rollout if this plan's GPUs sample."""
        return (*self.stages, *filter(None, [self.rollout]))

    @property
    def peak(self) -> memory.StageMemory:
        """The stage or phase with the highest total."""
        return max(self.parts, key=lambda part: part.total)

    @property
    def fits(self) -> bool:
        """Whether every stage and phase fits, and a server's cache fits one sample."""
        return self.gpu is None or (
            self.peak.total <= self.gpu.memory_gib * GIB and self.small_cache is None
        )

    @property
    def small_cache(self) -> str | None:
        """The key to change if a sample of maximum length exceeds a server's KV cache; else None."""
        rollout = self.config.rollout.sglang
        servers = self.config.rollout.managed_servers
        if self.gpu is None or self.rollout is None or rollout is None or servers is None:
            return None
        per_token = memory.kv_bytes_per_token(self.spec, servers.tp)
        longest = max_sequence_tokens(self.config)
        holds = int(memory.kv_cache_bytes(self.rollout) / per_token)
        if holds >= longest:
            return None
        limit = servers.max_total_tokens
        if limit is not None and limit < longest:
            return f"rollout.servers.max_total_tokens (now {limit}; at least {longest})"
        need = memory.sampler_weight_bytes(rollout, self.spec) / servers.tp + per_token * longest
        share = math.ceil(100 * need / (self.gpu.memory_gib * GIB)) / 100
        least = f"rollout.servers.mem_fraction (at least {share:.2f}) or " if share < 0.95 else ""
        return f"{least}rollout.servers.tp (higher): beside the weights, {holds} of {longest} tokens fit"

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint: weights, fp32 master weights, two moments, and the frozen reference, if
        any.
        """
        width = memory.WIDTH[self.config.precision.dtype]
        reference = width if memory.needs_reference_snapshot(self.config) else 0
        trained = sum(
            map(memory.megatron_elements, memory.trained_models(self.config, self.spec).values())
        )
        return trained * (12 + width) + memory.megatron_elements(self.spec) * reference

    @property
    def num_checkpoints(self) -> int:
        """Maximum number of checkpoints: the kept ones, the one being written, and possibly one
        inside a step.
        """
        return self.config.checkpoint.keep_last + 1 + (self.config.batch.num_updates > 1)

    @property
    def disk_bytes(self) -> float:
        """The maximum number of checkpoints and the exported models."""
        exported = sum(
            map(memory.num_parameters, memory.trained_models(self.config, self.spec).values())
        )
        return (
            self.checkpoint_bytes * self.num_checkpoints + exported * 2
        ) * constants.FREE_DISK_FACTOR.value

    @property
    def host_bytes_per_rank(self) -> float:
        """Host memory of the reference snapshot, of the off-loaded state and, with a GPU, of a save
        on the fullest rank.
        """
        offloaded = memory.most_offloaded_bytes(self.config, self.spec, self.layout)
        if self.gpu is not None:
            offloaded += memory.host_state_bytes(self.config, self.spec, self.layout)
        if not memory.needs_reference_snapshot(self.config):
            return offloaded
        sizes = (
            memory.rank_parameters(self.spec, self.layout, s).total for s in range(self.layout.pp)
        )
        return max(sizes) * memory.WIDTH[self.config.precision.dtype] + offloaded


def make_plan(loaded: LoadedConfig) -> Plan:
    """The plan of a loaded configuration. Raises ConfigError for an invalid layout."""
    config = loaded.config
    spec = read_spec(need_config(config.model.path, loaded.where("model.path")))
    world_size = ranks_to_start(config)
    problems = layout_problems(config, world_size) + shape_problems(
        config, spec, Path(config.model.path).name
    )
    if problems:
        raise loaded.fail(problems[0])
    return plan_of(config, spec)


def plan_of(config: RunConfig, spec: ModelSpec) -> Plan:
    """The plan of a configuration with a valid layout."""
    layout = layout_of(config, ranks_to_start(config))
    gpu = constants.GPUS[config.resources.gpu] if config.resources.gpu is not None else None
    lengths = timing.mean_lengths(config)
    stages = tuple(memory.train_memory(config, spec, layout, stage) for stage in range(layout.pp))
    rollout = memory.rollout_memory(
        config, spec, layout, gpu.memory_gib * GIB if gpu is not None else 0.0
    )
    phases = (
        timing.step_phases(config, spec, layout, gpu, rollout, lengths) if gpu is not None else []
    )
    return Plan(config, spec, layout, gpu, lengths, stages, rollout, tuple(phases))


# ----------------------------------------------------------------------------------------------------------------
# search
def search_layouts(plan: Plan) -> list[Plan]:
    """Plans of all valid layouts on the same GPUs: first those that fit, then by step time.

    Raises ConfigError without GPUs.
    """
    if plan.gpu is None:
        raise ConfigError(
            "plan --search compares layouts on GPUs; set resources.gpus_per_node and resources.gpu"
        )
    found = [plan_of(config, plan.spec) for config in _candidates(plan)]
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.step_s))


def _candidates(plan: Plan) -> Iterator[RunConfig]:
    config = plan.config
    spec = plan.spec
    world_size = plan.layout.world_size
    per_node = config.resources.gpus_per_node
    pps = [pp for pp in divisors(spec.num_layers) if pp <= 16]
    eps = [
        ep
        for ep in (divisors(spec.moe.num_experts) if spec.moe is not None else [1])
        if ep <= per_node
    ]
    for tp, pp, ep, granularity in product(divisors(per_node), pps, eps, ("none", "full")):
        layout = {
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "vpp": None,
            "sequence_parallel": tp > 1,
            "distributed_optimizer": True,
        }
        candidate = _changed(
            config, "parallel", **layout, recompute=_recompute(config, granularity)
        )
        broken = find_problems(candidate) + layout_problems(candidate, world_size)
        if not broken and not shape_problems(candidate, spec, ""):
            yield candidate
            budget = largest_budget(candidate, plan)  # more of PACS's groups may be whole in it
            if budget > config.batch.tokens_per_microbatch:
                yield _changed(candidate, "batch", tokens_per_microbatch=budget)


def largest_budget(config: RunConfig, plan: Plan) -> int:
    """The largest `batch.tokens_per_microbatch` that fits, up to a whole group; 0 if not even the
    average group fits.
    """
    groups = timing.group_tokens(config, plan.lengths)
    if groups is None:
        return 0

    def is_too_large(size: int) -> bool:
        larger = _changed(config, "batch", tokens_per_microbatch=size * BUDGET_STEP)
        return not plan_of(larger, plan.spec).fits

    average, most = (math.ceil(tokens / BUDGET_STEP) for tokens in groups)
    fitting = bisect.bisect_left(range(average, most + 1), True, key=is_too_large)
    return (average + fitting - 1) * BUDGET_STEP if fitting else 0


def _changed(config: RunConfig, section: str, **changes: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _recompute(config: RunConfig, granularity: str) -> object:
    return config.parallel.recompute.model_copy(update={"granularity": granularity})


# ---------------------------------------------------------------------------------------------------------------
# compare
BUDGET_STEP = 1024
"""tokens"""
_COMPARED = ("rollout", "scores", "updates", "off-load", "sync")


def compare_gpus(plan: Plan) -> str:
    """The same run on an H100 and an H200, each with and without recomputation and off-loading:
    memory and seconds of each phase. `head` is the memory of a chunk of logits.
    """
    titles = "".join(
        f"{title:>10}" for title in ("train", "servers", "head", "fits  s:", *_COMPARED, "step")
    )
    lines = [_headline(plan), "", f"  gpu   recompute  offload {titles}"]
    rollout = plan.config.rollout
    nodes = plan.config.resources.nodes
    offloads = (
        ("none", "all") if rollout.starts_servers_on_trainer_gpus and nodes == 1 else ("none",)
    )
    for gpu, granularity, offload in product(("h100", "h200"), ("none", "full"), offloads):
        config = _changed(plan.config, "resources", gpu=gpu)
        config = _changed(config, "parallel", recompute=_recompute(config, granularity))
        config = _changed(config, "policy", offload=offload)
        row = _compared_row(plan_of(config, plan.spec))
        lines.append(f"  {gpu:<5} {granularity:<10} {offload:<8}{row}")
    return "\n".join([*lines, "", "Seconds are estimates from assumed efficiencies."])


def _compared_row(plan: Plan) -> str:
    train = _gib(max(stage.total for stage in plan.stages))
    rollout = _gib(plan.rollout.total) if plan.rollout is not None else "-"
    head = _gib(
        sum(
            item.num_bytes for item in plan.stages[-1].items if item.name.startswith("output layer")
        )
    )
    words = [train, rollout, head, "yes   " if plan.fits else "no   "]
    for title in _COMPARED:
        name = {"scores": "score", "sync": "weight sync"}.get(title, title)
        words.append(
            f"{sum(phase.seconds for phase in plan.phases if phase.name.startswith(name)):.1f}"
        )
    return "".join(f"{word:>10}" for word in [*words, f"{plan.step_s:.1f}"])


# ----------------------------------------------------------------------------------------------------------------
# output
def render(plan: Plan) -> str:
    """The plan as text."""
    lines = [_headline(plan), ""]
    owner = "on each GPU" if plan.gpu else "a rank"
    for stage in plan.parts:
        title = f"training, pipeline stage {stage.stage}" if stage.phase == "train" else "rollout"
        low, high = stage.span
        lines.append(f"{title}: {_gib(stage.total)} (range {_gib(low)} to {_gib(high)}) {owner}")
        lines.extend(
            f"  {_gib(item.num_bytes)}  {item.name}{_range(item)}  [{item.source}]"
            for item in stage.items
        )
        lines.append("")
    lines.extend(_verdict(plan))
    if plan.phases:
        lines.extend(["", *_time_lines(plan), *_group_lines(plan)])
    lines.extend(["", *_disk_lines(plan)])
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    layout = plan.layout
    resources = plan.config.resources
    where = f"{layout.world_size} CPU ranks"
    if plan.gpu is not None:
        where = f"{resources.nodes} x {resources.gpus_per_node} {plan.gpu.name}"
    if resources.rollout_nodes:
        where += f" + {resources.rollout_nodes} rollout nodes"
    axes = f"tp={layout.tp} pp={layout.pp} cp={layout.cp} ep={layout.ep} dp={layout.dp}"
    count = memory.num_parameters(plan.spec)
    return f"{plan.config.run.name}: {plan.spec.family}, {count:,} parameters, {where}, {axes}"


def _verdict(plan: Plan) -> list[str]:
    if plan.gpu is None:
        return ["no GPU is configured: no limit to check"]
    limit = plan.gpu.memory_gib * GIB
    peak = plan.peak
    if peak.total <= limit and plan.small_cache is not None:
        return [
            "DOES NOT FIT: one sample exceeds a server's KV cache",
            f"  change {plan.small_cache}",
        ]
    where = f"stage {peak.stage}" if peak.phase == "train" else "the rollout phase"
    text = f"{_gib(peak.total)} of {_gib(limit)} ({peak.total / limit:.0%}) of a {plan.gpu.name}, in {where}"
    if plan.fits:
        return [f"FITS: at most {text}"]
    return [f"DOES NOT FIT: {text}", *(f"  change {advice}" for advice in _advice(plan))]


def _advice(plan: Plan) -> Iterator[str]:
    config = plan.config
    layout = plan.layout
    parallel = config.parallel
    if plan.peak.phase == "rollout":
        if config.policy.offload != "all" and config.rollout.on_trainer_gpus:
            yield "policy.offload=optimizer or all: the trainer's state is in host memory while the servers sample"
        yield "rollout.servers.mem_fraction (lower), rollout.servers.tp (higher), or separate rollout nodes"
    if not parallel.distributed_optimizer and layout.dp > 1:
        yield "parallel.distributed_optimizer=true: optimizer state is divided over data-parallel ranks"
    if parallel.recompute.granularity != "full":
        yield "parallel.recompute.granularity=full: only layer inputs are kept, for a third more time"
    if layout.tp > 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel=true: norms' inputs are divided by tp"
    longest = max_sequence_tokens(config)
    if config.batch.tokens_per_microbatch > longest:
        yield f"batch.tokens_per_microbatch (now {config.batch.tokens_per_microbatch}; at least {longest})"
    yield "parallel.tp or parallel.pp (more ranks a replica), or resources.nodes; `plan --search` compares layouts"


def _time_lines(plan: Plan) -> list[str]:
    samples = plan.config.batch.prompts_per_step * plan.config.batch.samples_per_prompt
    lengths = f"{plan.lengths.prompt:.0f} + {plan.lengths.response:.0f} tokens"
    lines = [f"one step, {samples:,} samples of {lengths} on average (assumed):"]
    for phase in plan.phases:
        flops = f", {phase.flops / 1e15:,.1f} PFLOP" if phase.flops else ""
        note = f" ({phase.note})" if phase.note else ""
        low, high = phase.span_s
        lines.append(
            f"  {phase.seconds:9.1f} s  {phase.name}, {low:.1f} to {high:.1f} s{flops}{note}"
        )
    hours = plan.step_s * plan.config.run.steps / 3600
    together = "together, rollout beside the rest" if plan.is_ahead else "together"
    low, high = plan.step_span
    rate = samples * plan.lengths.total / plan.step_s / plan.num_gpus
    return [
        *lines,
        f"  {plan.step_s:9.1f} s  {together}, {low:.1f} to {high:.1f} s: {rate:,.0f} tokens/s a "
        "GPU",
        f"the run, {plan.config.run.steps} steps: {hours:,.1f} h, {hours * plan.num_gpus:,.0f} "
        "GPU-hours (efficiencies are assumed, not measured on several GPUs; checkpoints and "
        "evaluation come on top)",
    ]


def _group_lines(plan: Plan) -> Iterator[str]:
    """Whether whole groups fit into the token budget, which need no score pass, and the largest
    budget that fits.
    """
    groups = timing.group_tokens(plan.config, plan.lengths)
    if groups is None or plan.gpu is None:
        return
    budget = plan.config.batch.tokens_per_microbatch
    largest = largest_budget(plan.config, plan)
    holds = "all" if budget >= groups[1] else "most" if budget >= groups[0] else "few"
    fits = (
        f"up to {largest:,} fit"
        if largest
        else "no budget for the average group fits; see `plan --search`"
    )
    yield (
        f"groups of {groups[0]:,} tokens on average and {groups[1]:,} at most: "
        f"batch.tokens_per_microbatch={budget} keeps "
        f"{holds} of them whole, without a score pass; {fits}"
    )


def _disk_lines(plan: Plan) -> list[str]:
    middle = ", one in the middle of a step" if plan.config.batch.num_updates > 1 else ""
    lines = [
        f"a checkpoint: {_gib(plan.checkpoint_bytes)}; quota for {plan.num_checkpoints} of them "
        "(checkpoint.keep_last="
        f"{plan.config.checkpoint.keep_last}, one being written{middle}) and the export: "
        f"{_gib(plan.disk_bytes)}",
        f"host memory for a step's samples: at most {_gib(memory.host_step_bytes(plan.config))} on "
        "rank 0 and in the driver each",
    ]
    if host := plan.host_bytes_per_rank:
        lines.append(
            f"host memory for reference snapshot, off-loaded state and a save: {_gib(host)} a rank"
        )
    return lines


def render_search(plans: Sequence[Plan], current: Plan) -> str:
    """The ten best layouts and the configured one."""
    lines = [
        "  tp  pp  ep   dp  recompute  budget   memory  fits    step s",
        *map(_search_row, plans[:10]),
    ]
    lines.extend(["", "as configured:", _search_row(current)])
    best = plans[0]
    text = "no layout fits: raise resources.nodes or lower batch.tokens_per_microbatch"
    if best.fits:
        text = (
            f"best: parallel.tp={best.layout.tp} parallel.pp={best.layout.pp} "
            f"parallel.ep={best.layout.ep} "
            f"parallel.sequence_parallel={str(best.layout.tp > 1).lower()} "
            "parallel.distributed_optimizer=true "
            f"parallel.recompute.granularity={best.config.parallel.recompute.granularity} "
            f"batch.tokens_per_microbatch={best.config.batch.tokens_per_microbatch}"
        )
    return "\n".join([*lines, "", text])


def _search_row(plan: Plan) -> str:
    layout = plan.layout
    granularity = plan.config.parallel.recompute.granularity
    return (
        f"{layout.tp:4d}{layout.pp:4d}{layout.ep:4d}{layout.dp:5d}  {granularity:<9}"
        f"{plan.config.batch.tokens_per_microbatch:8d}{_gib(plan.peak.total):>9}"
        f"  {'yes' if plan.fits else 'no':<4}{plan.step_s:10.1f}"
    )


def _range(item: memory.Item) -> str:
    if item.span == (1.0, 1.0):
        return ""
    return f", {_gib(item.num_bytes * item.span[0]).strip()} to {_gib(item.num_bytes * item.span[1]).strip()}"


def _gib(num_bytes: float) -> str:
    if num_bytes < GIB / 100:
        return f"{num_bytes / 2**20:5.2f} MiB"
    return f"{num_bytes / GIB:5.1f} GiB"
