"""The log-prob head beside plain logits: seconds, peak memory and bytes moved of one forward and backward pass.

    python benchmarks/head.py            the CPU, or the first GPU with torch's CUDA build

Cases: `plain` (all logits, log_softmax, autograd), `backward` (the head, logits computed again in the backward pass),
`forward` (the head, gradients in the forward pass) and `fp32` (`forward` with `precision.head: fp32`). `tensor GB` are
the bytes of all tensors that torch's operators read and write, which bounds the memory traffic of code without fused
kernels. One thread; seconds are CPU time on a CPU. Ratios are to `plain` in the same run. Each case runs in its own process.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pacs_megatron.policy import head

CASES = ("plain", "backward", "forward", "fp32")


class TensorBytes(TorchDispatchMode):
    """Bytes that operators read and write; a view moves none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in tensors)
        return out


def loss_of(case: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """One forward pass: the sum of coefficients times log-probs."""
    hidden, weight, targets, coefficient = (inputs[name] for name in ("hidden", "weight", "targets", "coefficient"))
    if case == "plain":
        logprobs = F.log_softmax(F.linear(hidden, weight).float(), -1).gather(1, targets[:, None])[:, 0]
    else:
        logprobs, _ = head.token_logprobs(
            hidden.float() if case == "fp32" else hidden,
            weight,
            targets,
            vocab_size=weight.shape[0],
            group=dist.group.WORLD,
            loss_gradient=None if case == "backward" else lambda rows, *_: (coefficient[rows], None),
        )
    return (logprobs * coefficient).sum()


def measure(case: str, sizes: tuple[int, int, int], port: int, repeats: int, results: Any) -> None:
    """Puts (seconds, peak bytes above the inputs, tensor bytes) of one case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    torch.set_num_threads(1)
    tokens, hidden_size, vocab = sizes
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = {
        "hidden": torch.randn(tokens, hidden_size, device=device).to(dtype).requires_grad_(True),
        "weight": (torch.randn(vocab, hidden_size, device=device) / hidden_size**0.5).to(dtype).requires_grad_(True),
        "targets": torch.randint(vocab, (tokens,), device=device),
        "coefficient": torch.randn(tokens, device=device),
    }

    def once() -> None:
        loss_of(case, inputs).backward()  # type: ignore[no-untyped-call]
        inputs["hidden"].grad = inputs["weight"].grad = None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        once()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(once, device) for _ in range(repeats)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    with TensorBytes() as counter:
        once()
    results.put((statistics.median(seconds), peak - before, counter.total))


def _timed(call: Callable[[], None], device: torch.device) -> float:
    # On the CPU, of this process: other processes of a busy host do not count.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Prints one row a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.version.cuda is not None
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 1024)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 1024)
    parser.add_argument("--vocab", type=int, default=151936 if cuda else 98304)
    parser.add_argument("--repeats", type=int, default=10 if cuda else 2)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, torch {torch.__version__}")
    print("case        seconds  ratio   peak GiB  ratio  tensor GB  ratio")
    first: tuple[float, float, float] | None = None
    for number, case in enumerate(CASES):
        results = context.Queue()
        sizes = (args.tokens, args.hidden, args.vocab)
        process = context.Process(target=measure, args=(case, sizes, 29517 + number, args.repeats, results))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{case}: the process ended with {process.exitcode}")
        found = results.get()
        first = first or found
        seconds, peak, moved = found
        ratios = [a / b for a, b in zip(found, first, strict=True)]
        print(
            f"{case:<9} {seconds:9.3f} {ratios[0]:6.2f} {peak / 2**30:10.2f} {ratios[1]:6.2f} "
            f"{moved / 1e9:10.1f} {ratios[2]:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
