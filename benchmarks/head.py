"""The log-prob head beside plain logits: seconds, peak memory and bytes moved of one forward and
backward pass.

    python benchmarks/head.py            the CPU, or the first GPU with torch's CUDA build

Cases: `plain` (all logits, log_softmax, autograd), `backward` (the head, logits computed again in
the backward pass), `forward` (the head, gradients in the forward pass) and `fp32` (`forward` with
`precision.head: fp32`). `tensor GB` are the bytes of all tensors that torch's operators read and
write, which bounds the memory traffic of code without fused kernels. Peak and bytes: each case in
its own process. Seconds: all cases in one process, one after the other in every round, one thread,
CPU time on a CPU; medians over the rounds, and the median of each round's ratio to its own `plain`.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
        if not _returns_a_view(func):
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, torch.Tensor):
                    self.total += leaf.numel() * leaf.element_size()
        return out


def _returns_a_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def loss_of(case: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """One forward pass: the sum of coefficients times log-probs.

    Args:
        case: of CASES.
        inputs: hidden [t, hidden], weight [v, hidden], targets int64 [t], coefficient fp32 [t].
    """
    hidden = inputs["hidden"]
    weight = inputs["weight"]
    targets = inputs["targets"]
    coefficient = inputs["coefficient"]
    if case == "plain":
        logits = F.linear(hidden, weight).float()
        logprobs = F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        return (logprobs * coefficient).sum()

    def loss_gradient(rows: slice, *_: Any) -> tuple[torch.Tensor, None]:
        return coefficient[rows], None

    logprobs, _ = head.token_logprobs(
        hidden.float() if case == "fp32" else hidden,
        weight,
        targets,
        vocab_size=weight.shape[0],
        group=dist.group.WORLD,
        loss_gradient=None if case == "backward" else loss_gradient,
    )
    return (logprobs * coefficient).sum()


def _inputs(sizes: tuple[int, int, int], port: int) -> dict[str, torch.Tensor]:
    """The tensors of one case, and the process group of this process's one rank.

    Args:
        sizes: tokens, hidden size, vocabulary.
        port: of the rendezvous.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    torch.set_num_threads(1)
    tokens, hidden_size, vocab = sizes
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, hidden_size, device=device)
    weight = torch.randn(vocab, hidden_size, device=device) / hidden_size**0.5
    return {
        "hidden": hidden.to(dtype).requires_grad_(True),
        "weight": weight.to(dtype).requires_grad_(True),
        "targets": torch.randint(vocab, (tokens,), device=device),
        "coefficient": torch.randn(tokens, device=device),
    }


def _once(case: str, inputs: dict[str, torch.Tensor]) -> None:
    """Forward and backward pass."""
    loss_of(case, inputs).backward()  # type: ignore[no-untyped-call]
    inputs["hidden"].grad = None
    inputs["weight"].grad = None


def measure(case: str, sizes: tuple[int, int, int], port: int, results: Any) -> None:
    """Puts (peak bytes above the inputs, tensor bytes) of one case.

    Args:
        case: of CASES.
        sizes: tokens, hidden size, vocabulary.
        port: of the rendezvous.
        results: a queue.
    """
    inputs = _inputs(sizes, port)
    if inputs["hidden"].is_cuda:
        _once(case, inputs)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _once(case, inputs)
        peak = torch.cuda.max_memory_allocated()
    else:
        before = _peak_resident_bytes()
        _once(case, inputs)
        peak = _peak_resident_bytes()

    with TensorBytes() as counter:
        _once(case, inputs)
    results.put((peak - before, counter.total))


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def paired(sizes: tuple[int, int, int], port: int, rounds: int, results: Any) -> None:
    """Puts case -> seconds of every round, after one round to warm up."""
    inputs = _inputs(sizes, port)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds + 1):
        for case in CASES:
            call = partial(_once, case, inputs)
            seconds[case].append(_timed(call, inputs["hidden"].device))
    results.put({case: rounds_s[1:] for case, rounds_s in seconds.items()})


def _timed(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of a call."""
    # On the CPU, of this process: other processes of a busy host do not count.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def _in_process(target: Callable[..., None], *args: Any) -> Any:
    """Runs `target` in a new process; returns what it puts into the queue, its last argument."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=target, args=(*args, results))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"{args}: the process ended with {process.exitcode}")
    return results.get()


def main() -> None:
    """Prints one row a case, and writes a JSON with every round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.version.cuda is not None
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 1024)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 1024)
    parser.add_argument("--vocab", type=int, default=151936 if cuda else 49152)
    parser.add_argument(
        "--repeats", type=int, default=10 if cuda else 5, help="rounds of the timing"
    )
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    sizes = (args.tokens, args.hidden, args.vocab)
    print(
        f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, torch "
        f"{torch.__version__}"
    )
    print(f"load of the host before: {_load()}")
    seconds = _in_process(paired, sizes, 29517, args.repeats)
    print(f"load of the host after: {_load()}")
    peak_and_bytes = {}
    for number, case in enumerate(CASES):
        peak_and_bytes[case] = _in_process(measure, case, sizes, 29518 + number)

    print("case        seconds  ratio (lowest, highest)   peak GiB  ratio  tensor GB  ratio")
    for case in CASES:
        ratios = [
            case_s / plain_s
            for case_s, plain_s in zip(seconds[case], seconds["plain"], strict=True)
        ]
        peak, total = peak_and_bytes[case]
        plain_peak, plain_total = peak_and_bytes["plain"]
        print(
            f"{case:<9} {statistics.median(seconds[case]):9.3f} {statistics.median(ratios):6.2f} "
            f"({min(ratios):.2f}, {max(ratios):.2f})      {peak / 2**30:10.2f} "
            f"{peak / plain_peak:6.2f} "
            f"{total / 1e9:10.1f} {total / plain_total:6.2f}",
            flush=True,
        )
    if args.out is not None:
        figures = {"sizes": sizes, "seconds": seconds, "peak_and_tensor_bytes": peak_and_bytes}
        args.out.write_text(json.dumps(figures, indent=1))


def _load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


if __name__ == "__main__":
    main()
