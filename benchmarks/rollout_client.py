"""Output tokens/s of the rollout client beside SGLang's own `bench_serving`, on one server under
the same load.

    python benchmarks/rollout_client.py [--requests 512] [--tokens 64] [--rounds 5] [--url URL]

Both request fixed-length responses with log-probs, not streamed, with the same number of requests
in flight, in alternating order. Prints one JSON object (with the client's CPU time per request,
which depends little on other load) and exits with 1 if the median of the rounds' ratios is below
0.95. Without --url it starts a server of a tiny random model on CPU from .venv-sglang; a given
server needs `--preferred-sampling-params '{"ignore_eos": true}'` (bench_serving ignores the end of
sequence; the client does not).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SampleRequest, SamplingOptions
from pacs_megatron.sglang.build import open_engine, server_apis
from pacs_megatron.sglang.client import SglangEngine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TARGET = 0.95
PROMPT_TOKENS = 16


def options(args: argparse.Namespace) -> SglangRollout:
    """The options of the client, and of a server without `--url`."""
    servers = SglangServers(
        python=(str(args.python),),
        device="cpu",
        max_total_tokens=32768,
        extra_args=("--preferred-sampling-params", '{"ignore_eos": true}'),
    )
    return SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=args.tokens),
        sync=SglangSync(transport="disk"),
        urls=() if args.url is None else (args.url,),
        servers=servers if args.url is None else None,
        max_in_flight=args.in_flight,
    )


def ours(engine: SglangEngine, args: argparse.Namespace, round_number: int) -> tuple[float, float]:
    """Output tokens/s from the first request to the last checked sample, and this process's CPU ms
    for each request.
    """
    rng = np.random.default_rng(round_number)
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=args.tokens)
    requests = []
    for number in range(args.requests):
        request = SampleRequest(
            id=f"{round_number}:{number}#0",
            prompt_id=str(number),
            token_ids=rng.integers(0, 250, PROMPT_TOKENS).astype(np.int32),
            seed=number,
            params=params,
        )
        requests.append(request)

    began = time.perf_counter()
    cpu_began = time.process_time()
    num_tokens = sum(sample.response_len for sample in engine.stream(requests))
    seconds = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_began
    expected = args.requests * args.tokens
    if num_tokens != expected:
        raise SystemExit(
            f"got {num_tokens} tokens, expected {expected}: does the server ignore_eos?"
        )
    return num_tokens / seconds, cpu_s / args.requests * 1000


def theirs(url: str, tokenizer: Path, args: argparse.Namespace, round_number: int) -> float:
    """The same from bench_serving's own report."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.jsonl"
        words = {
            "--backend": "sglang",
            "--base-url": url,
            "--dataset-name": "random-ids",
            "--num-prompts": args.requests,
            "--random-input-len": PROMPT_TOKENS,
            "--random-output-len": args.tokens,
            "--random-range-ratio": 1.0,
            "--max-concurrency": args.in_flight,
            "--temperature": 1.0,
            "--seed": round_number,
            "--tokenizer": tokenizer,
            "--model": tokenizer,
            "--output-file": report,
        }
        flags = ["--tokenize-prompt", "--disable-stream", "--return-logprob", "--disable-tqdm"]
        command = [str(args.python), "-m", "sglang.bench_serving", *flags]
        for name, value in words.items():
            command += [name, str(value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"bench_serving failed: {done.stderr[-2000:]}")
        result = json.loads(report.read_text().splitlines()[-1])
    if result["completed"] != args.requests:
        raise SystemExit(
            f"bench_serving completed {result['completed']} of {args.requests} requests"
        )
    return float(result["output_throughput"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    args = parser.parse_args()

    from tests.support.tiny_models import make_tiny_qwen3

    with ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_qwen3(tmp / "model")
        run = options(args)
        engine = stack.enter_context(open_engine(run, ModelOptions(path=str(model)), tmp))
        url = engine.status()[0].url
        [api] = server_apis(run, (url,))
        api.set_weight_version("0:benchmark")
        engine.set_current(0, "benchmark")
        ours(engine, args, 0)  # warm-up of the server
        rounds = []
        for number in range(1, args.rounds + 1):
            # Alternating order, so that a change of the host's load affects both.
            if number % 2:
                our_rate, cpu_ms = ours(engine, args, number)
                reference = theirs(url, model, args, number)
            else:
                reference = theirs(url, model, args, number)
                our_rate, cpu_ms = ours(engine, args, number)
            figures = {
                "ours": round(our_rate, 1),
                "bench_serving": round(reference, 1),
                "ratio": round(our_rate / reference, 4),
                "client_cpu_ms_per_request": round(cpu_ms, 3),
            }
            rounds.append(figures)
            print(figures, file=sys.stderr, flush=True)

    ratio = statistics.median(figures["ratio"] for figures in rounds)
    summary = {
        "unit": "output tokens/s",
        "rounds": rounds,
        "median_ratio": ratio,
        "target": TARGET,
    }
    print(json.dumps(summary))
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
