"""Checks the exported checkpoint: plain `transformers` must answer greedily with the same tokens as
the policy.

The policy comes from the run's own Megatron checkpoint and recomputes the whole sequence for every
token, so it shares neither weights nor cache with the exported model.
"""

import argparse
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
    """Greedy responses of the Hugging Face model, end token included.

    Args:
        folder: of the model.
        prompts: int32 [prompt] each, token ids.
        end: id of the end token.
    """
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
    model_dir = model_folder(config.model.path)
    run = context.build(config, run_dir, model_dir, channel, None, StopFlag(run_dir))
    context.add_base_digest(run)
    if saving.resume(run) is None:
        sys.exit(f"{run_dir} holds no checkpoint")
    vocab_size = run.policy.spec.vocab_size

    sequences = [prompt.tolist() for prompt in prompts]
    unfinished = list(sequences)
    for _ in range(MAX_TOKENS):
        logits = next_token_logits(run.policy.models[0], unfinished)
        # The vocabulary is padded.
        tokens = logits[:, :vocab_size].argmax(-1).tolist()
        for sequence, token in zip(unfinished, tokens, strict=True):
            sequence.append(token)
        unfinished = [sequence for sequence in unfinished if sequence[-1] != end]
        if not unfinished:
            break
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def next_token_logits(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    """Logits after each sequence, in one packed forward pass.

    Args:
        model: the policy's GPTModel, on the CPU.
        sequences: token ids of each sequence.

    Returns:
        fp32 [sequences, padded vocabulary].
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        tokens += sequence
        positions += range(len(sequence))
    lengths = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )

    last_tokens = bounds[1:].long() - 1
    with torch.no_grad():
        logits = model(
            torch.tensor([tokens]), torch.tensor([positions]), None, packed_seq_params=packed
        )
    return logits[0, last_tokens]


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
    num_different = sum(a != b for a, b in zip(exported, policy, strict=True))
    num_tokens = sum(len(answer) for answer in policy)
    summary = {"answers": len(prompts), "tokens": num_tokens, "different_answers": num_different}
    print(json.dumps(summary))
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
