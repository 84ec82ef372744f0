"""PACS post-training of reasoning models on Megatron-Core: prompts in, a Hugging Face checkpoint
out.
"""

import warnings

# Megatron warns at import about every accelerator package a laptop does not have; the first log
# line of a run lists them.
warnings.filterwarnings("ignore", module=r"megatron\.")

__version__ = "0.2.0"
