"""Variants of a plan: all layouts on the same GPUs, larger token budgets, other GPUs."""

import bisect
import math
from collections.abc import Iterator
from itertools import product

from pacs_megatron.config import RunConfig
from pacs_megatron.config.checks import divisors, find_problems, layout_problems
from pacs_megatron.errors import ConfigError
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.workbench.plan import timing
from pacs_megatron.workbench.plan.plan import Plan, plan_of

BUDGET_STEP = 1024
"""tokens"""
_MAX_PIPELINE = 16
_GRANULARITIES = ("none", "full")
_COMPARED_GPUS = ("h100", "h200")


def search_layouts(plan: Plan) -> list[Plan]:
    """Plans of all valid layouts on the same GPUs: first those that fit with the highest
    assumptions, then those that may fit, each by step time.

    Raises ConfigError without GPUs.
    """
    if plan.gpu is None:
        raise ConfigError(
            "plan --search compares layouts on GPUs; set resources.gpus_per_node and resources.gpu"
        )
    plans = [plan_of(config, plan.spec, plan.lengths) for config in _candidates(plan)]
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple[bool, bool, float]:
    return not plan.fits, not plan.may_fit, plan.step_s


def _candidates(plan: Plan) -> Iterator[RunConfig]:
    """Configurations with a valid layout, each also with a larger token budget if one fits.

    A layout is tp, pp and ep, with and without full recomputation. tp and ep stay inside a node.
    """
    config = plan.config
    spec = plan.spec
    gpus_per_node = config.resources.gpus_per_node
    num_experts = 1 if spec.moe is None else spec.moe.num_experts

    tps = divisors(gpus_per_node)
    pps = [pp for pp in divisors(spec.num_layers) if pp <= _MAX_PIPELINE]
    eps = [ep for ep in divisors(num_experts) if ep <= gpus_per_node]
    for tp, pp, ep, granularity in product(tps, pps, eps, _GRANULARITIES):
        candidate = _changed(
            config,
            "parallel",
            tp=tp,
            pp=pp,
            ep=ep,
            vpp=None,
            sequence_parallel=tp > 1,
            distributed_optimizer=True,
            recompute=_recompute(config, granularity),
        )

        problems = find_problems(candidate) + layout_problems(candidate, plan.layout.world_size)
        if problems or shape_problems(candidate, spec, ""):
            continue
        yield candidate

        # More of PACS's groups may be whole in a larger budget.
        budget = largest_budget(candidate, plan)
        if budget > config.batch.tokens_per_microbatch:
            yield _changed(candidate, "batch", tokens_per_microbatch=budget)


def largest_budget(config: RunConfig, plan: Plan) -> int:
    """The largest `batch.tokens_per_microbatch` that fits.

    Args:
        config: of a layout.
        plan: of the configured layout, with the architecture and the mean lengths.

    Returns:
        A multiple of BUDGET_STEP, at most the longest group. 0 if not even the average group fits,
        or if no update depends on a group's scores.
    """
    groups = timing.group_tokens(config, plan.lengths)
    if groups is None:
        return 0

    def is_too_large(num_budget_steps: int) -> bool:
        tokens = num_budget_steps * BUDGET_STEP
        larger = _changed(config, "batch", tokens_per_microbatch=tokens)
        return not plan_of(larger, plan.spec, plan.lengths).fits

    average_tokens, most_tokens = groups
    first = math.ceil(average_tokens / BUDGET_STEP)
    last = math.ceil(most_tokens / BUDGET_STEP)
    # Memory grows with the budget, so the sizes that fit are the first ones.
    num_fitting = bisect.bisect_left(range(first, last + 1), True, key=is_too_large)
    return (first + num_fitting - 1) * BUDGET_STEP if num_fitting else 0


def compared_plans(plan: Plan) -> list[Plan]:
    """The same run on an H100 and an H200, each with and without recomputation and, where servers
    share the trainer's GPUs, off-loading.
    """
    offloads = ["none"]
    if plan.config.rollout.starts_servers_on_trainer_gpus:
        offloads.append("all")

    plans = []
    for gpu, granularity, offload in product(_COMPARED_GPUS, _GRANULARITIES, offloads):
        config = _changed(plan.config, "resources", gpu=gpu)
        config = _changed(config, "parallel", recompute=_recompute(config, granularity))
        config = _changed(config, "policy", offload=offload)
        plans.append(plan_of(config, plan.spec, plan.lengths))
    return plans


def _changed(config: RunConfig, section: str, **changes: object) -> RunConfig:
    """The configuration with other values in one section.

    `model_copy` checks nothing, so that a search may try values that do not fit together.
    """
    changed_section = getattr(config, section).model_copy(update=changes)
    return config.model_copy(update={section: changed_section})


def _recompute(config: RunConfig, granularity: str) -> object:
    return config.parallel.recompute.model_copy(update={"granularity": granularity})
