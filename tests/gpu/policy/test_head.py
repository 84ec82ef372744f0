"""The head's products on CUDA: bf16 factors that accumulate and return fp32, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pacs_megatron.policy import head

pytestmark = pytest.mark.gpu
TOKENS = 700
HIDDEN = 512
VOCAB = 4096


def gradients(hidden: torch.Tensor, in_forward: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = (
        torch.randn(VOCAB, HIDDEN, device="cuda", generator=generator)
        .bfloat16()
        .div(8)
        .requires_grad_(True)
    )
    targets = torch.randint(VOCAB, (TOKENS,), device="cuda", generator=generator)
    coefficient = torch.randn(TOKENS, device="cuda", generator=generator)
    x = hidden.detach().clone().requires_grad_(True)
    logprobs, _ = head.token_logprobs(
        x,
        weight,
        targets,
        vocab_size=VOCAB,
        group=dist.group.WORLD,
        loss_gradient=(lambda rows, _logprobs, _entropies: (coefficient[rows], None))
        if in_forward
        else None,
    )
    (logprobs * coefficient).sum().backward()  # type: ignore[no-untyped-call]
    exact_x = x.detach().double().requires_grad_(True)
    exact_w = weight.detach().double().requires_grad_(True)
    exact = F.log_softmax(exact_x @ exact_w.t(), -1).gather(1, targets[:, None])[:, 0]
    (exact * coefficient).sum().backward()  # type: ignore[no-untyped-call]

    def error(value: torch.Tensor | None, reference: torch.Tensor | None) -> torch.Tensor:
        assert value is not None and reference is not None
        return (value.double() - reference).norm() / reference.norm()

    return {
        "logprobs": (logprobs.detach() - exact).abs().max(),
        "hidden": error(x.grad, exact_x.grad),
        "weight": error(weight.grad, exact_w.grad),
        "bits": torch.cat([logprobs.detach().flatten(), weight.grad.float().flatten()]),  # type: ignore[union-attr]
    }


def test_products_on_cuda_equal_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
    monkeypatch.setattr(head, "logits_per_chunk", lambda _bytes: 100 * VOCAB)
    hidden = torch.randn(
        TOKENS, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    for x, limit in ((hidden.bfloat16(), 0.1), (hidden, 1e-4)):
        forward = gradients(x, True)
        backward = gradients(x, False)
        assert torch.equal(forward["bits"], backward["bits"])
        assert float(forward["logprobs"]) < limit
        assert float(forward["hidden"]) < 1e-2 and float(forward["weight"]) < 1e-2
