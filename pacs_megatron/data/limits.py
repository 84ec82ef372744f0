"""Runs code and patterns of a model folder in a process with limits."""

from collections.abc import Callable
from typing import Any

from pacs_megatron.errors import DataError
from pacs_megatron.runtime.processes import run_limited
from pacs_megatron.runtime.waiting import report_wait

_MEMORY_BYTES = 2 * 2**30
"""Memory limit for the texts of one batch"""


def run_in_child(work: Callable[[], Any], seconds: float, where: str, fix: str) -> Any:
    """The result of `work()`, computed in a process that may crash or be ended.

    Args:
        work: Runs code or patterns of the model folder.
        seconds: CPU time of the process.
        where: Source of what runs, for messages.
        fix: Advice of the message.

    Raises:
        DataError: `work` fails, or exceeds the limits of time and memory.
    """
    try:
        with report_wait(f"for the {where}"):
            return run_limited(work, seconds=seconds, memory_bytes=_MEMORY_BYTES)
    except (TimeoutError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        if not reason:
            reason = f"not finished after {seconds:g} s of CPU time"
        raise DataError(f"{where}: {reason}; {fix}") from error
