"""The first calls on a GPU: one Linear in bf16 and in each FP8 recipe, grouped Linear, `thd`
attention, FusedAdam.

    python benchmarks/te_modules.py --out results/modules
    python benchmarks/te_modules.py --dry-run-cpu --out ...   # the same calls with torch on the CPU
    in Transformer Engine's place

Every call is compared with torch in fp32 on the CPU; a failed one has its reason in the table and
ends with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

TOKENS = 512
WIDTH = 256
HEADS = 4
EXPERTS = 4
BOUNDS = [0, 100, 356, TOKENS]
RECIPES = ("bf16", "tensorwise", "delayed", "blockwise")
LIMIT = {"bf16": 0.02, "tensorwise": 0.1, "delayed": 0.1, "blockwise": 0.1, "adam": 1e-5}
"""largest allowed relative error (of the norm), by precision"""


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative error of the norm."""
    pairs = [
        (a.detach().float().cpu(), b.detach().float()) for a, b in zip(found, expected, strict=True)
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def autocast(recipe: str, dry: bool) -> Any:
    if recipe == "bf16" or dry:
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "delayed": recipes.DelayedScaling,
        "blockwise": recipes.Float8BlockScaling,
    }
    return te.fp8_autocast(enabled=True, fp8_recipe=kinds[recipe]())


def linear(recipe: str, dry: bool) -> float:
    """Output and both gradients."""
    x = torch.randn(TOKENS, WIDTH)
    weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    grad = torch.randn(TOKENS, WIDTH)
    expected_x = x.clone().requires_grad_(True)
    expected_w = weight.clone().requires_grad_(True)
    expected = F.linear(expected_x, expected_w)
    expected.backward(grad)
    if dry:
        module: Any = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    else:
        import transformer_engine.pytorch as te

        module = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        module.weight.copy_(weight)
    own = x.to(module.weight.device, torch.bfloat16).requires_grad_(True)
    with autocast(recipe, dry):
        out = module(own)
    out.backward(grad.to(out))
    return error_of(
        [out, own.grad, module.weight.grad], [expected, expected_x.grad, expected_w.grad]
    )


def grouped(recipe: str, dry: bool) -> float:
    """Experts with different numbers of tokens."""
    sizes = [128, 0, 256, 128]
    x = torch.randn(sum(sizes), WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(EXPERTS)]
    expected = torch.cat(
        [F.linear(part, w) for part, w in zip(x.split(sizes), weights, strict=True)]
    )
    if dry:
        return error_of([expected.bfloat16()], [expected])
    import transformer_engine.pytorch as te

    module = te.GroupedLinear(
        EXPERTS, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    with torch.no_grad():
        for number, weight in enumerate(weights):
            getattr(module, f"weight{number}").copy_(weight)
    with autocast(recipe, dry):
        out = module(x.cuda().bfloat16().requires_grad_(True), sizes)
    out.float().sum().backward()
    return error_of([out], [expected])


def attention(_recipe: str, dry: bool) -> float:
    """Packed sequences, causal, with grouped queries: output and the gradient of the queries."""
    q, k, v = (torch.randn(TOKENS, heads, 64) for heads in (HEADS, HEADS // 2, HEADS // 2))
    q.requires_grad_(True)
    parts = []
    for start, stop in itertools.pairwise(BOUNDS):
        one = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        parts.append(
            F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        )
    expected = torch.cat(parts).reshape(TOKENS, -1)
    grad = torch.randn(expected.shape)
    (expected_grad,) = torch.autograd.grad(expected, q, grad)
    if dry:
        return error_of([expected.bfloat16(), expected_grad], [expected, expected_grad])
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        HEADS,
        64,
        num_gqa_groups=HEADS // 2,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    own = [t.detach().cuda().bfloat16().requires_grad_(True) for t in (q, k, v)]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    lengths = {"max_seqlen_q": 256, "max_seqlen_kv": 256}
    out = module(*own, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **lengths)
    out.backward(grad.to(out))
    return error_of([out, own[0].grad], [expected, expected_grad])


def adam(_recipe: str, dry: bool) -> float:
    """Three steps in fp32."""
    if dry:
        kind: Any = torch.optim.AdamW
    else:
        from transformer_engine.pytorch.optimizers import FusedAdam as kind  # noqa: N813
    start = torch.randn(4096)
    results = []
    for optimizer, device in ((torch.optim.AdamW, "cpu"), (kind, "cpu" if dry else "cuda")):
        weight = torch.nn.Parameter(start.clone().to(device))
        steps = optimizer([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(3):
            weight.grad = weight.detach().sin()
            steps.step()
        results.append(weight.detach().cpu())
    return error_of([results[1]], [results[0]])


CALLS: dict[str, tuple[Callable[[str, bool], float], str]] = {
    **{f"Linear {recipe}": (linear, recipe) for recipe in RECIPES},
    **{f"GroupedLinear {recipe}": (grouped, recipe) for recipe in RECIPES},
    "attention thd bf16": (attention, "bf16"),
    "FusedAdam fp32": (adam, "adam"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run-cpu", action="store_true")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for result.json and table.txt"
    )
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, (call, precision) in CALLS.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            found = call(precision, args.dry_run_cpu)
            rows[name] = {"error": found, "passed": found <= LIMIT[precision]}
        except Exception as error:  # noqa: BLE001  the other calls are measured all the same
            rows[name] = {
                "passed": False,
                "reason": f"{type(error).__name__}: {error}".splitlines()[0],
            }
        rows[name]["seconds"] = time.perf_counter() - start
    where = "torch on the CPU in its place" if args.dry_run_cpu else torch.cuda.get_device_name()
    lines = [f"Transformer Engine's modules against fp32 on the CPU; {where}"]
    for name, row in rows.items():
        figure = f"relative error {row['error']:.1e}" if "error" in row else row["reason"]
        lines.append(f"{name:>26} {'passed' if row['passed'] else 'FAILED'}  {figure}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.txt").write_text("\n".join(lines) + "\n")
    (args.out / "result.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(lines))
    return 0 if all(row["passed"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
