"""Runs NeMo-Run's commands for Slurm.

Import this module at the place of use, because it imports NeMo-Run.
"""

import logging
from dataclasses import dataclass
from typing import Any

from nemo_run.core.tunnel.client import LocalTunnel

from pacs_megatron.runtime.waiting import report_wait

_OUTPUT_BYTES = 4096


@dataclass(kw_only=True)
class BoundedTunnel(LocalTunnel):
    """Reports a long wait.

    Returns the start of the output only, because NeMo-Run parses all of it as the job id.
    """

    def run(self, command: str, **options: Any) -> Any:
        """As `LocalTunnel.run`."""
        logging.getLogger().handlers.clear()  # NeMo-Run's handler hides the report
        with report_wait(f"for `{command.partition(' ')[0]}`"):
            return super().run(f"set -o pipefail; {command} | head -c {_OUTPUT_BYTES}", **options)
