"""Rounding noise of log-probs and scores, by precision, head and length, on a deep, narrow, trained
model.

    python benchmarks/logprob_noise.py [--fp8] [--layouts] [--length 16384] [--concentration 0.005]

Trains a Qwen3 of 16 layers on a random Markov chain, rounds its weights to bf16, and computes the
log-probs of the same tokens by the policy in fp32 (the reference) and in bf16 with both heads.
`sigma` is the sd of a token's difference to the reference, `bias` its mean. For each length: sd of
the sum r over a sample and of psi (rloo, groups of 8), beside the sd that independent tokens
predict: sigma sqrt(T) and beta sigma sqrt(T_i + sum_{j != i} T_j / (G-1)^2), beta 1. `packing`
compares bf16 with itself: the sequences alone and packed with others. `--fp8` needs Transformer
Engine and the stand-ins of tests/te: products in FP8 are emulated (quantisation only, a lower
bound).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

VOCAB = 256
GROUP = 8
SEQUENCES = 4
LENGTHS = (256, 1024, 2048, 4096, 8192, 16384)
"""tokens of a sample, as far as `--length` allows"""
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,  # tp 2 divides them
    "head_dim": 32,
    "max_position_embeddings": 32768,
}


def markov_chain(
    rng: np.random.Generator, num_sequences: int, length: int, table: np.ndarray
) -> np.ndarray:
    """Random sequences of a Markov chain.

    Args:
        rng: of the draws.
        num_sequences: rows of the result.
        length: tokens of each sequence.
        table: [VOCAB, VOCAB], cumulative transition probabilities.

    Returns:
        int64 [num_sequences, length]; every sequence starts with token 0.
    """
    tokens = np.zeros((num_sequences, length), dtype=np.int64)
    for position in range(1, length):
        draws = rng.random(num_sequences)[:, None]
        cumulative = table[tokens[:, position - 1]]
        tokens[:, position] = (cumulative < draws).sum(1).clip(max=VOCAB - 1)
    return tokens


def train(folder: Path, table: np.ndarray, updates: int) -> float:
    """Trains the checkpoint in place; returns the last loss, nats a token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rng = np.random.default_rng(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loss = torch.zeros(())
    for _ in range(updates):
        tokens = torch.from_numpy(markov_chain(rng, 8, 128, table))
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # The file keeps its tensors: a tied output matrix is not one of them.
    file = folder / "model.safetensors"
    weights = model.state_dict()
    rounded = {}
    for name in load_file(file):
        rounded[name] = weights[name].detach().bfloat16().float().contiguous()
    save_file(rounded, file, metadata={"format": "pt"})
    return float(loss.detach())


def logprobs(
    folder: Path, tokens: np.ndarray, budget: int, ranks: int = 1, **options: Any
) -> np.ndarray:
    """Log-probs of all tokens but the first, by the policy.

    Args:
        folder: the model.
        tokens: int64 [sequences, length].
        budget: tokens of a micro-batch.
        ranks: number of processes.
        options: of `make_policy`, such as dtype or tp.

    Returns:
        float64 [sequences, length - 1], nats.
    """
    from pacs_megatron.batching.tables import single_turn_writers
    from pacs_megatron.contracts import SampleFacts, TokenBuffers
    from tests.support.policies.policy_cases import logprobs_by_row, make_part, make_policy
    from tests.support.ranks import run_ranks

    count, length = tokens.shape
    facts = SampleFacts(
        ids=tuple(f"0:p{i}#0" for i in range(count)),
        groups=np.arange(count),
        labels=np.zeros(count),
        rewards=np.zeros(count),
        prompt_lens=np.ones(count, dtype=np.int64),
        response_lens=np.full(count, length - 1),
        environment_lens=np.zeros(count, dtype=np.int64),
        truncated=np.zeros(count, dtype=bool),
    )
    buffers = TokenBuffers(
        index=np.arange(count),
        token_ids=tokens.reshape(-1).astype(np.int32),
        offsets=np.arange(count + 1) * length,
        writers=single_turn_writers(facts.prompt_lens, facts.response_lens),
        sampler_logprobs=np.zeros(count * (length - 1), dtype=np.float32),
        response_offsets=np.arange(count + 1) * (length - 1),
    )

    def on_rank(_rank: int, world: int) -> np.ndarray:
        policy = make_policy(folder, world, tokens_per_microbatch=budget, **options)
        by_row = logprobs_by_row(policy, make_part(facts, buffers, policy, budget))
        rows = [by_row[row] for row in sorted(by_row)]
        # Only the last pipeline stage has log-probs.
        return np.stack(rows or [np.zeros(0)]).astype(np.float64)

    return run_ranks(on_rank, ranks, timeout=3000)[-1]


def report(name: str, difference: np.ndarray, lengths: list[int]) -> None:
    """Prints one row for each length.

    Siblings are the samples at the same place of all sequences, so what a place has in common is in
    sd(r) and not in sd(siblings), the sd of r without the mean of its place.

    Args:
        name: of the case.
        difference: [sequences, tokens], nats, to the reference.
        lengths: tokens of the samples that the sequences are cut into.
    """
    sigma = difference.std()
    bias = difference.mean()
    num_sequences = len(difference)
    unbiased = (num_sequences / (num_sequences - 1)) ** 0.5
    within = (difference - difference.mean(0)).std() * unbiased
    print(
        f"{name:<24} sigma {sigma:.2e}  bias {bias:+.1e}  largest {abs(difference).max():.2e}  in "
        f"a place {within:.2e}"
    )
    for length in lengths:
        count = difference.shape[1] // length
        samples = difference[:, : count * length].reshape(num_sequences, count, length)
        sums = samples.sum(2)
        siblings = (((sums - sums.mean(0)) ** 2).sum() / (sums.size - count)) ** 0.5
        line = f"  T={length:>6}  sd(r) {sums.std():.2e}, predicted {sigma * length**0.5:.2e}"
        line += f"   sd(siblings) {siblings:.2e}   mean |r| {abs(sums).mean():.2e}"
        if sums.size >= 2 * GROUP:
            num_grouped = sums.size // GROUP * GROUP
            groups = sums.reshape(-1)[:num_grouped].reshape(-1, GROUP)
            psi = (groups - groups.mean(1, keepdims=True)) * GROUP / (GROUP - 1)
            predicted = sigma * (length + length / (GROUP - 1)) ** 0.5
            line += f"   sd(psi) {psi.std():.2e}, predicted {predicted:.2e}"
        print(line + f"   ({sums.size} samples)", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument(
        "--concentration",
        type=float,
        default=0.05,
        help="of the transitions: less gives larger logits",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="bf16 with itself under tp 2, pp 2 and cp 2 too"
    )
    args = parser.parse_args()
    if args.fp8:
        import tests.te.stand_ins  # noqa: F401  before Megatron
    from tests.support.tiny_models import make_tiny_qwen3

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    transitions = rng.dirichlet(np.full(VOCAB, args.concentration), VOCAB)
    table = np.cumsum(transitions, 1)
    num_tokens = args.length + 1
    lengths = [length for length in LENGTHS if length <= args.length]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_qwen3(Path(scratch) / "model", **SHAPE)
        loss = train(folder, table, args.updates)
        tokens = markov_chain(np.random.default_rng(2), SEQUENCES, num_tokens, table)
        exact = logprobs(folder, tokens, num_tokens)
        print(
            f"loss after {args.updates} updates: {loss:.3f} nats a token (uniform "
            f"{np.log(VOCAB):.3f})"
        )

        by_case: dict[str, np.ndarray] = {}
        for name, options in cases(with_fp8=args.fp8).items():
            by_case[name] = logprobs(folder, tokens, num_tokens, **options)
            report(name, by_case[name] - exact, lengths)
        if args.layouts:
            for axis in ("tp", "pp", "cp"):
                split = logprobs(folder, tokens, num_tokens, 2, dtype="bf16", **{axis: 2})
                report(f"bf16, {axis} 2 and 1", split - by_case["bf16"], lengths)
        packed = logprobs(folder, tokens, SEQUENCES * num_tokens, dtype="bf16")
        report("bf16, packing", packed - by_case["bf16"], lengths)


def cases(*, with_fp8: bool) -> dict[str, dict[str, Any]]:
    """Name -> options of the policy."""
    options: dict[str, dict[str, Any]] = {
        "bf16": {"dtype": "bf16"},
        "bf16, fp32 head": {"dtype": "bf16", "head": "fp32"},
    }
    if with_fp8:
        for head in ("bf16", "fp32"):
            fp8 = {"recipe": "tensorwise", "format": "hybrid"}
            options[f"FP8 emulated, {head} head"] = {"dtype": "bf16", "head": head, "fp8": fp8}
    return options


if __name__ == "__main__":
    main()
