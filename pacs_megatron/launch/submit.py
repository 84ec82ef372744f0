"""`submit`: submits a run or a sweep to Slurm as a NeMo-Run experiment, one job or a chain per run.

NeMo-Run writes and submits the batch scripts, and remembers the experiments. Each batch script sets
up the site and becomes the script of slurm/ that a user submits by hand. NeMo-Run's retries are
off, because it also retries an invalid configuration.
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
from pacs_megatron.launch.batch_script import Submission, SubmittedRun
from pacs_megatron.launch.job import job_states, known_jobs, note_jobs
from pacs_megatron.launch.train import check_files_are_here, check_model_and_layout
from pacs_megatron.launch.verbs import FIT_ON_GPU, function_of
from pacs_megatron.runtime.run_folder import check_run_folder, run_folder
from pacs_megatron.runtime.waiting import report_wait

EXPERIMENTS = ".nemo_run"
MAX_RUNS = 256


def run_submit(*, config_path: Path, cluster: Path, dry_run: bool, **options: Any) -> Iterator[str]:
    """Same as `submit`, for the command line."""
    submission = Submission(config=config_path, cluster=load_cluster(cluster), **options)
    return submit(submission, dry_run=dry_run)


def submit(submission: Submission, *, dry_run: bool) -> Iterator[str]:
    """Submits the runs, or shows what would be submitted.

    A dry run writes nothing but a temporary folder, which it removes.

    Yields:
        Lines to print: job ids, or for a dry run batch scripts and resolved configurations.

    Raises:
        ConfigError: a run is not valid or does not fit (then nothing is submitted), or sbatch
            rejects a job.
    """
    runs = expand(submission)
    home = _home(runs)
    if dry_run:
        yield from _check_fit(runs, force=submission.force)
        yield from _dry_run(runs, submission, home)
        return

    if shutil.which("sbatch") is None:
        raise ConfigError(
            "`sbatch` is not on PATH; submit from the cluster's login node, or use --dry-run"
        )
    for run in runs:
        check_run_folder(run_folder(run.loaded))
        # A container may have other folders.
        if submission.cluster.container is None:
            check_files_are_here(run.loaded)
    with _locked_folders(runs):
        _check_not_queued(runs)
        yield from _check_fit(runs, force=submission.force)
        yield from _submit(nemo.load(home), runs, submission)


def _dry_run(runs: Sequence[SubmittedRun], submission: Submission, home: Path) -> Iterator[str]:
    """Yields the batch scripts, written to a temporary folder in place of `home`."""
    with TemporaryDirectory(prefix="pacs-submit-") as folder:
        nemo.check_folder(Path(folder), "TMPDIR")
        nemo_run = nemo.load(Path(folder))
        for run in runs:
            with nemo_run.Experiment(run.name) as experiment:
                nemo.add_tasks(nemo_run, experiment, run, submission)
                yield from nemo.dry_run(experiment, run, Path(folder), home)


def _home(runs: Sequence[SubmittedRun]) -> Path:
    """NeMo-Run's folder: NEMORUN_HOME, or in run.dir."""
    variable = os.environ.get("NEMORUN_HOME")
    if variable:
        key = "NEMORUN_HOME and run.name"
        home = Path(variable).resolve()
    else:
        key = "run.dir and run.name"
        home = (Path(runs[0].loaded.config.run.dir) / EXPERIMENTS).resolve()
    for run in runs:
        nemo.check_folder(home / run.name, key)
    return home


def _submit(nemo_run: Any, runs: Sequence[SubmittedRun], submission: Submission) -> Iterator[str]:
    """Submits run after run and records the ids; yields a line for each."""
    submitted: list[str] = []
    for run in runs:
        with nemo_run.Experiment(run.name) as experiment:
            tasks = nemo.add_tasks(nemo_run, experiment, run, submission)
            ids = nemo.launch(experiment, submitted)
        jobs = [(label, ids[task]) for label, task in tasks.items()]
        note_jobs(run_folder(run.loaded), jobs)
        submitted.append(run.name)
        text = ", ".join(f"{label}={job_id}" for label, job_id in jobs)
        yield f"{run.name}: submitted {text}; pacs-megatron status {run_folder(run.loaded)}"


@contextmanager
def _locked_folders(runs: Sequence[SubmittedRun]) -> Iterator[None]:
    """Inside the block no other `submit` of this host submits to the parent folders of the runs."""
    with ExitStack() as stack:
        folders = {Path(run.loaded.config.run.dir).resolve() for run in runs}
        # Sorted, so that two `submit` never wait for each other.
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            # OSError: a disk without locks.
            with suppress(OSError), report_wait(f"for another `submit` of runs in {folder}"):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _check_fit(runs: Sequence[SubmittedRun], *, force: bool) -> list[str]:
    """Warnings about runs that may not fit on a GPU, by `plan`.

    Raises:
        ConfigError: a run does not fit, and `force` is not set.
    """
    fit_on_gpu = function_of(FIT_ON_GPU)
    warnings = []
    for run in runs:
        may_fit, text = fit_on_gpu(run.loaded)
        fix = "`pacs-megatron plan` prints what to change"
        if not may_fit and not force:
            raise ConfigError(f"{run.name} {text}; {fix}, or pass --force")
        if text:
            warnings.append(f"# warning: {run.name} {text}; {fix}")
    return warnings


def _check_not_queued(runs: Sequence[SubmittedRun]) -> None:
    """Raises ConfigError if a job of the same run is in the queue.

    Both would write to one folder.
    """
    for run in runs:
        run_dir = run_folder(run.loaded)
        states = job_states(list(known_jobs(run_dir)))
        if states:
            job_id, state = next(iter(states.items()))
            fix = f"run `pacs-megatron cancel {run_dir}` first, or choose another run.name"
            raise ConfigError(f"{run_dir} has job {job_id} in the queue ({state}); {fix}")


def expand(submission: Submission) -> list[SubmittedRun]:
    """All runs of a submission, loaded and checked.

    Raises:
        ConfigError: a run is not valid; nothing is submitted.
    """
    axes = [_axis(text) for text in submission.sweep]
    _check_axes(submission)
    num_runs = submission.seeds * math.prod(len(axis) for axis in axes)
    if num_runs > MAX_RUNS:
        limit = f"one request submits at most {MAX_RUNS}"
        raise ConfigError(
            f"--sweep and --seeds give {num_runs} runs, but {limit}; use fewer values"
        )
    if submission.convert and num_runs > 1:
        raise ConfigError(
            "--convert is for one run, not for --sweep or --seeds; convert the model once by "
            "`pacs-megatron convert to-megatron`, and set model.path to the result"
        )

    base = load_config(submission.config, submission.overrides).config.run
    if submission.seeds > 1:
        axes.append([f"run.seed={base.seed + index}" for index in range(submission.seeds)])
    runs: dict[str, SubmittedRun] = {}
    for choice in itertools.product(*axes):
        run = _load_run(submission, base.name, choice)
        if run.name in runs:
            raise ConfigError(
                f"two runs of this request have the name {run.name}; sweep over values with "
                "different names"
            )
        runs[run.name] = run
    return list(runs.values())


def _load_run(submission: Submission, base_name: str, choice: tuple[str, ...]) -> SubmittedRun:
    """The run with these overrides of the sweep, checked.

    Args:
        submission: the arguments.
        base_name: run.name without the sweep.
        choice: `key=value` of each axis; empty without a sweep.
    """
    overrides = (*submission.overrides, *choice)
    if choice:
        name = "-".join([base_name, *map(_short, choice)])
        overrides = (*overrides, f"run.name={name}")
    loaded = load_config(submission.config, overrides)
    check_model_and_layout(loaded, ranks_to_start(loaded.config))
    if submission.evaluate and not loaded.config.evaluation.benchmarks:
        raise ConfigError("--evaluate: evaluation.benchmarks is empty; add a benchmark")
    return SubmittedRun(overrides, loaded)


def _check_axes(submission: Submission) -> None:
    """Raises ConfigError if a key is swept twice, or names the runs."""
    keys = [text.partition("=")[0] for text in submission.sweep]
    if submission.seeds > 1:
        keys.append("run.seed")
    for key in keys:
        if key == "run.name":
            raise ConfigError(
                "--sweep run.name: runs are named by their values; sweep over another key"
            )
        if keys.count(key) > 1:
            options = "two --sweep set"
            if key == "run.seed" and submission.seeds > 1:
                options = "--sweep and --seeds both set"
            raise ConfigError(f"{options} {key}; give all its values in one --sweep {key}=a,b,c")


def _axis(text: str) -> list[str]:
    """`key=value` for each value.

    A comma inside brackets or quotes belongs to its value: `[a,b],[c]` are two.
    """
    key, equals, text_of_values = text.partition("=")
    values = _split(text_of_values)
    has_values = bool(values) and all(value.strip() for value in values)
    if not equals or not key or not has_values:
        raise ConfigError(f"--sweep {text!r}: expected key=a,b,c such as objective.beta=0.5,1,2")
    return [f"{key}={value}" for value in values]


def _split(text: str) -> list[str]:
    """The items of a YAML list without brackets, as written; empty if it is not one."""
    nodes: list[yaml.Node] = []
    with suppress(yaml.YAMLError, RecursionError, ValueError):
        whole = yaml.compose(f"[{text},]", Loader=yaml.BaseLoader)
        # A bracket in the text may close the list before its end.
        if whole is not None and whole.end_mark.index == len(text) + 3:
            nodes = whole.value
    # The marks count the bracket that was added in front.
    return [text[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes]


def _short(override: str) -> str:
    """The part of a run's name for one override: last key and value.

    Characters that a path cannot have become `_`.
    """
    key, _, value = override.partition("=")
    last_key = key.rsplit(".", 1)[-1]
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{last_key}{value}")
