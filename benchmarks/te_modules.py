"""The first calls on a GPU: one Linear in bf16 and in each FP8 recipe, grouped Linear, `thd`
attention, FusedAdam.

    python benchmarks/te_modules.py --out results/modules
    python benchmarks/te_modules.py --dry-run-cpu --out ...

The dry run makes the same calls with torch on the CPU in Transformer Engine's place.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

TOKENS = 512
WIDTH = 256
HEADS = 4
HEAD_DIM = 64
EXPERTS = 4
BOUNDS = [0, 100, 356, TOKENS]
RECIPES = ("bf16", "tensorwise", "delayed", "blockwise")
LIMIT = {"bf16": 0.02, "tensorwise": 0.1, "delayed": 0.1, "blockwise": 0.1, "adam": 1e-5}
"""largest allowed relative error (of the norm), by precision"""


def error_of(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest relative error of the norm.

    Args:
        values: tensors of any device and dtype.
        expected: fp32 tensors on the CPU, of the same shapes.
    """
    errors = []
    for value, reference in zip(values, expected, strict=True):
        difference = value.detach().float().cpu() - reference.detach().float()
        errors.append(float(difference.norm() / reference.detach().float().norm()))
    return max(errors)


def autocast(recipe: str, dry: bool) -> Any:
    """The context of a forward pass: FP8 with the recipe; nothing for bf16 and in a dry run."""
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


# ----------------------------------------------------------------------------------------- modules
def linear(recipe: str, dry: bool) -> float:
    """Output and both gradients of one Linear.

    Args:
        recipe: of RECIPES.
        dry: torch on the CPU in Transformer Engine's place.

    Returns:
        The largest relative error; the same for the functions below.
    """
    x = torch.randn(TOKENS, WIDTH)
    weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    grad = torch.randn(TOKENS, WIDTH)

    expected_x = x.clone().requires_grad_(True)
    expected_weight = weight.clone().requires_grad_(True)
    expected = F.linear(expected_x, expected_weight)
    expected.backward(grad)

    if dry:
        module: Any = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    else:
        import transformer_engine.pytorch as te

        module = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        module.weight.copy_(weight)
    device_x = x.to(module.weight.device, torch.bfloat16).requires_grad_(True)
    with autocast(recipe, dry):
        out = module(device_x)
    out.backward(grad.to(out))

    return error_of(
        [out, device_x.grad, module.weight.grad],
        [expected, expected_x.grad, expected_weight.grad],
    )


def grouped(recipe: str, dry: bool) -> float:
    """Experts with different numbers of tokens: the output."""
    sizes = [128, 0, 256, 128]
    x = torch.randn(sum(sizes), WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(EXPERTS)]
    products = [
        F.linear(part, weight) for part, weight in zip(x.split(sizes), weights, strict=True)
    ]
    expected = torch.cat(products)
    if dry:
        return error_of([expected.bfloat16()], [expected])
    import transformer_engine.pytorch as te

    module = te.GroupedLinear(
        EXPERTS, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    with torch.no_grad():
        for number, weight in enumerate(weights):
            getattr(module, f"weight{number}").copy_(weight)
    device_x = x.cuda().bfloat16().requires_grad_(True)
    with autocast(recipe, dry):
        out = module(device_x, sizes)
    out.float().sum().backward()
    return error_of([out], [expected])


def attention(_recipe: str, dry: bool) -> float:
    """Packed sequences, causal, with grouped queries: output and the gradient of the queries."""
    query = torch.randn(TOKENS, HEADS, HEAD_DIM)
    key = torch.randn(TOKENS, HEADS // 2, HEAD_DIM)
    value = torch.randn(TOKENS, HEADS // 2, HEAD_DIM)
    query.requires_grad_(True)

    # The reference: one sequence after the other.
    outputs = []
    for start, stop in itertools.pairwise(BOUNDS):
        # [tokens, heads, head_dim] -> [1, heads, tokens, head_dim]
        sequence = [tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value)]
        output = F.scaled_dot_product_attention(*sequence, is_causal=True, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    expected = torch.cat(outputs).reshape(TOKENS, -1)
    grad = torch.randn(expected.shape)
    (expected_grad,) = torch.autograd.grad(expected, query, grad)
    if dry:
        return error_of([expected.bfloat16(), expected_grad], [expected, expected_grad])
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        HEADS,
        HEAD_DIM,
        num_gqa_groups=HEADS // 2,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    device_query, device_key, device_value = (
        tensor.detach().cuda().bfloat16().requires_grad_(True) for tensor in (query, key, value)
    )
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    out = module(
        device_query,
        device_key,
        device_value,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=256,
        max_seqlen_kv=256,
    )
    out.backward(grad.to(out))
    return error_of([out, device_query.grad], [expected, expected_grad])


def adam(_recipe: str, dry: bool) -> float:
    """Three steps in fp32."""
    start = torch.randn(4096)
    expected = _adam_steps(torch.optim.AdamW, start)
    if dry:
        return error_of([_adam_steps(torch.optim.AdamW, start)], [expected])
    from transformer_engine.pytorch.optimizers import FusedAdam

    return error_of([_adam_steps(FusedAdam, start.cuda())], [expected])


def _adam_steps(optimizer_class: Any, start: torch.Tensor) -> torch.Tensor:
    """The weight on the CPU after three steps on its device."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        weight.grad = weight.detach().sin()
        optimizer.step()
    return weight.detach().cpu()


# -------------------------------------------------------------------------------------------- main
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
    rows = {name: run_call(name, args.dry_run_cpu) for name in CALLS}

    place = "torch on the CPU in its place" if args.dry_run_cpu else torch.cuda.get_device_name()
    lines = [f"Transformer Engine's modules against fp32 on the CPU; {place}"]
    for name, row in rows.items():
        figure = f"relative error {row['error']:.1e}" if "error" in row else row["reason"]
        verdict = "passed" if row["passed"] else "FAILED"
        lines.append(f"{name:>26} {verdict}  {figure}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.txt").write_text("\n".join(lines) + "\n")
    (args.out / "result.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(lines))
    return 0 if all(row["passed"] for row in rows.values()) else 1


def run_call(name: str, dry: bool) -> dict[str, Any]:
    """The error of one call, or the reason why it failed, and its seconds."""
    call, precision = CALLS[name]
    torch.manual_seed(0)
    start = time.perf_counter()
    row: dict[str, Any]
    try:
        error = call(precision, dry)
        row = {"error": error, "passed": error <= LIMIT[precision]}
    # The other calls are measured all the same.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        row = {"passed": False, "reason": reason}
    row["seconds"] = time.perf_counter() - start
    return row


if __name__ == "__main__":
    sys.exit(main())
