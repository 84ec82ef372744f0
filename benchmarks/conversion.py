"""Conversion of a synthetic Qwen3 in both directions, beside `cp` + fsync of the same bytes in the
same run.

    python benchmarks/conversion.py --shape 8B --work /path/with/space [--json out.json]

Prints seconds, GB/s, the share of cp's speed, and the peak anonymous memory of each conversion. The
source is removed from the file cache before every stage. Needs disk space of twice the model's
bytes. Compares the digests of the tensors before and after the round trip; each stage is deleted
after its check.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "14B": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4000,
    },
}
_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_SAMPLE_S = 0.01


@dataclass(frozen=True, slots=True)
class Stage:
    """One measured stage; `peak_anonymous_bytes` is None for cp."""

    name: str
    seconds: float
    gb_per_s: float
    share_of_cp: float
    peak_anonymous_bytes: int | None


def make_model(folder: Path, shape: str, *, seed: int = 0) -> int:
    """Writes a random bf16 checkpoint of SHAPES[shape], streaming; returns its bytes."""
    import torch

    from pacs_megatron.checkpoint.hf_folder import HfFolderWriter, hf_tensors
    from pacs_megatron.models import read_spec, weight_table

    config = _COMMON | SHAPES[shape]
    source = folder.with_name(folder.name + "-config")
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config))

    infos = hf_tensors(weight_table(read_spec(config)).entries, torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(32 << 20, generator=generator).bfloat16()
    with HfFolderWriter(folder, infos, max_shard_bytes=5 * 10**9) as writer:
        for number, info in enumerate(infos):
            num_elements = info.nbytes // 2
            # A different offset for each tensor, so that two swapped tensors of one shape are
            # detected.
            values = noise[(number * 7919) % 4096 :]
            if num_elements > len(values):
                values = values.repeat(num_elements // len(values) + 1)
            writer.put(info.name, values[:num_elements].reshape(info.shape))
        writer.finish(source)
    shutil.rmtree(source)
    return sum(info.nbytes for info in infos)


def run_measured(command: Sequence[str]) -> tuple[float, int]:
    """(seconds, peak of RssAnon in bytes) of a command. Raises CalledProcessError."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _anonymous_bytes(process.pid))
        time.sleep(_SAMPLE_S)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, peak


def _anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in lines:
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def forget(folder: Path) -> None:
    """Drops a folder's files from the file cache, so that every stage reads from disk."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy_and_sync(source: Path, target: Path) -> float:
    """Seconds that `cp -r` and an fsync of every file take."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - start


def hf_digests(folder: Path) -> dict[str, str]:
    """Digests of the Hugging Face side, from the certificate in `folder`."""
    certificate = json.loads((folder / "certificate.json").read_text())
    return {record["name"]: record["xxh3_128"] for record in certificate["hf"]["tensors"]}


def run(shape: str, work: Path) -> dict[str, Any]:
    """Runs all stages; returns the results."""
    hf = work / "hf"
    copy = work / "copy"
    checkpoint = work / "checkpoint"
    back = work / "back"
    num_bytes = make_model(hf, shape)
    gigabytes = num_bytes / 1e9
    stages: list[Stage] = []

    def measure_cp(source: Path, name: str) -> float:
        forget(source)
        seconds = copy_and_sync(source, copy)
        shutil.rmtree(copy)
        stages.append(Stage(name, seconds, gigabytes / seconds, 1.0, None))
        return seconds

    def measure_conversion(
        name: str, script: str, source: Path, arguments: Sequence[str], cp_s: float
    ) -> None:
        forget(source)
        command = [sys.executable, str(ROOT / "conversion" / script), *arguments]
        seconds, peak = run_measured(command)
        stages.append(Stage(name, seconds, gigabytes / seconds, cp_s / seconds, peak))

    cp_s = measure_cp(hf, "cp of the HF folder + fsync")
    to_megatron = ["--hf", str(hf), "--out", str(checkpoint)]
    measure_conversion("HF -> Megatron", "hf_to_megatron.py", hf, to_megatron, cp_s)
    before = hf_digests(checkpoint)
    shutil.rmtree(hf)

    cp_s = measure_cp(checkpoint, "cp of the checkpoint + fsync")
    to_hf = ["--checkpoint", str(checkpoint), "--out", str(back)]
    measure_conversion("Megatron -> HF", "megatron_to_hf.py", checkpoint, to_hf, cp_s)
    after = hf_digests(back)
    shutil.rmtree(checkpoint)
    shutil.rmtree(back)

    return {
        "shape": shape,
        "bytes": num_bytes,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "tensors": len(before),
        "identical_after_round_trip": before == after,
        "stages": [asdict(stage) for stage in stages],
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"Qwen3 {result['shape']}: {result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors, "
        f"{result['host']}; identical after the round trip: {result['identical_after_round_trip']}",
        "",
        "| stage | s | GB/s | of cp | peak anonymous MiB |",
        "|---|---|---|---|---|",
    ]
    for stage in result["stages"]:
        peak = stage["peak_anonymous_bytes"]
        memory = "" if peak is None else f"{peak / 2**20:.0f}"
        lines.append(
            f"| {stage['name']} | {stage['seconds']:.1f} | {stage['gb_per_s']:.3f} | "
            f"{stage['share_of_cp']:.2f} | {memory} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument(
        "--work", type=Path, required=True, help="an empty or new folder; deleted afterwards"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if any(arguments.work.iterdir()):
        parser.error(f"{arguments.work} is not empty")
    try:
        result = run(arguments.shape, arguments.work)
    finally:
        shutil.rmtree(arguments.work)
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["identical_after_round_trip"] else 1


if __name__ == "__main__":
    sys.exit(main())
