"""The planned and the traced highest sum of a rank's tensors, of few layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pacs_megatron.config import load_config
from pacs_megatron.workbench.plan.activations import activation_items
from pacs_megatron.workbench.plan.plan import make_plan
from pacs_megatron.workbench.plan.state import Item, state_items
from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.traced_rank import ROOT, trace

_LAYERS = 4
"""of a rank"""
_GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of one rank."""

    state: float
    """weights, gradients and optimizer"""
    planned: float
    traced: float

    @property
    def error(self) -> float:
        """Of the planned sum."""
        return self.planned / self.traced - 1

    @property
    def error_of_activations(self) -> float:
        """Of what is planned beside the state."""
        return (self.planned - self.state) / (self.traced - self.state) - 1


def peak_of(
    config: str, overrides: Sequence[str] = (), *, stage: int = 0, transformer_engine: bool = True
) -> Peak:
    """The peak of the first update of a step, with two full micro-batches a rank.

    Args:
        config: path of a configuration with a GPU.
        overrides: `key=value` each.
        stage: of the pipeline, whose first rank is traced.
        transformer_engine: else local layers, which have none of its workspaces.
    """
    plan = make_plan(load_config(ROOT / config, list(overrides)))
    layout = plan.layout
    spec = replace(plan.spec, num_layers=_LAYERS * layout.pp)
    state = state_items(plan.config, spec, layout, stage)
    activations = activation_items(plan.config, spec, layout, stage, imbalance=1.0)
    items = [*state, *(item for item in activations if _is_traced(item, transformer_engine))]

    # Megatron's local layers have a buffer for gathered hidden states, and a final norm that keeps
    # its input and its output in fp32.
    beside_bytes = 0.0
    if not transformer_engine:
        states = plan.config.batch.tokens_per_microbatch * spec.hidden_size
        is_split = plan.config.parallel.sequence_parallel
        ranks = layout.tp if is_split else 1
        beside_bytes = 2 * states * is_split + 2 * 4 * states / ranks

    samples_per_rank = 2 * layout.pp * _GROUP_SIZE
    request = TraceRequest(
        config=config,
        overrides=list(overrides),
        rank=stage * (layout.world_size // layout.pp),
        num_layers=spec.num_layers,
        transformer_engine=transformer_engine,
        prompt_tokens=16,
        num_groups=samples_per_rank * layout.dp // _GROUP_SIZE,
        group_size=_GROUP_SIZE,
        updates=1,
    )
    peaks = trace(request)["peaks"].values()
    return Peak(
        state=sum(item.num_bytes for item in state),
        planned=sum(item.num_bytes for item in items) + beside_bytes,
        traced=max(peak["num_bytes"] for peak in peaks),
    )


def _is_traced(item: Item, transformer_engine: bool) -> bool:
    """Whether the trace has the item. Its mini-batch is smaller than the planned one."""
    if item.name.startswith("Transformer Engine"):
        return transformer_engine
    return not item.name.startswith("tokens, labels")
