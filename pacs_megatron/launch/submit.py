"""`submit`: submits a run or a sweep to Slurm as a NeMo-Run experiment, one job or a chain per run.

The job works as slurm/train.sbatch. It opens an attempt. srun starts each rank, or a torchrun on
each node. The signal before the time limit reaches the ranks. The end of the script decides on a
requeue. NeMo-Run writes and submits the batch script. Its retries are off, because it also retries
an invalid configuration.
"""

import fcntl
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch import nemo
from pacs_megatron.launch.batch_script import Job, Request
from pacs_megatron.launch.job import job_states, known_jobs, note_jobs
from pacs_megatron.launch.train import check_files_are_here, check_model_and_layout
from pacs_megatron.launch.verbs import FITS_ON_GPU, function_of
from pacs_megatron.runtime.run_folder import check_run_folder, run_folder
from pacs_megatron.runtime.waiting import report_wait

EXPERIMENTS = ".nemo_run"
MAX_RUNS = 256


def run_submit(*, config_path: Path, cluster: Path, dry_run: bool, **options: Any) -> Iterator[str]:
    """`submit` for the command line; see there."""
    request = Request(config=config_path, cluster=load_cluster(cluster), **options)
    return submit(request, dry_run=dry_run)


def submit(request: Request, *, dry_run: bool) -> Iterator[str]:
    """Submits the runs; yields lines to print: job ids, or for a dry run batch scripts and resolved
    configurations.

    A dry run writes nothing but a temporary folder, which it removes. Raises ConfigError before
    anything is submitted.
    """
    jobs = expand(request)
    home = _home(jobs)
    if not dry_run:
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "`sbatch` is not on PATH; submit from the cluster's login node, or use --dry-run"
            )
        for job in jobs:
            check_run_folder(run_folder(job.loaded))
            if (
                request.cluster.container is None
            ):  # not with a container, which may have other folders
                check_files_are_here(job.loaded)
        with _alone(jobs):
            _refuse_what_is_queued(jobs)
            yield from _warnings(jobs)
            yield from _submit(nemo.load(home), jobs, request)
        return
    yield from _warnings(jobs)
    with TemporaryDirectory(prefix="pacs-submit-") as folder:
        nemo.check_folder(Path(folder), "TMPDIR")
        run = nemo.load(Path(folder))
        for job in jobs:
            with run.Experiment(job.name) as experiment:
                nemo.add_tasks(run, experiment, job, request)
                yield from nemo.dry_run(experiment, job, Path(folder), home)


def _home(jobs: Sequence[Job]) -> Path:
    """NeMo-Run's folder: NEMORUN_HOME, or in run.dir."""
    variable = os.environ.get("NEMORUN_HOME")
    home = (
        Path(variable) if variable else Path(jobs[0].loaded.config.run.dir) / EXPERIMENTS
    ).resolve()
    for job in jobs:
        nemo.check_folder(
            home / job.name, "NEMORUN_HOME and run.name" if variable else "run.dir and run.name"
        )
    return home


def _submit(run: Any, jobs: Sequence[Job], request: Request) -> Iterator[str]:
    submitted: list[str] = []
    for job in jobs:
        with run.Experiment(job.name) as experiment:
            tasks = nemo.add_tasks(run, experiment, job, request)
            ids = nemo.launch(experiment, submitted)
        note_jobs(run_folder(job.loaded), [(label, ids[task]) for label, task in tasks.items()])
        submitted.append(job.name)
        text = ", ".join(f"{label}={ids[task]}" for label, task in tasks.items())
        yield f"{job.name}: submitted {text}; pacs-megatron status {run_folder(job.loaded)}"


@contextmanager
def _alone(jobs: Sequence[Job]) -> Iterator[None]:
    """Inside the block no other `submit` of this host checks the queue for runs in these folders."""
    with ExitStack() as stack:
        for folder in sorted({Path(job.loaded.config.run.dir).resolve() for job in jobs}):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with (
                suppress(OSError),
                report_wait(f"for another `submit` of runs in {folder}"),
            ):  # a disk without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """Warnings of `plan`. They do not stop a submission, because some of its constants are assumed."""
    fits_on_gpu = function_of(FITS_ON_GPU)
    for job in jobs:
        if not fits_on_gpu(job.loaded):
            yield f"# warning: {job.name} does not fit on a GPU according to `pacs-megatron plan`; run it for a fix"


def _refuse_what_is_queued(jobs: Sequence[Job]) -> None:
    """Raises ConfigError if a job of the same run is in the queue: both would write to one folder."""
    for job in jobs:
        run_dir = run_folder(job.loaded)
        states = job_states(list(known_jobs(run_dir)))
        if states:
            job_id, state = next(iter(states.items()))
            fix = f"run `pacs-megatron cancel {run_dir}` first, or choose another run.name"
            raise ConfigError(f"{run_dir} has job {job_id} in the queue ({state}); {fix}")


# ----------------------------------------------------------------------------------------------------------------
# runs
def expand(request: Request) -> list[Job]:
    """All runs of a request, loaded and checked. Raises ConfigError before anything is submitted."""
    axes = [_axis(text) for text in request.sweep]
    _check_axes(request)
    num_runs = math.prod([request.seeds, *map(len, axes)])
    if num_runs > MAX_RUNS:
        limit = f"one request submits at most {MAX_RUNS}"
        raise ConfigError(
            f"--sweep and --seeds give {num_runs} runs, but {limit}; use fewer values"
        )
    if request.convert and num_runs > 1:
        raise ConfigError(
            "--convert is for one run, not for --sweep or --seeds; convert the model once by "
            "`pacs-megatron convert to-megatron`, and set model.path to the result"
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
            raise ConfigError(
                f"two runs of this request have the name {name}; sweep over values with different "
                "names"
            )
        jobs[name] = Job(overrides, loaded)
    return list(jobs.values())


def _check_axes(request: Request) -> None:
    keys = [text.partition("=")[0] for text in request.sweep] + ["run.seed"] * (request.seeds > 1)
    for key in keys:
        if key == "run.name":
            raise ConfigError(
                "--sweep run.name: runs are named by their values; sweep over another key"
            )
        if keys.count(key) > 1:
            options = (
                "--sweep and --seeds both set"
                if key == "run.seed" and request.seeds > 1
                else "two --sweep set"
            )
            raise ConfigError(f"{options} {key}; give all its values in one --sweep {key}=a,b,c")


def _axis(text: str) -> list[str]:
    """`key=value` for each value.

    A comma inside brackets or quotes belongs to its value: `[a,b],[c]` are two.
    """
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
