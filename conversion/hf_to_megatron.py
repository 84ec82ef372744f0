"""Hugging Face folder or hub id -> Megatron checkpoint.

Same as `pacs-megatron convert to-megatron`; `--help` lists the options.
"""

import sys
from pathlib import Path

# So that it runs from a checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pacs_megatron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
