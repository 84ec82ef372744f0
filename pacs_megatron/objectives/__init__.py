"""Training objectives: pure functions from per-token log-probs and verified labels to a loss. No process groups."""

from pacs_megatron.objectives.grpo import Grpo
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.sft import Sft

__all__ = ["Grpo", "Pacs", "Sft", "build_objective"]
