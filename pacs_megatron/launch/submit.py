"""`submit`: submit a run or a sweep to Slurm as a NeMo-Run experiment, one job or a chain per run.

The job does the same as slurm/train.sbatch: it opens an attempt, srun starts each rank (or a torchrun on each node), the
signal before the time limit reaches the ranks, and the end of the script decides on a requeue. NeMo-Run writes and
submits the batch script. Its retries are off, because it also retries an invalid configuration.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pacs_megatron.errors import ConfigError
from pacs_megatron.launch import nemo
from pacs_megatron.launch.job import job_states, known_jobs, note_jobs
from pacs_megatron.launch.request import Job, Request, expand
from pacs_megatron.launch.train import check_files_are_here
from pacs_megatron.plan.constants import GIB
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
        with _alone(home):
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
    home = (Path(variable) if variable else Path(jobs[0].loaded.config.run.dir) / EXPERIMENTS).resolve()
    for job in jobs:
        nemo.check_folder(home / job.name, "NEMORUN_HOME and run.name" if variable else "run.dir and run.name")
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
def _alone(home: Path) -> Iterator[None]:
    """No other `submit` with this folder looks for runs in the queue before this one is done."""
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home, os.O_RDONLY)
    try:
        with suppress(OSError), report_wait(f"for another `submit` with {home}"):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """Warnings of `plan`. They do not stop a submission, because some of its constants are assumed."""
    for job in jobs:
        if find_spec(job.loaded.config.model.path) is None:
            continue
        plan = make_plan(job.loaded)
        if not plan.fits:
            share = plan.peak.total / (plan.gpu.memory_gib * GIB) if plan.gpu else 0.0
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
