"""Compares runs of two checkouts bit for bit: `record` in the old one, `compare` in the new one.

    tools/compare_bits.py record FOLDER --checkout OLD --samples RUN --model MODEL
    tools/compare_bits.py compare FOLDER

Four cases: the quickstart of 0.1 (shortened), a run that is stopped and resumed, a conversion both
ways, and a run that receives recorded samples of SGLang (`--samples`: a run folder with
`logging.save_tokens`, `--model`: its model). Weights, rollouts and every metric but times are
compared. `RENAMED_KEYS` and METRIC_KEYS name what was renamed between the two.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from pacs_megatron.config.messages import RENAMED_KEYS  # noqa: E402

METRIC_KEYS = {"lag/": "staleness/"}
"""metrics: old prefix -> new prefix"""
NEW_METRICS = (
    "optimizer/clipped_frac",
    "passes/step_start",
    "passes/reference",
    "passes/score",
    "batch/dp_imbalance",
    "batch/groups_together_frac",
    "batch/pipeline_bubble",
    "pacs/psi_mean_square",
    "pacs/score_drift_max",
)
"""metrics that only one of the two writes"""
CORRECTED_METRICS = (
    "grpo/importance_mean",
    "mismatch/ratio",
    "policy/entropy",
    "policy/logprob_mean",
)
"""metrics whose denominator was corrected: their tokens, over all updates of a step"""
STOPPED = 75
LIMIT_S = 900.0

Facts = dict[str, Any]

# The shipped configuration of 0.1, with every default that has changed since written out.
COMMON = {
    "run.seed": 0,
    "precision.dtype": "fp32",
    "parallel.tp": 2,
    "data.train.preset": "deepscaler",
    "data.prompt_suffix": r"Answer in \boxed{}.",
    "data.max_prompt_tokens": 48,
    "optimizer.schedule": "linear",
    "optimizer.clip_grad": 1.0,
}
WARM_START = COMMON | {
    "run.name": "warm",
    "run.steps": 100,
    "objective.name": "sft",
    "batch.prompts_per_step": 32,
    "batch.samples_per_prompt": 1,
    "batch.updates_per_step": 1,
    "batch.tokens_per_microbatch": 4096,
    "rollout.engine": "demonstrations",
    "rollout.max_response_tokens": 48,
    "optimizer.lr": 2e-3,
    "optimizer.min_lr": 2e-5,  # 0 had a last update without effect
    "optimizer.warmup_updates": 20,
}
PACS = COMMON | {
    "run.name": "pacs",
    "run.steps": 20,
    "objective.name": "pacs",
    "objective.beta": 1.0,
    "objective.weighting": "question",
    "batch.prompts_per_step": 16,
    "batch.samples_per_prompt": 8,
    "batch.updates_per_step": 1,
    "batch.tokens_per_microbatch": 16384,
    "rollout.engine": "embedded",
    "rollout.sampling.max_response_tokens": 48,
    "rollout.batch_sequences": 64,
    "reward.name": "arithmetic",
    "optimizer.lr": 2e-4,
    "optimizer.min_lr": 2e-5,
    "optimizer.warmup_updates": 10,
    "evaluation.every": 10,
    "evaluation.samples_per_prompt": 8,
    "evaluation.k": [1, 8],
    "evaluation.sampling.max_response_tokens": 48,
    "logging.save_tokens": True,
}
RESUMED = PACS | {
    "run.name": "resumed",
    "run.steps": 8,
    "batch.updates_per_step": 2,
    "rollout.max_lag": 1,
    "objective.importance_cap": 2.0,
    "evaluation.every": 3,
    "checkpoint.every": 4,
}
SGLANG = {
    "run.name": "sglang",
    "run.steps": 5,
    "run.seed": 5,
    "precision.dtype": "fp32",
    "objective.name": "grpo",
    "objective.importance": "truncate",
    "batch.prompts_per_step": 8,
    "batch.samples_per_prompt": 4,
    "batch.updates_per_step": 1,
    "batch.tokens_per_microbatch": 1024,
    "rollout.engine": "sglang",
    "rollout.dtype": "bf16",
    "rollout.max_lag": 2,
    "rollout.probe_s": 0.3,
    "rollout.sampling.max_response_tokens": 480,
    "rollout.sampling.stop": ["a", "b"],
    "rollout.sync.way": "disk",
    "rollout.sync.verify": "off",
    "rollout.sync.pause": "in_place",
    "reward.name": "custom",
    "data.prompt_suffix": "",
    "data.max_prompt_tokens": 128,
    "data.train.columns": {"problem": "problem", "answer": "answer"},
    "optimizer.lr": 1e-3,
    "optimizer.clip_grad": 1.0,
    "evaluation.every": 2,
    "evaluation.samples_per_prompt": 1,
    "evaluation.sampling.max_response_tokens": 8,
    "logging.save_tokens": True,
    "logging.tensorboard": False,
}
REWARD = "def reward(prompt, response):\n    return float(sum(response.encode()) % 2)\n"


class Checkout:
    """Commands of one checkout, in one folder."""

    def __init__(self, root: Path, inputs: Path, work: Path) -> None:
        self.root = root
        self.inputs = inputs
        self.work = work
        sources = (root / "pacs_megatron" / "config").glob("*.py")
        self.is_old = not any("max_staleness" in source.read_text() for source in sources)

    def command(self, *arguments: str) -> list[str]:
        """Words of a command of this checkout."""
        return [sys.executable, "-m", "pacs_megatron", *arguments]

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts a command; its output goes to log.txt."""
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        log = (self.work / "log.txt").open("ab")
        return subprocess.Popen(
            command, cwd=self.work, env=environment, stdout=log, stderr=subprocess.STDOUT
        )

    def run(self, *arguments: str, expected: int = 0) -> None:
        """Runs a command to its end."""
        self.finish(self.start(self.command(*arguments)), expected)

    def finish(self, process: subprocess.Popen[bytes], expected: int = 0) -> None:
        """Waits for a process; exits with its log if it has another exit code."""
        code = process.wait(timeout=LIMIT_S)
        if code != expected:
            log = (self.work / "log.txt").read_text(errors="replace")
            sys.exit(
                f"{process.args} in {self.root}: exit code {code}, expected "
                f"{expected}\n{log[-3000:]}"
            )

    def config(self, options: Mapping[str, Any]) -> str:
        """Path of a file with these options, under the names that this checkout knows."""
        tree: dict[str, Any] = {}
        for old_key, value in (options | {"run.dir": str(self.work)}).items():
            key = old_key if self.is_old else RENAMED_KEYS.get(old_key, old_key)
            *parents, last = key.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        path = self.work / f"{options['run.name']}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    def facts(self, name: str) -> Facts:
        """Results of a run: metrics without times, digests of weights and of rollouts.

        Old names.
        """
        folder = self.work / name
        metrics = []
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            metrics.append({self._old(key): row[key] for key in row if self._is_compared(key)})
        return {
            "metrics": metrics,
            "weights": digests(folder / "hf", "*.safetensors"),
            # Not the exact records: their format is a release's own.
            "rollouts": digests(folder / "rollouts", "*.jsonl"),
        }

    def _is_compared(self, key: str) -> bool:
        is_time = key.startswith("time/") or "per_s" in key
        return not is_time and key not in NEW_METRICS + CORRECTED_METRICS

    def _old(self, key: str) -> str:
        """The old name of a metric."""
        for old, new in METRIC_KEYS.items():
            if key.startswith(new):
                return old + key.removeprefix(new)
        return key


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """Relative path -> SHA-256 of each file that matches."""
    hashes = {}
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            hashes[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def with_data(checkout: Checkout, options: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The options with the quickstart's model and data: problems and a benchmark for a run that
    evaluates, else demonstrations.
    """
    data = checkout.inputs / "data"
    if "evaluation.every" not in options:
        train = data / "demonstrations.json"
        return {**options, "model.path": str(model), "data.train.path": str(train)}
    benchmark = {"path": str(data / "test.json"), "preset": "deepscaler", "name": "test"}
    return {
        **options,
        "evaluation.benchmarks": [benchmark],
        "model.path": str(model),
        "data.train.path": str(data / "train.json"),
    }


def quickstart(checkout: Checkout) -> Facts:
    """A warm start, then PACS."""
    warm_start = with_data(checkout, WARM_START, checkout.inputs / "model")
    checkout.run("train", checkout.config(warm_start))
    pacs = with_data(checkout, PACS, checkout.work / "warm" / "hf")
    checkout.run("train", checkout.config(pacs))

    warm = checkout.facts("warm")
    # A run without rewards had reward/mean 1.0.
    for row in warm["metrics"]:
        row.pop("reward/mean", None)
        row.pop("reward/label_mean", None)
    return {"warm": warm, "pacs": checkout.facts("pacs")}


def resumed(checkout: Checkout) -> Facts:
    """Two updates a step, one step ahead; stopped by a STOP file after three rows."""
    path = checkout.config(with_data(checkout, RESUMED, checkout.work / "warm" / "hf"))
    folder = checkout.work / "resumed"
    process = checkout.start(checkout.command("train", path))
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        if process.poll() is not None:
            checkout.finish(process)
            sys.exit("the run ended before it was stopped")
        time.sleep(0.05)
    (folder / "STOP").touch()
    checkout.finish(process, STOPPED)
    (folder / "STOP").unlink(missing_ok=True)
    checkout.run("train", path)
    return checkout.facts("resumed")


def conversion(checkout: Checkout) -> Facts:
    """The warm start's model to Megatron and back."""
    source = checkout.work / "warm" / "hf"
    converted = checkout.work / "converted"
    back = checkout.work / "back"
    checkout.run("convert", "to-megatron", "--hf", str(source), "--out", str(converted))
    checkout.run("convert", "to-hf", "--checkpoint", str(converted), "--out", str(back))

    # Files of the Megatron side contain random ids, so its tensors are compared: the certificate
    # has their digests.
    certificate = json.loads((converted / "certificate.json").read_text())
    tensors = {tensor["name"]: tensor["xxh3_128"] for tensor in certificate["megatron"]["tensors"]}
    return {"megatron": tensors, "hf": digests(back, "*.safetensors")}


def sglang(checkout: Checkout) -> Facts:
    """A run that receives recorded samples."""
    from tests.support.servers.recorded_sglang import RecordedSglang

    work = checkout.work
    (work / "reward.py").write_text(REWARD)
    write_sums(work / "train.jsonl", list(itertools.product(range(4), repeat=2)))
    write_sums(work / "test.jsonl", [(number, 1) for number in range(4)])
    columns = {"problem": "problem", "answer": "answer"}
    with RecordedSglang(checkout.inputs / "samples") as server:
        options = SGLANG | {
            "model.path": str(checkout.inputs / "sglang_model"),
            "rollout.urls": [server.url],
            "reward.function": f"{work}/reward.py:reward",
            "data.train.path": str(work / "train.jsonl"),
            "evaluation.benchmarks": [
                {"path": str(work / "test.jsonl"), "name": "test", "columns": columns}
            ],
        }
        checkout.run("train", checkout.config(options))
    return checkout.facts("sglang")


def write_sums(file: Path, pairs: Sequence[tuple[int, int]]) -> None:
    """A problem and its answer for each pair of numbers."""
    lines = []
    for a, b in pairs:
        record = {"problem": f"{a} + {b} = ?", "answer": str(a + b)}
        lines.append(json.dumps(record) + "\n")
    file.write_text("".join(lines))


CASES = {"quickstart": quickstart, "resumed": resumed, "conversion": conversion, "sglang": sglang}


def collect(root: Path, inputs: Path, cases: list[str]) -> dict[str, Facts]:
    """Runs the cases in a checkout: case -> its results."""
    facts = {}
    with tempfile.TemporaryDirectory(prefix="compare-bits-") as work:
        checkout = Checkout(root.resolve(), inputs.resolve(), Path(work))
        for name in cases:
            begin = time.monotonic()
            facts[name] = CASES[name](checkout)
            print(f"{name}: ran in {time.monotonic() - begin:.0f} s", flush=True)
    return facts


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """A line for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            old_value = old.get(key, "(missing)")
            new_value = new.get(key, "(missing)")
            yield from differences(old_value, new_value, f"{where}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_value, new_value) in enumerate(zip(old, new, strict=True)):
            yield from differences(old_value, new_value, f"{where}/{index}")
    elif old != new:
        yield f"{where}: {old!r:.80} -> {new!r:.80}"


def make_inputs(folder: Path, options: argparse.Namespace) -> None:
    """The inputs of both checkouts."""
    from examples.quickstart.model import build_model
    from examples.quickstart.problems import write_problems

    build_model(folder / "model", seed=0)
    write_problems(folder / "data", seed=0)
    if "sglang" in options.cases:
        shutil.copytree(options.samples / "rollouts", folder / "samples" / "rollouts")
        shutil.copytree(options.model, folder / "sglang_model")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the bits of two checkouts.")
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="the quickstart comes first"
    )
    parser.add_argument("--checkout", type=Path, default=REPO)
    parser.add_argument("--samples", type=Path, help="record: run folder of a run over SGLang")
    parser.add_argument(
        "--model", type=Path, help="record: Hugging Face folder that this run began with"
    )
    options = parser.parse_args()
    path = options.folder / "facts.json"
    inputs = options.folder / "inputs"
    if options.verb == "record":
        if "sglang" in options.cases and None in (options.samples, options.model):
            parser.error(
                "the case sglang needs --samples and --model; or leave it out: --cases quickstart "
                "resumed conversion"
            )
        make_inputs(inputs, options)
        facts = collect(options.checkout, inputs, options.cases)
        path.write_text(json.dumps(facts, indent=1))
        return 0

    if not path.is_file():
        parser.error(f"{path} does not exist: `record` in the old checkout comes first")
    recorded = json.loads(path.read_text())
    old = {name: recorded[name] for name in options.cases}
    lines = list(differences(old, collect(options.checkout, inputs, options.cases)))
    for name in options.cases:
        lines_of_case = [line for line in lines if line.startswith(f"/{name}/")]
        verdict = f"{len(lines_of_case)} differences" if lines_of_case else "equal"
        print(f"{name}: {verdict}", *lines_of_case[:20], sep="\n  ")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
