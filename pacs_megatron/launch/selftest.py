"""`slurm/selftest.sbatch`: tests a site's GPUs and network, and prints a JSON certificate.

It runs real training commands on a small random model and compares each layout with one rank. It also tests save and
resume, FP8 against bf16, SGLang's weight sync and the network. The same program runs on CPU with gloo, in the tests.
"""

import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from pacs_megatron import __version__
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.runtime.command_line import OneLineParser, run_command
from pacs_megatron.runtime.environment import installed
from pacs_megatron.runtime.waiting import run_program

REL_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
"""Relative tolerance of the first step's gradient norm, compared with one rank."""
COMPARED = ("objective/loss", "optimizer/grad_norm", "reward/mean", "policy/entropy")
LAYOUTS: Mapping[str, tuple[int, dict[str, object]]] = {
    "dp2": (2, {}),
    "dp2 distributed optimizer": (2, {"distributed_optimizer": True}),
    "tp2": (2, {"tp": 2}),
    "tp2 sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 dp2": (4, {"tp": 2}),
    "tp2 pp2 dp2": (8, {"tp": 2, "pp": 2}),
}
SAMPLING = {"max_response_tokens": 12, "stop": list("abcdefghijklmnopqrstuvwxyz012345")}
"""A random model rarely samples the end token. Common letters stop most responses, so that few are truncated.
SGLang allows at most 32."""
MARKER = ".pacs-selftest"
"""Marks a folder that this program may empty."""
REWARD = "def reward(prompt, response):\n    return float(sum(response.encode()) % 2)\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the certificate."""

    name: str
    result: str
    """`ok`, `FAIL`, or `not run`"""
    detail: str
    seconds: float


class SelfTest:
    """Runs all parts in one folder, on at most `ranks` ranks."""

    def __init__(self, folder: Path, ranks: int, gpus: int, sglang_python: str | None) -> None:
        self._folder = folder
        self._ranks = ranks
        self._gpus = gpus
        self._sglang_python = sglang_python
        self.outcomes: list[Outcome] = []

    def run(self) -> bool:
        """Runs every part; returns whether none failed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        make_model(self._folder / "model")
        (self._folder / "reward.py").write_text(REWARD, encoding="utf-8")
        rows = [{"problem": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self._folder / "train.jsonl").write_text(text, encoding="utf-8")
        self._part("one rank", 1, self._one)
        for name, (ranks, parallel) in LAYOUTS.items():
            self._part(f"layout {name}", ranks, lambda name=name, r=ranks, p=parallel: self._same_as_one(name, r, p))
        self._part("save and resume", 2, self._resume)
        self._part("bf16", 1, lambda: self._near("bf16", {"dtype": "bf16"}))
        for recipe in ("delayed", "tensorwise", "blockwise"):
            precision = {
                "dtype": "bf16",
                "fp8": {"recipe": recipe, "format": "e4m3" if recipe == "blockwise" else "hybrid"},
            }
            self._part(f"fp8 {recipe}", 1, lambda recipe=recipe, p=precision: self._near(recipe, p), needs_gpu=True)
        for transport in ("disk", "broadcast", "ipc"):
            self._part(
                f"weight sync {transport}", 1, lambda transport=transport: self._sync(transport), needs_sglang=True
            )
        self._part("network", 2, self._network)
        return not any(outcome.result == "FAIL" for outcome in self.outcomes)

    def _part(
        self, name: str, ranks: int, action: object, *, needs_gpu: bool = False, needs_sglang: bool = False
    ) -> None:
        assert callable(action)
        if ranks > self._ranks:
            self._note(Outcome(name, "not run", f"requires {ranks} ranks, got {self._ranks}", 0.0))
            return
        if needs_gpu and not self._gpus:
            self._note(Outcome(name, "not run", "requires a GPU", 0.0))
            return
        if needs_sglang and self._sglang_python is None:
            self._note(Outcome(name, "not run", "requires --sglang-python", 0.0))
            return
        start = time.perf_counter()
        try:
            detail, result = action(), "ok"
        except PartFailedError as error:
            detail, result = str(error), "FAIL"
        self._note(Outcome(name, result, detail, time.perf_counter() - start))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        sys.stderr.write(f"{outcome.result:<8} {outcome.name}: {outcome.detail} ({outcome.seconds:.0f} s)\n")

    # -------------------------------------------------------------------------------------------------------- parts
    def _train(self, name: str, ranks: int, changes: Mapping[str, object], steps: int = 1) -> str:
        config = self._write_config(name, changes, steps)
        self._command(name, ranks, ["train", str(config)])
        row = self._row(name)
        return ", ".join(f"{key} {row[key]:.6g}" for key in COMPARED if key in row)

    def _one(self) -> str:
        text = self._train("one", 1, {})
        if not self._row("one")["optimizer/grad_norm"] > 0:
            raise PartFailedError("the gradient is zero, so the other parts have nothing to compare")
        return text

    def _same_as_one(self, name: str, ranks: int, parallel: Mapping[str, object]) -> str:
        self._train(name, ranks, {"parallel": parallel})
        return self._compare(name, "one", REL_TOLERANCE["fp32"])

    def _near(self, name: str, precision: Mapping[str, object]) -> str:
        self._train(name, 1, {"precision": precision})
        return self._compare(name, "one", REL_TOLERANCE["bf16"] * (3 if "fp8" in precision else 1))

    def _compare(self, name: str, other: str, tolerance: float) -> str:
        row, base = self._row(name), self._row(other)
        key = "optimizer/grad_norm"
        difference = abs(row[key] - base[key]) / max(abs(base[key]), 1e-30)
        text = f"gradient norm {row[key]:.6g} against {base[key]:.6g}, relative difference {difference:.1e}"
        if not math.isfinite(difference) or difference > tolerance:
            raise PartFailedError(f"{text}, allowed {tolerance:.0e}")
        return text

    def _resume(self) -> str:
        self._train("whole", 2, {"parallel": {"tp": 2}}, steps=3)
        self._train("halves", 2, {"parallel": {"tp": 2}}, steps=2)
        self._train("halves", 2, {"parallel": {"tp": 2}}, steps=3)
        rows = [self._row(name) for name in ("whole", "halves")]
        different = [key for key in COMPARED if rows[0].get(key) != rows[1].get(key)]
        if different:
            raise PartFailedError(f"step 3 differs after a resume in {', '.join(different)}")
        return "step 3 is bit-identical after a resume"

    def _sync(self, transport: str) -> str:
        servers = {"python": [self._sglang_python], "device": "cuda" if self._gpus else "cpu", "context_length": 256}
        if not self._gpus:
            servers |= {"max_total_tokens": 2048, "extra_args": ["--disable-cuda-graph", "--disable-overlap-schedule"]}
        sync = {"transport": transport, "verify": "full"}
        rollout = {"engine": "sglang", "sampling": SAMPLING, "sync": sync, "servers": servers}
        return self._train(f"sync_{transport}", 1, {"rollout": rollout}, steps=2)

    def _network(self) -> str:
        config = self._write_config("network", {"parallel": {"tp": 2}}, 1)
        text = self._command("network", 2, ["preflight", str(config)])
        return next(line.split(": ", 1)[1] for line in text.splitlines() if "network: " in line)

    # ---------------------------------------------------------------------------------------------------- machinery
    def _write_config(self, name: str, changes: Mapping[str, object], steps: int) -> Path:
        folder = self._folder
        config: dict[str, object] = {
            "run": {"name": _word(name), "dir": str(folder / "runs"), "steps": steps, "seed": 1},
            "model": {"path": str(folder / "model")},
            "precision": {"dtype": "fp32"},
            "objective": {"name": "pacs"},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "tokens_per_microbatch": 256},
            "rollout": {"engine": "embedded", "sampling": SAMPLING},
            "reward": {"name": "custom", "function": f"{folder / 'reward.py'}:reward"},
            "data": {
                "train": {"path": str(folder / "train.jsonl"), "columns": {"problem": "problem", "answer": "answer"}},
                "max_prompt_tokens": 64,
                "prompt_suffix": "",
            },
            "optimizer": {"lr": 1e-4},
            "logging": {"tensorboard": False},
        }
        path = folder / f"{_word(name)}.yaml"
        path.write_text(yaml.safe_dump(config | dict(changes), sort_keys=False), encoding="utf-8")
        return path

    def _command(self, name: str, ranks: int, arguments: Sequence[str]) -> str:
        program = [sys.executable, "-m", "pacs_megatron", *arguments]
        if "SLURM_JOB_ID" in os.environ:
            command = ["srun", f"--ntasks={ranks}", "--kill-on-bad-exit=1", "--overlap", *_in_tasks(program)]
        elif ranks == 1 or arguments[0] == "train":
            command = [*program, f"run.nproc={ranks}"]
        else:
            agent = [
                "pacs_megatron.launch.agent",
                "--standalone",
                "--local-addr=127.0.0.1",
                f"--nproc-per-node={ranks}",
            ]
            command = [sys.executable, "-m", *agent, "-m", "pacs_megatron", *arguments]
        done = run_program(command)
        (self._folder / f"{_word(name)}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            tail = " ".join((done.stderr or done.stdout).split())[-300:]
            raise PartFailedError(f"exit code {done.returncode}: {tail}")
        return done.stdout

    def _row(self, name: str) -> dict[str, float]:
        path = self._folder / "runs" / _word(name) / "metrics.jsonl"
        row: dict[str, float] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return row


class PartFailedError(Exception):
    """A part of the self-test failed."""


def _in_tasks(program: Sequence[str]) -> list[str]:
    """The site's srun arguments and interpreter, possibly in a container (slurm/clusters/example.env), before the program."""
    python = os.environ.get("PACS_PYTHON")
    interpreter = shlex.split(python) if python is not None else [program[0]]
    return [*shlex.split(os.environ.get("PACS_SRUN_ARGS", "")), *interpreter, *program[1:]]


def _word(name: str) -> str:
    return name.replace(" ", "_")


def make_model(folder: Path) -> None:
    """A random Qwen3 of 4 layers with grouped queries, and a byte-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").is_file():
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")  # noqa: S106
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=257,
        pad_token_id=256,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def certificate(outcomes: Sequence[Outcome], gpus: int) -> dict[str, object]:
    """The results with versions, hardware and time."""
    gpu = "none"
    if gpus:
        import torch

        gpu = f"{gpus} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    packages = ("torch", "megatron-core", "transformer-engine", "transformers", "sglang")
    return {
        "pacs_megatron": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "gpu": gpu,
        "versions": {name: installed(name) for name in packages},
        "passed": not any(outcome.result == "FAIL" for outcome in outcomes),
        "parts": [asdict(outcome) for outcome in outcomes],
    }


def make_folder(folder: Path) -> None:
    """Creates or empties the folder. Raises ConfigError if it contains files of anything but a self-test."""
    marker = folder / MARKER
    if folder.exists() and not marker.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty and not of a self-test; name a new or empty folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    marker.touch()


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if nothing failed."""
    parser = OneLineParser(prog="python -m pacs_megatron.launch.selftest")
    parser.add_argument(
        "folder", type=Path, help="on a file system that all nodes share; emptied if it is of an earlier self-test"
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs per node")
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang")
    args = parser.parse_args(arguments)
    return run_command(lambda: _run(args.folder.absolute(), args.ranks, args.gpus, args.sglang_python))


def _run(folder: Path, ranks: int, gpus: int, sglang_python: str | None) -> int:
    make_folder(folder)
    test = SelfTest(folder, ranks, gpus, sglang_python)
    passed = test.run()
    text = json.dumps(certificate(test.outcomes, gpus), indent=2)
    (folder / "certificate.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return ExitCode.OK if passed else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
