"""Compares a Hugging Face folder with a Megatron checkpoint and writes a certificate.

Same as `pacs-megatron convert verify`; `--help` lists the options.
"""

import sys
from pathlib import Path

# So that it runs from a checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pacs_megatron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
