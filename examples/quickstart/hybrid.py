"""`python -m examples.quickstart.hybrid`: a tiny hybrid with random weights learns to write digits.

It has one layer with a gated delta net and one with gated attention, as Qwen3.5, and trains with
tensor and sequence parallelism on two CPU cores. Needs Python 3.12 or 3.13, whose Megatron-Core has
such layers.
"""

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils.logging import disable_progress_bar

from examples.quickstart.model import MAX_POSITIONS, VOCAB_SIZE, build_tokenizer
from examples.quickstart.problems import write_problems
from examples.quickstart.run import REPO, run
from pacs_megatron.observability.metrics import read_metrics


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    """Returns the architecture."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_inputs(folder: Path, seed: int) -> None:
    """Writes the model with random weights, its tokenizer and problems; keeps those that exist."""
    if (folder / "done").is_file():
        return
    disable_progress_bar()
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(build_config(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "data", seed, num_test=1, num_demonstrations=1)
    (folder / "done").write_text(f"seed {seed}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default="runs")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. run.steps=10")
    args = parser.parse_args()
    base = Path(args.dir)
    inputs = base / "quickstart-hybrid-inputs"
    make_inputs(inputs, args.seed)
    run(
        "pacs_megatron",
        "train",
        str(REPO / "configs/runs/quickstart-hybrid.yaml"),
        f"run.dir={base}",
        f"run.seed={args.seed}",
        f"model.path={inputs}/model",
        f"data.train.path={inputs}/data/train.json",
        *args.overrides,
    )
    rows = [row for row in read_metrics(base / "quickstart-hybrid") if "reward/mean" in row]
    first = rows[0]["reward/mean"]
    last = rows[-1]["reward/mean"]
    print(f"reward {first:.3f} -> {last:.3f}  ({len(rows)} steps)")


if __name__ == "__main__":
    main()
