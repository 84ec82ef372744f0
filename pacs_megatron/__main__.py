"""`python -m pacs_megatron`."""

import sys

from pacs_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
