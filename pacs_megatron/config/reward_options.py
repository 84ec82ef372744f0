"""The options of each reward function: a part of the schema (config/schema.py)."""

from typing import Annotated, Literal

from pydantic import Field

from pacs_megatron.config.text import Line
from pacs_megatron.contracts.options import Options


class RewardWorkerOptions(Options):
    """Options of all reward functions."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Number of reward worker processes."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one judgement, in seconds. The worker is killed and restarted."""
    memory_limit_gib: float = Field(default=4.0, gt=0, le=2**20)
    """Memory limit of a worker, in GiB. A response that needs more is not judged."""
    label_threshold: float | None = None
    """`label = 1 if reward >= label_threshold`. If null, a reward outside {0, 1} is an error."""
    max_failure_frac: float = Field(default=0.05, ge=0, le=1)
    """Maximum fraction of a step's samples that fail to be judged. Above it the run stops."""


class MathReward(RewardWorkerOptions):
    """Compares the final answer with the reference by math-verify."""

    name: Literal["math"]
    """Reward function: `math`, `arithmetic`, `format` or `custom`."""


class ArithmeticReward(RewardWorkerOptions):
    """Compares numbers exactly."""

    name: Literal["arithmetic"]
    """Reward function: `math`, `arithmetic`, `format` or `custom`."""


class FormatReward(RewardWorkerOptions):
    """Matches the response with a regular expression."""

    name: Literal["format"]
    """Reward function: `math`, `arithmetic`, `format` or `custom`."""
    pattern: str
    """Regular expression that must match the whole response (re.DOTALL)."""


class CustomReward(RewardWorkerOptions):
    """Calls a Python function."""

    name: Literal["custom"]
    """Reward function: `math`, `arithmetic`, `format` or `custom`."""
    function: Line
    """`module:function` or `path/to/file.py:function`, called as f(prompt, response) -> float."""


RewardOptions = Annotated[MathReward | ArithmeticReward | FormatReward | CustomReward, Field(discriminator="name")]
