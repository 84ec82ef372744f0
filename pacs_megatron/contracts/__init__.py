"""Data types and protocols that all packages share. At run time it imports neither torch nor
Megatron.
"""

from pacs_megatron.contracts.conversation import Turn
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.contracts.objective_data import Prepared, TokenRecord, UpdateReport
from pacs_megatron.contracts.protocols import RewardFn, WeightReceiver
from pacs_megatron.contracts.reward_sample import RewardSample
from pacs_megatron.contracts.samples import (
    Group,
    Judgement,
    Prompt,
    Sample,
    SampleRequest,
    SamplingOptions,
    Span,
    Stop,
    ToolCall,
    Writer,
)
from pacs_megatron.contracts.step_data import (
    Interrupted,
    MicroBatchPlan,
    MiniBatch,
    SampleFacts,
    TokenBuffers,
)

__all__ = [
    "Group",
    "Interrupted",
    "Judgement",
    "Layout",
    "MicroBatchPlan",
    "MiniBatch",
    "Prepared",
    "Prompt",
    "RewardFn",
    "RewardSample",
    "Sample",
    "SampleFacts",
    "SampleRequest",
    "SamplingOptions",
    "Span",
    "Stop",
    "TokenBuffers",
    "TokenRecord",
    "ToolCall",
    "Turn",
    "UpdateReport",
    "WeightReceiver",
    "Writer",
]
