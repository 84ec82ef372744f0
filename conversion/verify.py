"""Compare a Hugging Face folder with a Megatron checkpoint and write a certificate; `--help` lists
the options.

The same as `pacs-megatron convert verify`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

from pacs_megatron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
