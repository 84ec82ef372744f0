"""One unattended measurement of the training step on one GPU: bf16 and every FP8 recipe, one table,
JSON and raw log.

    python benchmarks/train_step.py --preset qwen3-0.6b --out results/train_step
    python benchmarks/train_step.py --dry-run-cpu --out results/dry_run

The dry run takes the same path with tiny shapes and without a GPU. The real MegatronPolicy on
random weights (nothing is downloaded), one PACS update a step. Every case is a process of its own,
so a case that fails or runs out of memory does not affect the others; the table has its reason.

    tokens/s        all packed tokens of a step / its seconds (forward, backward, clip, Adam);
                    median of the steps
    fwd tok/s       the same for a forward-only pass, as in the score pass and `step_start`
    TFLOP/s         3 x forward FLOPs by Megatron's formula (plan/timing.py), output layer counted
                    for response tokens only
    of peak         share of the GPU's dense bf16 peak (989 TFLOP/s on H100 and H200), for FP8 too,
                    so that rows compare
    peak GiB        torch.cuda.max_memory_allocated over the timed steps
    d loss, d norm  relative difference of the SFT loss and of the PACS gradient norm to the CPU
                    path in fp32, on a four-layer cut of the same model with the same weights and
                    tokens
    r floor         max |r_j| of a score pass at unchanged weights: 0 where kernels are
                    deterministic (objective.md)

The second table: log-probs at a vocabulary of 151,936, the chunked head against plain logits,
forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
# A GPU machine may have the dependencies without this package installed.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PEAK_TFLOPS = 989.0
CASES = {
    "bf16": {"dtype": "bf16"},
    "fp8-tensorwise": {"dtype": "bf16", "fp8": {"recipe": "tensorwise"}},
    "fp8-blockwise": {"dtype": "bf16", "fp8": {"recipe": "blockwise", "format": "e4m3"}},
    "fp8-delayed": {"dtype": "bf16", "fp8": {"recipe": "delayed"}},
    "fp32": {"dtype": "fp32"},
}
PRESETS = {
    # hub id, layers that fit one 80 GB GPU together with gradients and Adam's state
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 28),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 28),
    "qwen3-4b": ("Qwen/Qwen3-4B", 16),
    "qwen3-8b": ("Qwen/Qwen3-8B", 6),
    "qwen3-14b": ("Qwen/Qwen3-14B", 4),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 4),
    "tiny": (None, 2),
    "tiny-moe": (None, 2),
}
TINY = {"tiny": "Qwen/Qwen3-0.6B", "tiny-moe": "Qwen/Qwen3-30B-A3B"}
CASE_TIMEOUT_S = 900
NUM_WARMUP = 2
CHECK_VOCAB = 8192
"""largest vocabulary of the check, so that the CPU keeps up"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The measurement of one process."""

    kind: str
    """speed, check or head"""
    case: str
    preset: str
    layers: int
    samples: int
    prompt: int
    response: int
    tokens_per_microbatch: int
    steps: int
    cpu: bool
    recompute: str = "none"
    reference: str | None = None
    """check: the CPU path's file, for the comparison"""


# ----------------------------------------------------------------------------------------- workers
def spec_of(setup: Setup) -> Any:
    """The preset's architecture with `layers` layers; the check uses a small vocabulary so that the
    CPU keeps up.
    """
    from pacs_megatron.models import ModelSpec, read_spec
    from pacs_megatron.workbench.plan.known_models import need_config

    hub_id, _ = PRESETS[setup.preset]
    spec = read_spec(need_config(hub_id or TINY[setup.preset], "benchmark"))
    if hub_id is None:
        moe = spec.moe and replace(spec.moe, num_experts=4, top_k=2, expert_ffn_size=32)
        spec = replace(
            spec,
            hidden_size=64,
            ffn_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=1000,
            moe=moe,
        )
    assert isinstance(spec, ModelSpec)
    if setup.kind == "check":
        spec = replace(spec, vocab_size=min(spec.vocab_size, CHECK_VOCAB))
    return replace(spec, num_layers=setup.layers)


def random_weights(
    table: Any, dtype: torch.dtype, *, kind: str, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """A reader of Hugging Face tensors drawn from their names, rounded to bf16.

    Args:
        table: names and shapes of the model's tensors.
        dtype: of the tensors.
        kind: `check` draws on the CPU, which gives the same values on every machine.
        device: the other kinds draw there, which is faster.
    """
    draws_on = torch.device("cpu") if kind == "check" else device

    def read(name: str) -> torch.Tensor:
        entry = table.by_hf[name]
        shape = entry.hf_shapes[entry.hf_names.index(name)]
        generator = torch.Generator(draws_on).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=draws_on)
        value = 1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.03 * noise
        return value.bfloat16().to(dtype).cpu()

    return read


@functools.cache
def this_rank() -> Any:
    """The one rank of this process, with its process groups."""
    from pacs_megatron.contracts import Layout
    from pacs_megatron.parallel import groups

    return groups.initialize(Layout(world_size=1), seed=1, control_timeout_s=600.0)


def build_policy(setup: Setup) -> Any:
    """The policy on one rank, and a description of its precision."""
    from pacs_megatron.config.schema import (
        OptimizerOptions,
        ParallelOptions,
        PrecisionOptions,
        RecomputeOptions,
    )
    from pacs_megatron.policy import precision
    from pacs_megatron.policy.engine import MegatronPolicy

    options = PrecisionOptions(**CASES[setup.case])
    policy = MegatronPolicy(
        spec_of(setup),
        this_rank(),
        parallel=ParallelOptions(recompute=RecomputeOptions(granularity=setup.recompute)),
        precision_options=options,
        optimizer=OptimizerOptions(lr=1e-6),
        clip_grad=1.0,
        total_updates=1000,
        tokens_per_microbatch=setup.tokens_per_microbatch,
    )
    weights = random_weights(
        policy.table,
        policy.config.params_dtype,
        kind=setup.kind,
        device=this_rank().device,
    )
    policy.load_weights(weights)
    return policy, precision.describe(options, precision.inspect_machine())


def random_part(setup: Setup, vocab: int) -> Any:
    """Groups of 4, mixed labels, lengths within 20 % of the setting."""
    from pacs_megatron.batching.split import plan_microbatches
    from pacs_megatron.batching.tables import single_turn_writers
    from pacs_megatron.contracts import Layout, MiniBatch, SampleFacts, TokenBuffers

    rng = np.random.default_rng(0)
    rows = np.arange(setup.samples)
    labels = (rows % 2).astype(np.float64)
    response_lens = rng.integers(int(0.8 * setup.response), setup.response + 1, setup.samples)
    facts = SampleFacts(
        ids=tuple(f"1:bench/{row // 4}#{row % 4}" for row in rows),
        groups=rows // 4,
        labels=labels,
        rewards=labels,
        prompt_lens=np.full(setup.samples, setup.prompt),
        response_lens=response_lens,
        environment_lens=np.zeros(setup.samples, dtype=np.int64),
        truncated=np.zeros(setup.samples, dtype=bool),
    )
    tokens = TokenBuffers(
        index=rows,
        token_ids=rng.integers(0, vocab, int(facts.lens.sum())).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(facts.lens)]),
        writers=single_turn_writers(facts.prompt_lens, facts.response_lens),
        sampler_logprobs=np.full(int(response_lens.sum()), -8.0, dtype=np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(response_lens)]),
    )
    plan = plan_microbatches(
        facts, layout=Layout(world_size=1), tokens_per_microbatch=setup.tokens_per_microbatch
    )
    return MiniBatch(facts=facts, rows=rows, tokens=tokens, plan=plan)


def sync() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call, after NUM_WARMUP calls."""
    seconds = []
    for number in range(repeats + NUM_WARMUP):
        sync()
        start = time.perf_counter()
        work()
        sync()
        if number >= NUM_WARMUP:
            seconds.append(time.perf_counter() - start)
    return seconds


def measure_speed(setup: Setup) -> dict[str, Any]:
    """Seconds of updates and of forward passes, and peak memory."""
    from pacs_megatron.objectives.pacs import PacsOptions
    from pacs_megatron.objectives.registry import build_objective
    from pacs_megatron.workbench.plan.timing import forward_flops

    policy, used = build_policy(setup)
    minibatch = random_part(setup, policy.spec.vocab_size)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    steps = timed(lambda: policy.update(minibatch, objective, None), setup.steps)
    forward = timed(lambda: policy.logprobs(minibatch, "step_start"), setup.steps)

    num_tokens = int(minibatch.facts.lens.sum())
    mean_length = num_tokens / setup.samples
    num_outputs = float(minibatch.facts.response_lens.sum())
    flops = 3 * forward_flops(policy.spec, num_tokens, mean_length, num_outputs)
    seconds = statistics.median(steps)
    peak_gib = None
    if torch.cuda.is_available():
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
    return {
        "used": used,
        "tokens": num_tokens,
        "step_s": steps,
        "forward_s": forward,
        "tokens_per_s": num_tokens / seconds,
        "forward_tokens_per_s": num_tokens / statistics.median(forward),
        "tflops": flops / seconds / 1e12,
        "peak_frac": flops / seconds / 1e12 / PEAK_TFLOPS,
        "peak_gib": peak_gib,
    }


def measure_check(setup: Setup) -> dict[str, Any]:
    """Log-probs, SFT loss, PACS gradient norm, score floor and drift; compared with the CPU path's
    file if it exists.
    """
    from pacs_megatron.objectives.pacs import PacsOptions
    from pacs_megatron.objectives.registry import build_objective
    from pacs_megatron.objectives.sft import SftOptions

    policy, used = build_policy(setup)
    minibatch = random_part(setup, policy.spec.vocab_size)
    start = policy.logprobs(minibatch, "step_start")
    logprobs = start.cpu().numpy()
    minibatch = replace(minibatch, step_start_logprobs=start, index=1)

    # Scores at unchanged weights, then one update of PACS and one of SFT.
    pacs = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
    scores = policy.scores(minibatch, pacs)
    pacs_report = policy.update(minibatch, pacs, {})
    sft = build_objective(SftOptions(name="sft"), updates_per_step=1)
    sft_report = policy.update(minibatch, sft, {})
    figures: dict[str, Any] = {
        "used": used,
        "score_floor": float(scores.abs().max()),
        "grad_norm": pacs_report.grad_norm,
        "score_drift": pacs_report.metrics["pacs/score_drift_max"],
        "sft_loss": float(-logprobs.mean()),
        "sft_grad_norm": sft_report.grad_norm,
    }
    if setup.reference is None:
        return figures | {"logprobs": logprobs.tolist()}

    reference = json.loads(Path(setup.reference).read_text())["check"]
    difference = np.abs(logprobs - np.asarray(reference["logprobs"]))

    def relative_difference(name: str) -> float:
        return abs(figures[name] / reference[name] - 1)

    return figures | {
        "logprob_diff_mean": float(difference.mean()),
        "logprob_diff_max": float(difference.max()),
        "loss_rel_diff": relative_difference("sft_loss"),
        "grad_norm_rel_diff": relative_difference("grad_norm"),
        "sft_grad_norm_rel_diff": relative_difference("sft_grad_norm"),
    }


def measure_head(setup: Setup) -> dict[str, Any]:
    """Peak memory and seconds of log-probs and their gradients, chunked and plain, and their
    difference.
    """
    import torch.distributed as dist

    from pacs_megatron.policy.head import token_logprobs

    vocab, hidden_size, tokens = (1000, 64, 128) if setup.cpu else (151936, 2560, 8192)
    device = this_rank().device
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    weight = 0.03 * torch.randn(vocab, hidden_size, generator=generator)
    weight = weight.to(device, dtype).requires_grad_(True)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    hidden = hidden.to(device, dtype).requires_grad_(True)
    targets = torch.randint(0, vocab, (tokens,), generator=generator).to(device)

    def chunked() -> torch.Tensor:
        logprobs, _ = token_logprobs(
            hidden, weight, targets, vocab_size=vocab, group=dist.group.WORLD, want_entropy=True
        )
        return logprobs

    def plain() -> torch.Tensor:
        logprobs = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0]

    figures: dict[str, Any] = {"vocab": vocab, "hidden": hidden_size, "tokens": tokens}
    outputs = {}
    for name, head in (("chunked", chunked), ("plain", plain)):
        before = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

        def work(head: Callable[[], torch.Tensor] = head, name: str = name) -> None:
            weight.grad = None
            hidden.grad = None
            logprobs = head()
            logprobs.sum().backward()
            outputs[name] = logprobs.detach()

        try:
            figures[f"{name}_s"] = statistics.median(timed(work, setup.steps))
        except torch.cuda.OutOfMemoryError:
            figures[f"{name}_s"] = None
            continue
        if torch.cuda.is_available():
            extra_bytes = torch.cuda.max_memory_allocated() - before
            figures[f"{name}_extra_gib"] = extra_bytes / 2**30
    if len(outputs) == 2:
        figures["max_diff"] = float((outputs["chunked"] - outputs["plain"]).abs().max())
    return figures


WORKERS = {"speed": measure_speed, "check": measure_check, "head": measure_head}


def run_worker(setups: list[Setup], out: Path) -> None:
    """In the child: kind -> result, or one line with the reason for none; written to disk after
    each.
    """
    from pacs_megatron.errors import PacsError

    results: dict[str, Any] = {}
    for setup in setups:
        try:
            results[setup.kind] = WORKERS[setup.kind](setup)
        except (PacsError, torch.cuda.OutOfMemoryError) as error:
            results[setup.kind] = {"refused": str(error).splitlines()[0]}
        out.write_text(json.dumps(results))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------ parent
def run_case(setups: list[Setup], out: Path, log: Path) -> dict[str, dict[str, Any]]:
    """One child process, its output in the raw log: kind -> result."""
    first = setups[0]
    # The reference is a run without one; in a dry run every case is on the CPU.
    suffix = "" if first.reference else "-cpu"
    result_file = out / f"{first.case}{suffix}.json"
    result_file.unlink(missing_ok=True)
    payload = json.dumps([asdict(setup) for setup in setups])
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        payload,
        "--out",
        str(result_file),
    ]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if first.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""

    with log.open("a") as stream:
        stream.write(f"\n===== {payload}\n")
        stream.flush()
        try:
            done = subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=CASE_TIMEOUT_S,
                check=False,
            )
            reason = f"the process ended with {done.returncode}; see {log.name}"
        except subprocess.TimeoutExpired:
            reason = f"no result after {CASE_TIMEOUT_S} s"

    results: dict[str, dict[str, Any]] = {}
    if result_file.exists():
        results = json.loads(result_file.read_text())
    return {setup.kind: results.get(setup.kind, {"refused": reason}) for setup in setups}


def machine_facts() -> dict[str, Any]:
    """GPU, CUDA and versions."""
    from importlib.metadata import distributions

    names = ("torch", "megatron-core", "transformer-engine", "transformers", "triton")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        gpu = ""
    return {
        "gpu": gpu or None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {item.name: item.version for item in distributions() if item.name in names},
    }


def cell(value: Any, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def speed_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each case, and the reasons for missing figures."""
    titles = (
        "tokens/s",
        "fwd tok/s",
        "TFLOP/s",
        "of peak",
        "peak GiB",
        "d loss",
        "d norm",
        "r floor",
    )
    lines = [f"{'case':>15} " + " ".join(f"{title:>10}" for title in titles)]
    for case, row in rows.items():
        speed = row["speed"]
        check = row["check"]
        cells = [
            cell(speed.get("tokens_per_s"), "{:,.0f}"),
            cell(speed.get("forward_tokens_per_s"), "{:,.0f}"),
            cell(speed.get("tflops"), "{:.3g}"),
            cell(speed.get("peak_frac"), "{:.1%}"),
            cell(speed.get("peak_gib"), "{:.1f}"),
            cell(check.get("loss_rel_diff"), "{:.1e}"),
            cell(check.get("grad_norm_rel_diff"), "{:.1e}"),
            cell(check.get("score_floor"), "{:.1e}"),
        ]
        lines.append(f"{case:>15} " + " ".join(f"{text:>10}" for text in cells))
        reasons = {part["refused"] for part in (speed, check) if "refused" in part}
        lines.extend(f"{'':>15} {reason}" for reason in sorted(reasons))
    return lines


def head_lines(head: dict[str, Any]) -> list[str]:
    """The second table."""
    if "refused" in head:
        return [f"log-prob head: {head['refused']}"]
    lines = [
        f"log-probs of {head['tokens']:,} tokens, hidden {head['hidden']}, vocabulary "
        f"{head['vocab']:,}, with gradients:"
    ]
    for name in ("chunked", "plain"):
        seconds = cell(head.get(f"{name}_s"), "{:.4f} s")
        memory = cell(head.get(f"{name}_extra_gib"), "{:.2f} GiB more")
        lines.append(f"{name:>15} {seconds} {memory}")
    difference = cell(head.get("max_diff"), "{:.1e}")
    lines.append(f"{'':>15} largest difference {difference} nats")
    return lines


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-0.6b")
    parser.add_argument(
        "--layers", type=int, help="layers of the timed model (default: the preset's)"
    )
    on_gpu = [case for case in CASES if case != "fp32"]
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=on_gpu)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=3840)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--recompute", choices=("none", "full"), default="none", help="of the timed model"
    )
    parser.add_argument(
        "--reference", type=Path, help="fp32-cpu.json of an earlier run with the same sizes"
    )
    parser.add_argument("--only-check", action="store_true", help="only the correctness figures")
    parser.add_argument(
        "--dry-run-cpu", action="store_true", help="tiny shapes on the CPU: tests the script"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for result.json and raw.log"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def setups(options: argparse.Namespace) -> tuple[Setup, Setup]:
    """(timed, checked) settings; the check is a small cut of the same model."""
    if options.dry_run_cpu:
        preset = "tiny-moe" if "a3b" in options.preset else "tiny"
        timed_setup = Setup(
            kind="speed",
            case="",
            preset=preset,
            layers=options.layers or PRESETS[preset][1],
            samples=8,
            prompt=8,
            response=24,
            tokens_per_microbatch=64,
            steps=2,
            cpu=True,
            recompute=options.recompute,
        )
        return timed_setup, replace(timed_setup, kind="check", layers=2)

    timed_setup = Setup(
        kind="speed",
        case="",
        preset=options.preset,
        layers=options.layers or PRESETS[options.preset][1],
        samples=options.samples,
        prompt=options.prompt,
        response=options.response,
        tokens_per_microbatch=options.tokens_per_microbatch,
        steps=options.steps,
        cpu=False,
        recompute=options.recompute,
    )
    check = replace(
        timed_setup,
        kind="check",
        layers=4,
        samples=8,
        prompt=32,
        response=96,
        tokens_per_microbatch=512,
    )
    return timed_setup, check


def measure_reference(
    options: argparse.Namespace, timed_setup: Setup, check: Setup, log: Path
) -> dict[str, dict[str, Any]]:
    """Results of the CPU path in fp32: measured, or of `--reference`."""
    if options.reference is not None:
        results: dict[str, dict[str, Any]] = json.loads(options.reference.read_text())
        return results
    print("measuring the CPU path in fp32 ...", flush=True)
    on_cpu = [replace(check, case="fp32", cpu=True)]
    if options.dry_run_cpu and not options.only_check:
        on_cpu.append(replace(timed_setup, case="fp32"))
    return run_case(on_cpu, options.out, log)


def case_setups(
    options: argparse.Namespace, timed_setup: Setup, check: Setup | None, case: str
) -> list[Setup]:
    """The measurements of one case; `check` is None without a reference."""
    measurements = []
    if check is not None:
        measurements.append(replace(check, case=case))
    if not options.only_check:
        measurements.append(replace(timed_setup, case=case))
        if case == "bf16":
            measurements.append(replace(timed_setup, kind="head", case=case))
    return measurements


def main() -> int:
    options = arguments()
    if options.worker is not None:
        run_worker([Setup(**setup) for setup in json.loads(options.worker)], options.out)
        return 0

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    log = out / "raw.log"
    log.write_text("")
    timed_setup, check = setups(options)
    cpu_results = measure_reference(options, timed_setup, check, log)
    reference = cpu_results["check"]
    has_reference = "refused" not in reference
    reference_file = options.reference or out / "fp32-cpu.json"
    compared_check = replace(check, reference=str(reference_file)) if has_reference else None

    rows = {"fp32": cpu_results} if options.dry_run_cpu else {}
    head: dict[str, Any] = {}
    for case in options.cases:
        print(f"measuring {case} ...", flush=True)
        measurements = case_setups(options, timed_setup, compared_check, case)
        rows[case] = run_case(measurements, out, log) if measurements else {}
        head = rows[case].pop("head", head)
        if not has_reference:
            reason = f"the CPU path gave no reference: {reference['refused']}"
            rows[case]["check"] = {"refused": reason}
    for row in rows.values():
        row.setdefault("speed", {})
        row["check"].pop("logprobs", None)

    facts = machine_facts()
    result = {
        "machine": facts,
        "setup": asdict(timed_setup),
        "check_setup": asdict(check),
        "cpu_reference": reference,
        "rows": rows,
        "head": head,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))

    title = (
        f"{timed_setup.preset}, {timed_setup.layers} layers, {timed_setup.samples} samples; "
        f"{facts['gpu'] or 'CPU'}"
    )
    lines = [title, *speed_table(rows)]
    if head:
        lines += ["", *head_lines(head)]
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    is_measured = any("refused" not in row["check"] for row in rows.values())
    return 0 if is_measured and has_reference else 1


if __name__ == "__main__":
    sys.exit(main())
