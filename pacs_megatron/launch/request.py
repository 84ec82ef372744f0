"""The runs of a `submit` request: one, or one per combination of a sweep."""

import itertools
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.cluster import ClusterConfig
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.train import check_model_and_layout
from pacs_megatron.runtime.run_folder import run_folder

MAX_RUNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of `submit`."""

    config: Path
    overrides: tuple[str, ...]
    cluster: ClusterConfig
    sweep: tuple[str, ...] = ()
    """`key=a,b,c` each; each combination is a run."""
    seeds: int = 1
    convert: bool = False
    """Convert the model to a Megatron checkpoint in a job before training."""
    evaluate: bool = False
    """Evaluate the exported model in a job after training."""
    train: bool = True
    later: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(label, arguments of pacs-megatron) of jobs that follow the training, one after the other"""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a request."""

    overrides: tuple[str, ...]
    loaded: LoadedConfig

    @property
    def name(self) -> str:
        return self.loaded.config.run.name

    @property
    def converted(self) -> Path:
        """Checkpoint that the conversion job writes."""
        return (run_folder(self.loaded) / "converted").resolve()


def expand(request: Request) -> list[Job]:
    """All runs of a request, loaded and checked. Raises ConfigError before anything is submitted."""
    axes = [_axis(text) for text in request.sweep]
    _check_axes(request)
    num_runs = math.prod([request.seeds, *map(len, axes)])
    if num_runs > MAX_RUNS:
        raise ConfigError(
            f"--sweep and --seeds give {num_runs} runs, but one request submits at most {MAX_RUNS}; use fewer values"
        )
    if request.convert and num_runs > 1:
        raise ConfigError(
            "--convert is for one run, not for --sweep or --seeds; convert the model once by `pacs-megatron convert "
            "to-megatron`, and set model.path to the result"
        )
    base = load_config(request.config, request.overrides).config
    if request.seeds > 1:
        axes.append([f"run.seed={base.run.seed + index}" for index in range(request.seeds)])
    jobs: dict[str, Job] = {}
    for choice in itertools.product(*axes):
        name = "-".join([base.run.name, *(_short(text) for text in choice)])
        overrides = (*request.overrides, *choice, *([f"run.name={name}"] if choice else []))
        loaded = load_config(request.config, overrides)
        check_model_and_layout(loaded, ranks_to_start(loaded.config))
        if request.evaluate and not loaded.config.evaluation.benchmarks:
            raise ConfigError("--evaluate: evaluation.benchmarks is empty; add a benchmark")
        if name in jobs:
            raise ConfigError(f"two runs of this request have the name {name}; sweep over values with different names")
        jobs[name] = Job(overrides, loaded)
    return list(jobs.values())


def _check_axes(request: Request) -> None:
    keys = [text.partition("=")[0] for text in request.sweep] + ["run.seed"] * (request.seeds > 1)
    for key in keys:
        if key == "run.name":
            raise ConfigError("--sweep run.name: runs are named by their values; sweep over another key")
        if keys.count(key) > 1:
            options = "--sweep and --seeds both set" if key == "run.seed" and request.seeds > 1 else "two --sweep set"
            raise ConfigError(f"{options} {key}; give all its values in one --sweep {key}=a,b,c")


def _axis(text: str) -> list[str]:
    """`key=value` for each value. A comma inside brackets or quotes belongs to its value: `[a,b],[c]` are two."""
    key, equals, values = text.partition("=")
    nodes: list[yaml.Node] = []
    with suppress(yaml.YAMLError, RecursionError, ValueError):
        whole = yaml.compose(f"[{values},]", Loader=yaml.BaseLoader)
        nodes = whole.value if whole is not None and whole.end_mark.index == len(values) + 3 else []
    found = [values[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes]
    if not equals or not key or not found or not all(value.strip() for value in found):
        raise ConfigError(f"--sweep {text!r}: expected key=a,b,c such as objective.beta=0.5,1,2")
    return [f"{key}={value}" for value in found]


def _short(override: str) -> str:
    key, _, value = override.partition("=")
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{key.rsplit('.', 1)[-1]}{value}")
