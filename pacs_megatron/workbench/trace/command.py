"""`plan --trace`: memory, collectives and work of an update, from traces of few layers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.runtime.files import GIB
from pacs_megatron.workbench.plan.activations import minibatch_bytes
from pacs_megatron.workbench.plan.memory import StageMemory, items_beside
from pacs_megatron.workbench.plan.plan import Plan, make_plan
from pacs_megatron.workbench.plan.render import memory_lines
from pacs_megatron.workbench.plan.state import Item, layers_of_stage
from pacs_megatron.workbench.trace.estimate import (
    RankEstimate,
    extrapolate,
    kinds_of_stages,
    layers_to_trace,
    with_highest_peaks,
)
from pacs_megatron.workbench.trace.rank import TraceRequest, has_transformer_engine
from pacs_megatron.workbench.trace.runs import trace_ranks
from pacs_megatron.workbench.trace.seconds import (
    FASTEST,
    LIKELY,
    SLOWEST,
    formula_seconds,
    update_seconds,
)

_GROUP_SIZE = 8
"""samples of a traced group"""
_PROMPT_TOKENS = 16
_SMALL = 0.01
"""parts below this share of the peak have one line together"""


def trace_plan(
    config_path: Path, overrides: Sequence[str], *, local_layers: bool = False
) -> tuple[str, ExitCode]:
    """The text to print, and OK if the run fits or may fit.

    Args:
        config_path: of the run.
        overrides: `key=value` each.
        local_layers: traces Megatron-Core's local layers.

    Raises ConfigError for a run without GPUs, and without Transformer Engine unless
    `local_layers`.
    """
    loaded = load_config(config_path, overrides)
    plan = make_plan(loaded)
    _check(loaded, plan, local_layers=local_layers)

    estimates = _estimates(loaded, config_path, overrides, plan, local_layers=local_layers)
    traced = replace(plan, stages=tuple(_stage_memory(plan, each) for each in estimates))
    lines = [_what_was_traced(estimates, local_layers=local_layers), ""]
    lines.extend(memory_lines(traced))
    for estimate in estimates:
        lines.append("")
        lines.extend(_estimate_lines(plan, estimate))
    return "\n".join(lines), ExitCode.OK if traced.may_fit else ExitCode.MISCONFIGURED


def _check(loaded: LoadedConfig, plan: Plan, *, local_layers: bool) -> None:
    """Raises ConfigError for what cannot be traced."""
    config = loaded.config
    if plan.gpu is None:
        raise ConfigError(
            "plan --trace executes a run's GPU path, and this run has no GPUs; set "
            "resources.gpus_per_node and resources.gpu"
        )
    if config.precision.fp8 is not None and local_layers:
        raise ConfigError(
            "plan --trace traces FP8 with Transformer Engine's layers only, got --local-layers and "
            f"{config.precision.fp8} ({loaded.where('precision.fp8')}); add the override "
            "precision.fp8=null to trace bf16"
        )
    if not local_layers and not has_transformer_engine():
        raise ConfigError(
            "plan --trace needs Transformer Engine, whose layers a run on GPUs has, and it is not "
            "installed here; install it, or add --local-layers to trace Megatron-Core's local "
            "layers, whose activations differ"
        )


def _estimates(
    loaded: LoadedConfig,
    config_path: Path,
    overrides: Sequence[str],
    plan: Plan,
    *,
    local_layers: bool,
) -> list[RankEstimate]:
    """One rank of each kind of stage: the highest peaks of the first and a later update, and the
    work of the later one.
    """
    layout = plan.layout
    sizes = layers_to_trace(layout)
    request = _request(plan, config_path, overrides, local_layers=local_layers)
    stages = kinds_of_stages(layout)
    # The first update of a step computes the output layer's gradients in the forward pass, the
    # later ones may not.
    indices = sorted({0, min(1, plan.config.batch.num_updates - 1)})

    cases = list(product(stages, indices))
    requests = []
    for stage, index in cases:
        rank = stage * (layout.world_size // layout.pp)  # Megatron's order: the stage varies last
        for size in sizes:
            num_layers = size * layout.pp
            requests.append(replace(request, rank=rank, num_layers=num_layers, index=index))

    traces = trace_ranks(loaded, requests)
    estimates: dict[int, RankEstimate] = {}
    for position, (stage, _index) in enumerate(cases):
        first = 2 * position
        num_layers = len(layers_of_stage(plan.spec.num_layers, layout, stage))
        pair = (traces[first], traces[first + 1])
        estimate = extrapolate(stage, num_layers, requests[first], pair, layout)
        if stage in estimates:
            estimate = with_highest_peaks(estimate, estimates[stage])
        estimates[stage] = estimate
    return list(estimates.values())


def _request(
    plan: Plan, config_path: Path, overrides: Sequence[str], *, local_layers: bool
) -> TraceRequest:
    """An update whose micro-batches fill the token budget, and the pipeline.

    Prompts are short, so that almost all positions pass the output layer.
    """
    config = plan.config
    layout = plan.layout
    batches = 2 if layout.pp == 1 or layout.vpp is not None else 1
    longest = max_sequence_tokens(config)
    group_tokens = _GROUP_SIZE * min(longest, config.batch.tokens_per_microbatch // _GROUP_SIZE)
    groups_together = max(1, config.batch.tokens_per_microbatch // max(group_tokens, 1))
    prompt = min(config.data.max_prompt_tokens, _PROMPT_TOKENS, group_tokens // _GROUP_SIZE // 2)
    return TraceRequest(
        config=str(config_path),
        overrides=list(overrides),
        transformer_engine=not local_layers,
        prompt_tokens=max(1, prompt),
        num_groups=layout.dp * layout.pp * batches * groups_together,
        group_size=_GROUP_SIZE,
    )


def _stage_memory(plan: Plan, estimate: RankEstimate) -> StageMemory:
    """The traced peak, and what a GPU has beside it."""
    peak = estimate.peak
    small = 0.0
    items = []
    for part, num_bytes in sorted(peak.by_part.items(), key=lambda pair: -pair[1]):
        if num_bytes < _SMALL * peak.num_bytes:
            small += num_bytes
            continue
        name = "weights, gradients and optimizer" if part == "state" else part
        items.append(Item(name, num_bytes, "traced"))
    items.append(Item("other parts", small, "traced"))

    batch_bytes = minibatch_bytes(plan.config, plan.layout)
    items.append(Item("tokens, labels and log-probs of a mini-batch", batch_bytes, "computed"))
    beside = items_beside(plan.config, plan.spec, plan.layout, peak.num_bytes + batch_bytes)
    return StageMemory("train", estimate.stage, (*items, *beside))


# ------------------------------------------------------------------------------------------- text
def _what_was_traced(estimates: Sequence[RankEstimate], *, local_layers: bool) -> str:
    few, many = estimates[0].traced_layers
    layers = "local layers of Megatron-Core, whose activations differ from Transformer Engine's"
    if not local_layers:
        layers = f"layers of Transformer Engine {importlib.metadata.version('transformer-engine')}"
    return f"traced: {few} and {many} {layers}; all figures are extrapolated to all layers"


def _estimate_lines(plan: Plan, estimate: RankEstimate) -> Iterator[str]:
    """Phases, work, collectives and host synchronisations of a rank."""
    budget = plan.config.batch.tokens_per_microbatch
    yield (
        f"stage {estimate.stage} (rank {estimate.rank}), {estimate.num_layers} layers, an update "
        f"of {estimate.num_microbatches} micro-batches of at most {budget:,} tokens:"
    )
    for peak in estimate.peaks:
        live = estimate.live_after.get(peak.phase)
        after = "" if live is None else f", {live / GIB:.1f} GiB after it"
        flops = estimate.flops.get(peak.phase, 0.0)
        work = f", {flops / 1e15:.3f} PFLOP" if flops else ""
        yield (
            f"  {peak.num_bytes / GIB:5.1f} GiB  {peak.phase}{after}{work}; its peak is at "
            f"{peak.operation} of {peak.part}"
        )

    yield _seconds_line(plan, estimate)
    yield "  collectives of an update:"
    for traffic in estimate.traffic:
        if traffic.phase == "build":
            continue
        yield (
            f"    {traffic.calls:7.0f} x {traffic.operation}, {traffic.group}, "
            f"{traffic.num_bytes / GIB:.3f} GiB, {traffic.phase}"
        )

    yield "  host synchronisations of an update:"
    for (phase, operation, place), count in estimate.syncs.items():
        if phase != "build":
            yield f"    {count:7.0f} x {operation} at {place}, {phase}"


def _seconds_line(plan: Plan, estimate: RankEstimate) -> str:
    """Seconds of the update by class of kernels, and the formulas' for as many micro-batches."""
    assert plan.gpu is not None
    seconds, fastest, slowest = (
        update_seconds(plan.config, plan.layout, plan.gpu, estimate, rates)
        for rates in (LIKELY, FASTEST, SLOWEST)
    )
    parts = [f"{name} {value:.2f}" for name, value in sorted(seconds.kernels.items())]
    parts.append(f"collectives {seconds.collectives:.2f}")
    parts.append(
        f"data parallelism {seconds.visible_data_parallel:.2f} of "
        f"{seconds.data_parallel:.2f} visible"
    )
    by_formulas = formula_seconds(plan) * estimate.num_microbatches
    return (
        f"  {seconds.total:.2f} s ({fastest.total:.2f} to {slowest.total:.2f}) by kernels "
        f"({', '.join(parts)}, bubble {seconds.bubble:.0%}); "
        f"{by_formulas:.2f} s by the formulas of plan"
    )
