"""Checks the exported checkpoint: plain `transformers` must answer greedily with the very tokens of
the policy.

The policy comes from the run's own Megatron checkpoint and recomputes the whole sequence for every
token, so it shares neither weights nor cache with the exported model.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from pacs_megatron.config import load_config
from pacs_megatron.data import load_prompts
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.training.signals import StopFlag

MAX_TOKENS = 48


def exported_answers(folder: Path, prompts: list[np.ndarray], end: int) -> list[list[int]]:
    """Greedy responses of the Hugging Face model, end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=end,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def policy_answers(run_dir: Path, prompts: list[np.ndarray], end: int) -> list[list[int]]:
    """Greedy responses of the Megatron policy of the run's last checkpoint, on one rank."""
    # After setup_logging: a CUDA build of torch warns at this import on a host without a GPU.
    from pacs_megatron.training import context, saving

    config = load_config(run_dir / "config.yaml", ["parallel.tp=1"]).config
    channel = context.join(config)
    w = context.build(
        config, run_dir, model_folder(config.model.path), channel, None, StopFlag(run_dir)
    )
    if saving.resume(w) is None:
        sys.exit(f"{run_dir} holds no checkpoint")
    from megatron.core.packed_seq_params import PackedSeqParams

    model = w.policy.models[0]
    sequences = [prompt.astype(np.int64).tolist() for prompt in prompts]
    open_rows = list(range(len(prompts)))
    for _ in range(MAX_TOKENS):
        lens = [len(sequences[row]) for row in open_rows]
        bounds = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lens),
            max_seqlen_kv=max(lens),
        )
        tokens = list(itertools.chain.from_iterable(sequences[row] for row in open_rows))
        places = list(itertools.chain.from_iterable(range(length) for length in lens))
        ids = torch.tensor([tokens])
        positions = torch.tensor([places])
        with torch.no_grad():
            logits = model(ids, positions, None, packed_seq_params=packed)[0, bounds[1:].long() - 1]
        for row, token in zip(
            open_rows, logits[:, : w.policy.spec.vocab_size].argmax(-1).tolist(), strict=True
        ):
            sequences[row].append(token)
        open_rows = [row for row in open_rows if sequences[row][-1] != end]
        if not open_rows:
            break
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare the exported checkpoint with the policy, greedily."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--num-prompts", type=int, default=32)
    args = parser.parse_args()
    setup_logging(None, 0)
    disable_progress_bar()
    config = load_config(args.run_dir / "config.yaml").config
    tokenizer = AutoTokenizer.from_pretrained(args.run_dir / "hf")
    benchmark = load_prompts(config.evaluation.benchmarks[0], config.data, tokenizer)
    prompts = [prompt.token_ids for prompt in benchmark.prompts[: args.num_prompts]]
    end = tokenizer.eos_token_id
    exported = exported_answers(args.run_dir / "hf", prompts, end)
    policy = policy_answers(args.run_dir, prompts, end)
    different = sum(a != b for a, b in zip(exported, policy, strict=True))
    tokens = sum(len(answer) for answer in policy)
    print(json.dumps({"answers": len(prompts), "tokens": tokens, "different_answers": different}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
