"""`submit`: submit a run or a sweep to Slurm as a NeMo-Run experiment, one job or a chain per run.

The job does the same as slurm/train.sbatch: it opens an attempt, srun starts each rank (or a torchrun on each node), the
signal before the time limit reaches the ranks, and the end of the script decides on a requeue. NeMo-Run writes and
submits the batch script. Its retries are off, because it also retries an invalid configuration.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch import nemo
from pacs_megatron.launch.job import job_states, known_jobs, note_jobs
from pacs_megatron.launch.request import Job, Request, expand
from pacs_megatron.launch.train import check_files_are_here
from pacs_megatron.plan import constants
from pacs_megatron.plan.known_models import find_spec
from pacs_megatron.plan.plan import make_plan
from pacs_megatron.runtime.run_folder import check_run_folder, run_folder
from pacs_megatron.runtime.waiting import report_wait

EXPERIMENTS = ".nemo_run"


def submit(request: Request, *, dry_run: bool) -> Iterator[str]:
    """Submits, and yields lines to print: the job ids, or for a dry run each batch script and resolved configuration.

    A dry run writes nothing but a temporary folder, which it removes. Raises ConfigError before anything is submitted.
    """
    jobs = expand(request)
    home = _home(jobs)
    if not dry_run:
        if shutil.which("sbatch") is None:
            raise ConfigError("`sbatch` is not on PATH; submit from the cluster's login node, or use --dry-run")
        for job in jobs:
            check_run_folder(run_folder(job.loaded))
            if request.cluster.container is None:  # a container may have other folders
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
        for group, title in _experiments(jobs, request):
            with run.Experiment(title) as experiment:
                nemo.add_tasks(run, experiment, group, request)
                yield from nemo.dry_run(experiment, group, Path(folder), home)


def _home(jobs: Sequence[Job]) -> Path:
    """NeMo-Run's folder: NEMORUN_HOME, or in run.dir."""
    variable = os.environ.get("NEMORUN_HOME")
    home = Path(variable) if variable else Path(jobs[0].loaded.config.run.dir) / EXPERIMENTS
    for job in jobs:
        nemo.check_folder(
            home.resolve() / job.name, "NEMORUN_HOME and run.name" if variable else "run.dir and run.name"
        )
    return home.resolve()


def _experiments(jobs: Sequence[Job], request: Request) -> Iterator[tuple[list[Job], str]]:
    """(jobs, title) of each experiment. Jobs can depend on each other within one only, as runs with one conversion do."""
    if request.convert and len(jobs) > 1:
        yield list(jobs), load_config(request.config, request.overrides).config.run.name
    else:
        yield from (([job], job.name) for job in jobs)


def _submit(run: Any, jobs: Sequence[Job], request: Request) -> Iterator[str]:
    submitted: list[str] = []
    for group, title in _experiments(jobs, request):
        with run.Experiment(title) as experiment:
            tasks = nemo.add_tasks(run, experiment, group, request)
            ids = nemo.launch(experiment, submitted)
        for job in group:
            mine = [(label, ids[task]) for label, task, owner in tasks if owner == job.name]
            note_jobs(run_folder(job.loaded), mine)
            submitted.append(job.name)
            text = ", ".join(f"{label}={job_id}" for label, job_id in mine)
            yield f"{job.name}: submitted {text}; pacs-megatron status {run_folder(job.loaded)}"
        for label, task, owner in tasks:
            if owner is None:
                yield f"before all of them: {label}={ids[task]}"


@contextmanager
def _alone(jobs: Sequence[Job]) -> Iterator[None]:
    """No other `submit` of this host looks into the queue for runs in these folders before this one is done."""
    with ExitStack() as stack:
        for folder in sorted({Path(job.loaded.config.run.dir).resolve() for job in jobs}):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with suppress(OSError), report_wait(f"for another `submit` of runs in {folder}"):  # a disk without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """Warnings of `plan`. They do not stop a submission, because some of its constants are assumed."""
    for job in jobs:
        if find_spec(job.loaded.config.model.path) is not None and not (plan := make_plan(job.loaded)).fits:
            share = plan.peak.total / (constants.GPUS[plan.gpu.name].memory_gib * constants.GIB) if plan.gpu else 0.0
            yield (
                f"# warning: {job.name} does not fit on a GPU according to `pacs-megatron plan` ({share:.0%} at the peak); "
                "run it for a fix"
            )


def _refuse_what_is_queued(jobs: Sequence[Job]) -> None:
    """Raises ConfigError if a job of the same run is in the queue: both would write to one folder."""
    for job in jobs:
        run_dir = run_folder(job.loaded)
        states = job_states(list(known_jobs(run_dir)))
        if states:
            job_id, state = next(iter(states.items()))
            raise ConfigError(
                f"{run_dir} has job {job_id} in the queue ({state}); run `pacs-megatron cancel {run_dir}` first, or choose "
                "another run.name"
            )
