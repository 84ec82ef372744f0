"""PACS post-training of reasoning models on Megatron-Core: prompts in, a Hugging Face checkpoint out."""

__version__ = "0.1.0"
