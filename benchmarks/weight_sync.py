"""GB/s of each weight-sync transport into a real SGLang server, beside a plain copy of the same
bytes.

    python benchmarks/weight_sync.py [--hidden 768] [--layers 8] [--repeats 5] [--bucket-mib 64]

Starts one server on CPU from .venv-sglang. Every push is timed from begin_update to end_update:
pausing, sending, loading by the server, flushing its cache. `verify=full` is timed too (SHA-256 on
both sides on CPU). `trainer` is the trainer's own work without any server: the digest and packing
buckets. Prints one JSON object. GB = 10^9 bytes of bf16 weights.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.models import load_spec
from pacs_megatron.sglang.build import server_apis, server_specs, start_servers
from pacs_megatron.sglang.weights.bucket import Bucket
from pacs_megatron.sglang.weights.server_sync import server_sync
from pacs_megatron.training.push import push

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
START_S = 600.0
TRANSPORTS = ("disk", "broadcast", "ipc")


def plain_copy(weights: dict[str, torch.Tensor], repeats: int) -> float:
    """GB/s of a copy of every tensor into allocated memory.

    Args:
        weights: name -> tensor.
        repeats: copies; the median counts.
    """
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        for name, tensor in weights.items():
            copies[name].copy_(tensor)
        seconds = time.perf_counter() - began
        rates.append(num_bytes / seconds / 1e9)
    return statistics.median(rates)


class Packing:
    """A receiver that packs buckets and sends nothing."""

    def __init__(self, capacity: int) -> None:
        self._bucket = Bucket(capacity)

    def begin_update(self, version: int) -> None:
        """Nothing."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if not self._bucket.fits(tensor):
            self._bucket.clear()
        self._bucket.add(name, tensor)

    def end_update(self, digest: str) -> None:
        """Nothing: the memory stays for the next update."""


def figures(seconds: float, num_bytes: int) -> dict[str, float]:
    """Seconds and GB/s, as they are printed."""
    return {"seconds": round(seconds, 3), "gb_per_s": round(num_bytes / seconds / 1e9, 3)}


def sync_options(args: argparse.Namespace, transport: str, verify: str) -> SglangRollout:
    """The options of one managed server and one transport."""
    return SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(
            transport=transport,
            verify=verify,
            bucket_mib=args.bucket_mib,
            timeout_s=120.0,
        ),
        servers=SglangServers(python=(str(args.python),), device="cpu", max_total_tokens=4096),
    )


def packing_seconds(weights: dict[str, torch.Tensor], bucket_mib: int, repeats: int) -> float:
    """Median seconds of the trainer's own work; the first push is not counted."""
    packing = Packing(bucket_mib << 20)
    seconds = []
    for version in range(repeats + 1):
        began = time.perf_counter()
        push(version, weights.items(), [packing])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    args = parser.parse_args()

    from safetensors.torch import load_file

    from tests.support.tiny_models import make_tiny_qwen3

    with ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_qwen3(
            tmp / "model",
            dtype="bfloat16",
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            head_dim=args.hidden // 8,
            vocab_size=32000,
        )
        weights = load_file(model / "model.safetensors")
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        run = sync_options(args, "disk", "off")
        specs = server_specs(run, ModelOptions(path=str(model)), tmp)
        [server] = start_servers(specs, START_S)
        stack.callback(server.close)

        result: dict[str, object] = {
            "bytes": num_bytes,
            "bucket_mib": args.bucket_mib,
            "threads": torch.get_num_threads(),
            "plain_copy_gb_per_s": round(plain_copy(weights, args.repeats), 2),
        }
        trainer_s = packing_seconds(weights, args.bucket_mib, args.repeats)
        result["trainer"] = figures(trainer_s, num_bytes)

        version = 0
        for transport, verify in itertools.product(TRANSPORTS, ("off", "full")):
            run = sync_options(args, transport, verify)
            sync = server_sync(run, load_spec(model), tmp / "weights")
            sync.set_targets(server_apis(run, (server.url,)))
            seconds = []
            for _ in range(args.repeats + 1):  # the first one connects and is not counted
                version += 1
                push(version, weights.items(), [sync])
                seconds.append(sync.report.seconds)
            sync.close()
            row = figures(statistics.median(seconds[1:]), num_bytes)
            result[f"{transport}_verify_{verify}"] = row
            print(transport, verify, row, file=sys.stderr, flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
