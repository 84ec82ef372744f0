"""The chunked log-prob head against autograd through plain logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pacs_megatron.policy import head
from tests.support.ranks import run_ranks

TOKENS = 23
HIDDEN = 16
PADDED = 48


def inputs(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    # What padding holds must not matter: make it large.
    weight[vocab:] = 50.0
    targets = torch.randint(0, vocab, (TOKENS,), generator=generator)
    targets[0] = 0
    targets[1] = vocab - 1
    return hidden, weight, targets, *torch.randn(2, TOKENS, generator=generator)


def plain(vocab: int, temperature: float) -> dict[str, torch.Tensor]:
    """Autograd through [t, v] logits in float64."""
    hidden, weight, targets, upstream, of_entropy = inputs(vocab)
    hidden = hidden.double().requires_grad_(True)
    weight = weight.double().requires_grad_(True)
    every = F.log_softmax((hidden @ weight[:vocab].t()) / temperature, dim=-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    (logprobs * upstream.double() + entropy * of_entropy.double()).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def chunked(
    rank: int, world: int, vocab: int, temperature: float, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """This rank's outputs; the gradient of `hidden` summed over ranks as the model's region
    function does.
    """
    hidden, weight, targets, upstream, of_entropy = inputs(vocab)
    hidden = hidden.to(dtype).requires_grad_(True)
    weight = weight.chunk(world)[rank].to(dtype).clone().requires_grad_(True)
    logprobs, entropy = head.token_logprobs(
        hidden,
        weight,
        targets,
        vocab_size=vocab,
        group=dist.group.WORLD,
        temperature=temperature,
        want_entropy=True,
    )
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs * upstream + entropy * of_entropy).sum().backward()
    assert hidden.grad is not None
    dist.all_reduce(hidden.grad)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("vocab", [48, 41, 20])
@pytest.mark.parametrize("world", [1, 2])
def test_chunks_shards_and_padding_equal_plain_logits(world: int, vocab: int, rows: int) -> None:
    """With 20 true tokens the second of two ranks holds nothing but padding (and rank 0 some)."""
    temperature = 0.7
    expected = plain(vocab, temperature)

    def on_rank(rank: int, world: int) -> dict[str, Any]:
        head.logits_per_chunk = lambda _bytes: rows * PADDED // world
        return chunked(rank, world, vocab, temperature)

    results = run_ranks(on_rank, world)
    for result in results:
        for name in ("logprobs", "entropy", "hidden"):
            torch.testing.assert_close(result[name].double(), expected[name], rtol=1e-5, atol=2e-5)
    weight = torch.cat([result["weight"] for result in results])
    torch.testing.assert_close(weight.double(), expected["weight"], rtol=1e-5, atol=2e-5)
    assert bool((weight[vocab:] == 0).all()), "padding gets no gradient"


def test_the_weight_gradient_of_many_chunks_adds_up_in_fp32() -> None:
    """In bf16, the difference between one chunk and many is the rounding of the result, not of each
    addition.
    """

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        found = []
        for rows in (1, 1000):
            head.logits_per_chunk = lambda _bytes, size=rows * PADDED: size
            found.append(chunked(rank, world, 41, 1.0, torch.bfloat16)["weight"].float())
        return found

    ((many, one),) = run_ranks(on_rank, 1)
    assert float((many - one).abs().max() / one.abs().max()) < 2**-7


def test_without_targets_the_backward_pass_still_runs() -> None:
    """A padding micro-batch must reach the collectives of its backward pass, or the peers hang."""

    def on_rank(_rank: int, _world: int) -> tuple[bool, float, float]:
        hidden = torch.randn(0, HIDDEN, requires_grad=True)
        weight = torch.randn(PADDED, HIDDEN, requires_grad=True)
        logprobs, entropy = head.token_logprobs(
            hidden,
            weight,
            torch.empty(0, dtype=torch.int64),
            vocab_size=PADDED,
            group=dist.group.WORLD,
            want_entropy=True,
        )
        requires_grad = logprobs.requires_grad
        logprobs.sum().backward()
        assert weight.grad is not None and hidden.grad is not None and entropy.shape == (0,)
        return requires_grad, float(weight.grad.abs().sum()), float(hidden.grad.sum())

    assert run_ranks(on_rank, 1) == [(True, 0.0, 0.0)]


@pytest.mark.parametrize(("world", "temperature"), [(1, 1.0), (2, 0.7)])
def test_certainties_and_logits(world: int, temperature: float) -> None:
    """Over the vocabulary without padding, of which the second rank may have nothing else."""
    vocab = 41
    hidden, weight, targets, *_ = inputs(vocab)
    logits = hidden.double() @ weight.double()[:vocab].T / temperature
    certainty = logits.logsumexp(-1) - logits.mean(-1)
    of_target = logits.gather(1, targets[:, None])[:, 0]

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        found = head.token_certainties(
            hidden,
            weight.chunk(world)[rank],
            targets,
            vocab_size=vocab,
            group=dist.group.WORLD,
            temperature=temperature,
            want_entropy=True,
        )
        return list(found)

    for logprobs, entropies, certainties, target_logits in run_ranks(on_rank, world):
        torch.testing.assert_close(certainties.double(), certainty, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target_logits.double(), of_target, rtol=1e-5, atol=1e-5)
        expected = logits.log_softmax(-1)
        entropy = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(entropies.double(), entropy, rtol=1e-5, atol=1e-5)
        of_tokens = expected.gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), of_tokens, rtol=1e-5, atol=1e-5)
