"""Work of the host between the servers' last response and the first micro-batch of a step.

    python benchmarks/host_path.py [--prompts 1024 4096] [--tokens 4096] [--before CHECKOUT]

A stand-in for SGLang responds at once with prepared tokens. One rank runs the real loop, with its
driver and reward workers, to the start of the first forward pass of step 1. `--before` measures
another checkout too, in turn. Prints one JSON object a line:

    first_micro_batch_s   seconds from the last response to the first micro-batch
    driver_cpu_s          CPU of the driver, from the request for the step to its rollout file
    rank_cpu_s            CPU of rank 0, from the request for the step to the first micro-batch
    driver_mib, rank_mib  growth of the memory: the peak, less the memory before the request
    report_s, report_mib  `write_report` after the step: seconds, growth of the peak
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve()
CHECKOUT = "PACS_BENCHMARK_CHECKOUT"
"""environment variable: folder of the measured package"""
sys.path.insert(0, os.environ.get(CHECKOUT, str(HERE.parents[1])))

SAMPLES_PER_PROMPT = 8
NUM_TEXTS = 64
"""different responses of the stand-in"""
MIB = 2**20
REWARD = """def reward(prompt, response):
    return float(sum(response.encode()[:64]) % 2)
"""


def serve(num_tokens: int, vocab_size: int) -> None:
    """Runs the stand-in in this process; prints its address. Ends with its parent."""
    import numpy as np
    import orjson
    from aiohttp import web

    from pacs_megatron.runtime.processes import die_with_parent
    from tests.support.servers.fake_sglang import FakeSglang

    die_with_parent()
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(NUM_TEXTS):
        ids = rng.integers(0, vocab_size, num_tokens).tolist()
        logprobs = (-rng.exponential(1.0, num_tokens)).astype(np.float32).tolist()
        entries = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        fields = {"text": "", "output_ids": ids, "meta_info": {"entries": entries}}
        # As SGLang does: without spaces.
        text = orjson.dumps(fields).decode()
        # The other fields, which depend on the request, are appended.
        texts.append(text.replace('"entries"', '"output_token_logprobs"').removesuffix("}}"))

    class StandIn(FakeSglang):
        """Responds with a prepared text."""

        last_s = 0.0

        def _routes(self, app: web.Application) -> None:
            super()._routes(app)
            app.router.add_post("/update_weights_from_disk", self._empty)
            app.router.add_get("/last", self._last)

        async def _last(self, _request: web.Request) -> web.Response:
            return web.json_response(self.last_s)

        async def _generate(self, request: web.Request) -> web.StreamResponse:
            body = await request.json()
            rid = str(body["rid"])
            fields = {
                "id": rid,
                "finish_reason": {"type": "stop", "matched": 0},
                "weight_versions": [
                    {"version": self.weight_version, "start": 0, "end": num_tokens}
                ],
            }
            text = texts[int(body["sampling_params"]["sampling_seed"]) % NUM_TEXTS]
            end = json.dumps(fields).removeprefix("{")
            StandIn.last_s = time.monotonic()
            return web.Response(text=f"{text}, {end}}}", content_type="application/json")

    with StandIn() as server:
        print(server.url, flush=True)
        while True:
            time.sleep(3600)


def write_inputs(folder: Path, num_prompts: int, num_tokens: int) -> None:
    """Model, problems, reward and configuration, without the server's address."""
    from tests.support.tiny_models import make_tiny_qwen3

    make_tiny_qwen3(folder / "model", max_position_embeddings=2 * num_tokens)
    (folder / "reward.py").write_text(REWARD)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(num_prompts):
            problem = f"What is {number} + {number}? " * 8
            file.write(json.dumps({"problem": problem, "answer": str(2 * number)}) + "\n")

    options = {
        "run": {"name": "host", "dir": str(folder / "runs"), "steps": 2},
        "model": {"path": str(folder / "model")},
        "precision": {"dtype": "fp32"},
        "objective": {"name": "pacs"},
        "batch": {
            "prompts_per_step": num_prompts,
            "samples_per_prompt": SAMPLES_PER_PROMPT,
            "updates_per_step": 1,
            "tokens_per_microbatch": 8 * num_tokens,
        },
        "rollout": {
            "engine": "sglang",
            "sampling": {"max_response_tokens": num_tokens},
            "sync": {"transport": "disk", "verify": "off", "pause": "in_place"},
            "max_in_flight": 64,
        },
        "reward": {"name": "custom", "function": f"{folder}/reward.py:reward", "workers": 2},
        "data": {
            "max_prompt_tokens": 512,
            "train": {
                "path": str(folder / "train.jsonl"),
                "columns": {"problem": "problem", "answer": "answer"},
            },
        },
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": None},
        "logging": {"tensorboard": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(options))


def memory_mib(pid: int, key: str) -> float:
    """`VmRSS` or `VmHWM` (the peak) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} has no {key}")


def clear_peak(pid: int) -> None:
    """Sets the peak of a process's memory to its memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def run_rank_until_first_micro_batch(folder: Path, url: str) -> None:
    """The rank: writes the results to result.json and ends this process."""
    import psutil

    from pacs_megatron.observability.report import write_report
    from pacs_megatron.policy.engine import MegatronPolicy
    from pacs_megatron.rollout.collect import Rollouts
    from pacs_megatron.training.main import run_rank

    result: dict[str, float] = {}
    children: dict[str, psutil.Process] = {}
    set_hook = MegatronPolicy.on_microbatch
    collect = Rollouts.collect
    own = psutil.Process()

    def cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def from_request(self: Any, step: int) -> Any:
        for child in own.children():
            if "pacs_megatron.rollout.driver" in child.cmdline():
                children["driver"] = child
        for name, process in (("rank", own), ("driver", children["driver"])):
            clear_peak(process.pid)
            result[f"{name}_cpu_s"] = -cpu_s(process)
            result[f"{name}_mib"] = -memory_mib(process.pid, "VmRSS")
        return collect(self, step)

    def finish() -> None:
        now = time.monotonic()
        result["rank_cpu_s"] += cpu_s(own)
        result["rank_mib"] += memory_mib(own.pid, "VmHWM")
        with urllib.request.urlopen(f"{url}/last") as response:  # noqa: S310
            result["first_micro_batch_s"] = now - json.loads(response.read())

        run_dir = folder / "runs" / "host"
        while not (run_dir / "rollouts" / "step_000001.jsonl").exists():
            time.sleep(0.02)
        driver = children["driver"]
        result["driver_cpu_s"] += cpu_s(driver)
        result["driver_mib"] += memory_mib(driver.pid, "VmHWM")

        clear_peak(own.pid)
        before = memory_mib(own.pid, "VmRSS")
        start = time.perf_counter()
        write_report(run_dir)
        result["report_s"] = time.perf_counter() - start
        result["report_mib"] = memory_mib(own.pid, "VmHWM") - before
        (folder / "result.json").write_text(json.dumps(result))
        os._exit(0)

    Rollouts.collect = from_request  # type: ignore[method-assign]
    MegatronPolicy.on_microbatch = lambda self, hook: set_hook(self, finish)  # type: ignore[method-assign]
    run_rank(folder / "config.yaml", [f"rollout.urls=['{url}']"])


def measure(checkout: Path, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """The figures of one checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        CHECKOUT: str(checkout),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, num_prompts, num_tokens)
        server = subprocess.Popen(
            [*command, "--serve", "--tokens", str(num_tokens)],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            with (folder / "log.txt").open("wb") as log:
                subprocess.run(
                    [*command, "--rank", name, "--url", url],
                    # The driver is `python -m`, which imports from here first.
                    cwd=checkout,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    check=False,
                )
        finally:
            server.kill()
            server.wait()

        result = folder / "result.json"
        if not result.exists():
            raise SystemExit((folder / "log.txt").read_text()[-3000:])
        return {key: round(value, 2) for key, value in json.loads(result.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.tokens, vocab_size=250)
    if args.rank is not None:
        run_rank_until_first_micro_batch(args.rank, args.url)
        return 1

    checkouts = {} if args.before is None else {"before": args.before.resolve()}
    checkouts["after"] = HERE.parents[1]
    for num_prompts in args.prompts:
        for name, checkout in checkouts.items():
            figures = measure(checkout, num_prompts, args.tokens)
            sizes = {"prompts": num_prompts, "tokens": args.tokens, "load": os.getloadavg()[0]}
            print(json.dumps({"checkout": name, **sizes, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
