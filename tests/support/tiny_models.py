"""Tiny, random, complete Hugging Face checkpoints: config, safetensors, tokenizer with a Qwen-style
chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

EOS = "<|im_end|>"
PAD = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE without merges:

    256 bytes (ids 0..255) and three special tokens; saved to `folder`, returned.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([PAD, "<|im_start|>", EOS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def qwen3_config(*, tied: bool, **changes: Any) -> Any:
    """A 2-layer Qwen3 with grouped queries; `changes` go to Qwen3Config. vocab_size exceeds the
    tokenizer's, as Qwen's.
    """
    from transformers import Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    return Qwen3Config(**(shape | changes))


def make_tiny_qwen3(
    folder: Path, *, tied: bool = False, seed: int = 0, dtype: str = "float32", **changes: Any
) -> Path:
    """Writes the whole checkpoint to `folder` and returns it.

    Weights are drawn wider than the usual initialisation (0.02), so that attention and logits are
    far from uniform and a wrong weight is visible; norm weights differ from 1 for the same reason.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    config = qwen3_config(tied=tied, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.12)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
