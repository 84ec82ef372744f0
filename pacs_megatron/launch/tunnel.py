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
    """A tunnel that reports a long wait and returns the start of the output only.

    NeMo-Run parses all of the output as the job id.
    """

    def run(self, command: str, **options: Any) -> Any:
        """Same as `LocalTunnel.run`, with a report and with limited output."""
        logging.getLogger().handlers.clear()  # NeMo-Run's handler hides the report
        program = command.partition(" ")[0]
        with report_wait(f"for `{program}`"):
            return super().run(f"set -o pipefail; {command} | head -c {_OUTPUT_BYTES}", **options)
