"""Hugging Face folder or hub id -> Megatron checkpoint; `--help` lists the options.

The same as `pacs-megatron convert to-megatron`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

from pacs_megatron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
