"""Data types and protocols that all packages share. Imports neither torch nor Megatron at run time."""

from pacs_megatron.contracts.decisions import Decision, DecisionKind, Interrupted
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.contracts.protocols import (
    Objective,
    Prepared,
    RewardFn,
    RolloutEngine,
    SampleTable,
    TokenRecord,
    UpdateReport,
    WeightReceiver,
)
from pacs_megatron.contracts.samples import Group, Judgement, Prompt, Sample, SampleRequest, SamplingParams, Span, Stop
from pacs_megatron.contracts.step_data import MicroBatchPlan, MiniBatch, SampleFacts, TokenBuffers

__all__ = [
    "Decision",
    "DecisionKind",
    "Group",
    "Interrupted",
    "Judgement",
    "Layout",
    "MicroBatchPlan",
    "Objective",
    "MiniBatch",
    "Prepared",
    "Prompt",
    "RewardFn",
    "RolloutEngine",
    "Sample",
    "SampleFacts",
    "SampleRequest",
    "SampleTable",
    "SamplingParams",
    "Span",
    "Stop",
    "TokenBuffers",
    "TokenRecord",
    "UpdateReport",
    "WeightReceiver",
]
