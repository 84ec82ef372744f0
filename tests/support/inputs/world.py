"""The user's files before the mistake: a model, data, a run; on request checkpoints and results.

Each state is made once in a test session. A case gets a copy, always at the same path, because
configurations and checkpoints contain paths.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pacs_megatron.launch.verbs import VERBS, function_of
from tests.support.inputs.process import ROOT, run
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

_LATE = ("datasets", "pandas", "pyarrow.parquet", "transformers.models.qwen2.tokenization_qwen2")
"""Modules that verbs import when they need them."""
_EVALUATION = """\
include: [tiny.yaml]
evaluation:
  benchmarks:
  - path: {w}/train.jsonl
    columns: {problem: problem, answer: answer}
  sampling: {max_response_tokens: 4}
"""


@dataclass(frozen=True)
class World:
    """The folder of one case."""

    folder: Path
    server: str = ""
    """address of the server of this case"""

    @property
    def model(self) -> Path:
        """A tiny model in Hugging Face format."""
        return self.folder / "model"

    @property
    def checkpoint(self) -> Path:
        """The model as a Megatron checkpoint."""
        return self.folder / "checkpoint"

    @property
    def run(self) -> Path:
        """The configuration of a run that would start."""
        return self.folder / "tiny.yaml"

    def place(self, text: str) -> str:
        """`text` with {w}orld, {m}odel, {c}heckpoint, {r}un file, {s}erver and others."""
        places = {
            "{w}": self.folder,
            "{m}": self.model,
            "{c}": self.checkpoint,
            "{r}": self.run,
            "{s}": self.server,
            "{address}": self.server.removeprefix("http:"),
            "{port}": self.server.rpartition(":")[2],
            "{path}": os.environ["PATH"],
            "{root}": ROOT,
        }
        for name, value in places.items():
            text = text.replace(name, str(value))
        return text


def _make(world: World, *command: str) -> None:
    outcome = run([world.place(word) for word in command], world.folder, {})
    assert outcome.code == 0, outcome.text


def _run(world: World) -> None:
    """Model, data, reward function and configuration, without a conversion."""
    import torch

    torch.set_num_threads(1)  # a fork has no OpenMP threads
    for place in VERBS.values():
        function_of(place)  # a fork has the imports
    for name in _LATE:
        importlib.import_module(name)
    make_tiny_qwen3(world.model)
    write_tiny_run(world.folder, world.model).rename(world.run)
    evaluation = world.place(_EVALUATION)
    (world.folder / "eval.yaml").write_text(evaluation)
    limits = evaluation.replace("  - path", "  - limit: 4\n    path")
    (world.folder / "small.yaml").write_text(limits + "  samples_per_prompt: 1\n")


def _converted(world: World) -> None:
    _make(world, "convert", "to-megatron", "--hf", "{m}", "--out", "{c}")


def _trained(world: World) -> None:
    _make(world, "train", "{r}", "parallel.tp=1")


def _three(world: World) -> None:
    """`other` has another seed, `ahead` has samples of a later step in its newest checkpoint."""
    train = ("train", "{r}", "parallel.tp=1")
    _make(world, *train, "run.name=other", "run.seed=9", "batch.updates_per_step=1")
    _make(world, *train, "run.name=ahead", "rollout.max_staleness=1")
    shutil.rmtree(world.folder / "runs/ahead/checkpoints/step_000002")


def _judged(world: World) -> None:
    """The samples of an evaluation are in the folder `e`."""
    _make(world, "eval", "{w}/small.yaml", "--out", "{w}/e")


_STATES: dict[str, tuple[str | None, Callable[[World], None]]] = {
    "a run": (None, _run),
    "a conversion": ("a run", _converted),
    "a trained run": ("a conversion", _trained),
    "three trained runs": ("a trained run", _three),
    "an evaluation": ("a conversion", _judged),
}
"""Every state: the state it continues and what it adds."""


class Prepared:
    """The states that cases of this session start from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restore(self, state: str) -> World:
        """A fresh copy of `state`, which replaces the world of the case before."""
        kept = self._folder / state.replace(" ", "_")
        if not kept.exists():
            self._make_state(state, kept)
        return self._copy(kept)

    def _copy(self, kept: Path) -> World:
        world = World(self._folder / "world")
        shutil.rmtree(world.folder, ignore_errors=True)
        shutil.copytree(kept, world.folder, symlinks=True)
        return world

    def _make_state(self, state: str, kept: Path) -> None:
        base, add = _STATES[state]
        if base is None:
            world = World(self._folder / "world")
            shutil.rmtree(world.folder, ignore_errors=True)
            world.folder.mkdir(parents=True)
        else:
            world = self.restore(base)
        add(world)
        shutil.copytree(world.folder, kept, symlinks=True)
