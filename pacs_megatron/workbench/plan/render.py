"""The texts of `plan`, `plan --search` and `plan --compare`."""

from collections.abc import Iterator, Sequence

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.runtime.files import GIB
from pacs_megatron.workbench.plan import memory, timing
from pacs_megatron.workbench.plan.activations import head_bytes
from pacs_megatron.workbench.plan.plan import Plan
from pacs_megatron.workbench.plan.search import compared_plans, largest_budget
from pacs_megatron.workbench.plan.state import Item, num_parameters

_COMPARED_PHASES = {
    "rollout": "rollout",
    "scores": "score",
    "updates": "updates",
    "off-load": "off-load",
    "sync": "weight sync",
}
"""Column of `--compare` -> first words of the phases' names"""
_NUM_BEST = 10
"""rows of `--search`"""


# ---------------------------------------------------------------------------------------- one plan
def render(plan: Plan) -> str:
    """The plan as text."""
    lines = [*memory_lines(plan)]

    if plan.phases:
        lines.append("")
        lines.extend(_time_lines(plan))
        lines.extend(_group_lines(plan))
    lines.append("")
    lines.extend(_disk_lines(plan))
    return "\n".join(lines)


def memory_lines(plan: Plan) -> Iterator[str]:
    """The tables of all stages and phases, and whether they fit."""
    yield _headline(plan)
    yield ""
    for part in plan.parts:
        yield from _part_lines(plan, part)
        yield ""
    yield from verdict(plan)


def _headline(plan: Plan) -> str:
    layout = plan.layout
    resources = plan.config.resources
    machines = f"{layout.world_size} CPU ranks"
    if plan.gpu is not None:
        machines = f"{resources.nodes} x {resources.gpus_per_node} {plan.gpu.name}"
    if resources.rollout_nodes:
        machines += f" + {resources.rollout_nodes} rollout nodes"

    axes = f"tp={layout.tp} pp={layout.pp} cp={layout.cp} ep={layout.ep} dp={layout.dp}"
    count = num_parameters(plan.spec)
    return f"{plan.config.run.name}: {plan.spec.family}, {count:,} parameters, {machines}, {axes}"


def _part_lines(plan: Plan, part: memory.StageMemory) -> list[str]:
    """The table of one stage or phase."""
    title = f"training, pipeline stage {part.stage}" if part.phase == "train" else "rollout"
    owner = "on each GPU" if plan.gpu else "a rank"
    low, high = part.span
    lines = [f"{title}: {_gib(part.total)} (range {_gib(low)} to {_gib(high)}) {owner}"]
    for item in part.items:
        lines.append(f"  {_gib(item.num_bytes)}  {item.name}{_range(item)}  [{item.source}]")
    return lines


def verdict(plan: Plan) -> list[str]:
    """Whether the run fits, on the first line, and changes that help on the others."""
    if plan.gpu is None:
        return ["no GPU is configured: no limit to check"]
    limit = plan.gpu.memory_bytes
    peak = plan.peak
    if peak.total <= limit and plan.small_cache is not None:
        return [
            "DOES NOT FIT: one sample exceeds a server's KV cache",
            f"  change {plan.small_cache}",
        ]

    phase = f"stage {peak.stage}" if peak.phase == "train" else "the rollout phase"
    share = peak.total / limit
    text = f"{_gib(peak.total)} of {_gib(limit)} ({share:.0%}) of a {plan.gpu.name}, in {phase}"
    highest = _gib(plan.highest_bytes)
    if plan.fits:
        return [f"FITS: {text}, and {highest} with the highest assumptions"]
    if plan.may_fit:
        return [
            f"MAY NOT FIT: {text}, but {highest} with the highest assumptions, which does not fit",
            *(f"  to be sure, change {advice}" for advice in _advice(plan)),
        ]
    return [f"DOES NOT FIT: {text}", *(f"  change {advice}" for advice in _advice(plan))]


def _advice(plan: Plan) -> Iterator[str]:
    """Changes to make if the peak is too large, the smallest change first."""
    config = plan.config
    layout = plan.layout
    parallel = config.parallel
    if plan.peak.phase == "rollout":
        if config.policy.offload != "all" and config.rollout.on_trainer_gpus:
            yield (
                "policy.offload=optimizer or all: the trainer's state is in host memory while the "
                "servers sample"
            )
        yield (
            "rollout.servers.mem_fraction (lower), rollout.servers.tp (higher), or separate "
            "rollout nodes"
        )

    if not parallel.distributed_optimizer and layout.dp > 1:
        yield (
            "parallel.distributed_optimizer=true: optimizer state is divided over data-parallel "
            "ranks"
        )
    if parallel.recompute.granularity != "full":
        yield (
            "parallel.recompute.granularity=full: only layer inputs are kept, for a third more time"
        )
    if layout.tp > 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel=true: norms' inputs are divided by tp"

    budget = config.batch.tokens_per_microbatch
    longest = max_sequence_tokens(config)
    if budget > longest:
        yield f"batch.tokens_per_microbatch (now {budget}; at least {longest})"
    yield (
        "parallel.tp or parallel.pp (more ranks a replica), or resources.nodes; `plan --search` "
        "compares layouts"
    )


def _time_lines(plan: Plan) -> list[str]:
    samples = timing.samples_per_step(plan.config)
    lengths = f"{plan.lengths.prompt:.0f} + {plan.lengths.response:.0f} tokens"
    lines = [f"one step, {samples:,} samples of {lengths} on average ({plan.lengths.source}):"]
    for phase in plan.phases:
        flops = f", {phase.flops / 1e15:,.1f} PFLOP" if phase.flops else ""
        note = f" ({phase.note})" if phase.note else ""
        low, high = phase.span_s
        lines.append(
            f"  {phase.seconds:9.1f} s  {phase.name}, {low:.1f} to {high:.1f} s{flops}{note}"
        )

    lines.extend(_extra_lines(plan.config))

    together = "together, rollout beside the rest" if plan.is_ahead else "together"
    low, high = plan.step_span
    tokens_per_s = samples * plan.lengths.total / plan.step_s / plan.num_gpus
    lines.append(
        f"  {plan.step_s:9.1f} s  {together}, {low:.1f} to {high:.1f} s: {tokens_per_s:,.0f} "
        "tokens/s a GPU"
    )

    if plan.idle_share:
        trainer = plan.idle["trainer"]
        servers = plan.idle["servers"]
        lines.append(
            f"of this time the trainer's GPUs wait for the servers {trainer:.0%}, and the servers' "
            f"GPUs for the trainer {servers:.0%}"
        )

    steps = plan.config.run.steps
    hours = plan.step_s * steps / 3600
    lines.append(
        f"the run, {steps} steps: {hours:,.1f} h, {hours * plan.num_gpus:,.0f} GPU-hours "
        "(efficiencies are published or assumed, not measured here; checkpoints and evaluation "
        "come on top)"
    )
    return lines


def _extra_lines(config: RunConfig) -> Iterator[str]:
    """The samples that admission may add to a step, whose number depends on the verdicts."""
    extra = memory.most_samples_per_step(config) - timing.samples_per_step(config)
    if not extra:
        return
    admission = config.admission
    reasons = []
    if admission.oversample > 1:
        reasons.append(f"oversample={admission.oversample:g}")
    if admission.refill_rounds:
        reasons.append(f"refill_rounds={admission.refill_rounds}")
    if admission.resample is not None:
        reasons.append(f"resample, at most {memory.most_extra_samples(config)} a prompt")
    yield (
        f"  not counted: at most {extra:,} further samples a step (admission: {', '.join(reasons)})"
    )


def _group_lines(plan: Plan) -> Iterator[str]:
    """Whether whole groups fit into the token budget, which need no score pass, and the largest
    budget that fits.
    """
    groups = timing.group_tokens(plan.config, plan.lengths)
    if groups is None or plan.gpu is None:
        return
    average_tokens, most_tokens = groups
    budget = plan.config.batch.tokens_per_microbatch
    whole_groups = "few"
    if budget >= average_tokens:
        whole_groups = "most"
    if budget >= most_tokens:
        whole_groups = "all"

    largest = largest_budget(plan.config, plan)
    fits = "no budget for the average group fits; see `plan --search`"
    if largest:
        fits = f"up to {largest:,} fit"
    yield (
        f"groups of {average_tokens:,} tokens on average and {most_tokens:,} at most: "
        f"batch.tokens_per_microbatch={budget} keeps "
        f"{whole_groups} of them whole, without a score pass; {fits}"
    )


def _disk_lines(plan: Plan) -> list[str]:
    """Disk space and host memory."""
    inside_step = ", one in the middle of a step" if plan.config.batch.num_updates > 1 else ""
    keep_last = plan.config.checkpoint.keep_last
    step_bytes = memory.host_step_bytes(plan.config)
    lines = [
        f"a checkpoint: {_gib(plan.checkpoint_bytes)}; quota for {plan.num_checkpoints} of them "
        f"(checkpoint.keep_last={keep_last}, one being written{inside_step}) and the export: "
        f"{_gib(plan.disk_bytes)}",
        f"host memory for a step's samples: at most {_gib(step_bytes)} on rank 0 and in the driver "
        "each",
    ]
    host_bytes = plan.host_bytes_per_rank
    if host_bytes:
        lines.append(
            "host memory for reference snapshot, off-loaded state and a save: "
            f"{_gib(host_bytes)} a rank"
        )
    return lines


# --------------------------------------------------------------------------------------- --compare
def render_comparison(plan: Plan) -> str:
    """The same run on an H100 and an H200, each with and without recomputation and off-loading:
    memory and seconds of each phase. `head` is the memory of the output layer.
    """
    titles = ("train", "servers", "head", "fits  s:", *_COMPARED_PHASES, "step")
    columns = "".join(f"{title:>10}" for title in titles)
    lines = [_headline(plan), "", f"  gpu   recompute  offload {columns}"]
    lines.extend(_compared_row(variant) for variant in compared_plans(plan))
    lines.extend(["", "Seconds are estimates from published and assumed efficiencies."])
    return "\n".join(lines)


def _compared_row(plan: Plan) -> str:
    assert plan.gpu is not None
    config = plan.config
    granularity = config.parallel.recompute.granularity
    variant = f"  {plan.gpu.name:<5} {granularity:<10} {config.policy.offload:<8}"

    tokens = config.batch.tokens_per_microbatch / plan.layout.cp
    values = [
        _gib(max(stage.total for stage in plan.stages)),
        "-" if plan.rollout is None else _gib(plan.rollout.total),
        _gib(head_bytes(config, plan.spec, plan.layout, tokens)),
        f"{_fit(plan):<6}",
    ]
    for name in _COMPARED_PHASES.values():
        seconds = [phase.seconds for phase in plan.phases if phase.name.startswith(name)]
        values.append(f"{sum(seconds):.1f}")
    values.append(f"{plan.step_s:.1f}")
    return variant + "".join(f"{value:>10}" for value in values)


# ---------------------------------------------------------------------------------------- --search
def render_search(plans: Sequence[Plan], current: Plan) -> str:
    """The ten best layouts and the configured one."""
    lines = ["  tp  pp  ep   dp  recompute  budget   memory  fits    step s"]
    lines.extend(_search_row(plan) for plan in plans[:_NUM_BEST])
    lines.extend(["", "as configured:", _search_row(current), ""])

    best = plans[0]
    if best.fits:
        lines.append(_overrides(best))
    else:
        lines.append(
            "no layout fits with the highest assumptions: raise resources.nodes or lower "
            "batch.tokens_per_microbatch"
        )
    return "\n".join(lines)


def _overrides(best: Plan) -> str:
    """The overrides that select a layout of the search."""
    layout = best.layout
    return (
        f"best: parallel.tp={layout.tp} parallel.pp={layout.pp} "
        f"parallel.ep={layout.ep} "
        f"parallel.sequence_parallel={str(layout.tp > 1).lower()} "
        "parallel.distributed_optimizer=true "
        f"parallel.recompute.granularity={best.config.parallel.recompute.granularity} "
        f"batch.tokens_per_microbatch={best.config.batch.tokens_per_microbatch}"
    )


def _search_row(plan: Plan) -> str:
    layout = plan.layout
    granularity = plan.config.parallel.recompute.granularity
    budget = plan.config.batch.tokens_per_microbatch
    return (
        f"{layout.tp:4d}{layout.pp:4d}{layout.ep:4d}{layout.dp:5d}  {granularity:<9}"
        f"{budget:8d}{_gib(plan.peak.total):>9}  {_fit(plan):<6}{plan.step_s:8.1f}"
    )


def _fit(plan: Plan) -> str:
    """`yes`, `maybe` (not with the highest assumptions) or `no`."""
    if plan.fits:
        return "yes"
    return "maybe" if plan.may_fit else "no"


# ----------------------------------------------------------------------------------------- numbers
def _range(item: Item) -> str:
    """The range of an item by an assumed constant; empty without one."""
    if item.span == (1.0, 1.0):
        return ""
    low, high = item.span
    return f", {_gib(item.num_bytes * low).strip()} to {_gib(item.num_bytes * high).strip()}"


def _gib(num_bytes: float) -> str:
    if num_bytes < GIB / 100:
        return f"{num_bytes / 2**20:5.2f} MiB"
    return f"{num_bytes / GIB:5.1f} GiB"
