"""Runs NeMo-Run's commands for Slurm. Imports NeMo-Run: import this module where it is used."""

import logging
from dataclasses import dataclass
from typing import Any

from nemo_run.core.tunnel.client import LocalTunnel

from pacs_megatron.runtime.waiting import report_wait

_OUTPUT_BYTES = 4096


@dataclass(kw_only=True)
class BoundedTunnel(LocalTunnel):
    """Reports a long wait, and reads the start of the output only: NeMo-Run takes all of it for the id of the job."""

    def run(self, command: str, **options: Any) -> Any:
        """As NeMo-Run's."""
        logging.getLogger().handlers.clear()  # NeMo-Run's: it hides the report
        with report_wait(f"for `{command.partition(' ')[0]}`"):
            return super().run(f"set -o pipefail; {command} | head -c {_OUTPUT_BYTES}", **options)
