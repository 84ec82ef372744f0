"""`python -m pacs_megatron` and the command `pacs-megatron`."""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Same as `cli.main`; a Ctrl-C while the modules load also ends without a traceback."""
    try:
        from pacs_megatron import cli

        return cli.main(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
