"""`python -m pacs_megatron` and the command `pacs-megatron`."""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """As `cli.main`; a Ctrl-C while the modules load ends without a traceback also."""
    try:
        from pacs_megatron import cli

        return cli.main(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
