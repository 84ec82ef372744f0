"""Writes the quickstart's model: a Qwen3 of 345 thousand parameters with random weights and its own
tokenizer.

The checkpoint is an ordinary Hugging Face folder. Heads, query groups and vocabulary divide by 2,
so that the model also trains with tensor parallelism 2.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 384
MAX_POSITIONS = 256
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# Words stay whole and every digit stands alone, as in Qwen's tokenizers: arithmetic is learned
# digit by digit.
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The words of the quickstart come first, so that each becomes one token; the rest fills the
# vocabulary.
FREQUENT_TEXT = "user\nsystem\nassistant\nWhat is 1 + 2? Answer in \\boxed{}. 1+2+0=03, \\boxed{3}"
OTHER_TEXT = (
    "Please reason step by step, and put your final answer within \\boxed{}. Compute the sum of "
    "the numbers, add the ones and then the tens, and carry what is left to the next column. "
    "Subtract, multiply and divide the first number by the second, - * / < > ( ) [ ] and check "
    "that the result is right."
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB_SIZE` entries.

    All 256 bytes are in the vocabulary, so any text survives encoding and decoding. It is the same
    for every seed. Raises ValueError if the text above yields too few merges to fill the
    vocabulary: ids without a token would be sampled now and then, and could not be decoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([FREQUENT_TEXT] * 20 + [OTHER_TEXT], trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer has {size} entries, expected {VOCAB_SIZE}; add words to OTHER_TEXT"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Returns the architecture: two layers, because a column needs only a look-up and a copy."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build_model(out_dir: Path, seed: int) -> None:
    """Writes config, float32 weights drawn from `seed`, tokenizer and generation settings to
    `out_dir`.
    """
    disable_progress_bar()
    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the quickstart's randomly initialised model."
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_model(args.out_dir, args.seed)
    print(f"wrote the model to {args.out_dir}")


if __name__ == "__main__":
    main()
