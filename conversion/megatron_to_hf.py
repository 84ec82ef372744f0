"""Megatron checkpoint (converted, or of a training run) -> Hugging Face folder.

Same as `pacs-megatron convert to-hf`; `--help` lists the options.
"""

import sys
from pathlib import Path

# So that it runs from a checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pacs_megatron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
