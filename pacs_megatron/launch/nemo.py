"""Uses NeMo-Run to create, print and submit the tasks of an experiment."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pacs_megatron.config.cluster import ClusterConfig
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.errors import ConfigError, shown
from pacs_megatron.launch.batch_script import (
    Submission,
    SubmittedRun,
    job_lines,
    train_arguments,
)
from pacs_megatron.runtime.run_folder import run_folder
from pacs_megatron.runtime.waiting import report_wait, run_program

RESERVED = "/nemo_run"
"""Text that NeMo-Run replaces in all scripts by the job's folder."""
_NEVER_REACHED = "exit 1"
"""The command of NeMo-Run's own srun: the batch script becomes a script of slurm/ before it."""
_SAFE_FOLDER = re.compile(r"[\w/.+=@-]+", re.ASCII)


def load(home: Path) -> Any:
    """Imports NeMo-Run with `home` as its folder and without its console output.

    Raises:
        ConfigError: NeMo-Run is not installed.
    """
    os.environ.setdefault("NEMORUN_SKIP_CONFIRM_DRYRUN", "1")
    try:
        with report_wait("for NeMo-Run to load"):
            import nemo_run
            from nemo_run.config import set_nemorun_home
            from nemo_run.core.frontend.console.api import CONSOLE
    except ImportError as error:
        raise ConfigError(
            f"cannot import NeMo-Run ({error}); pip install nemo-run==0.11.1 leptonai==0.27.0, or: "
            "sbatch slurm/train.sbatch CONFIG"
        ) from None
    CONSOLE.quiet = True
    set_nemorun_home(str(home))
    return nemo_run


def check_folder(folder: Path, key: str) -> None:
    """Raises ConfigError for a folder that NeMo-Run's commands and scripts cannot contain.

    They have it without quotes.
    """
    if not _SAFE_FOLDER.fullmatch(str(folder)) or RESERVED in str(folder):
        raise ConfigError(
            f"{key}: NeMo-Run writes to {str(folder)!r} without quotes; use a folder of letters, "
            f"digits and / . _ - + = @, without {RESERVED}, or submit by slurm/train.sbatch"
        )


def dry_run(experiment: Any, run: SubmittedRun, home: Path, shown_home: Path) -> Iterator[str]:
    """Yields the batch scripts that a submission would write.

    Args:
        experiment: NeMo-Run's experiment with the tasks of the run.
        run: the run.
        home: temporary folder that NeMo-Run writes to.
        shown_home: folder that a submission would write to; replaces `home` in the scripts.
    """
    experiment.dryrun(log=False, delete_exp_dir=False)
    yield f"# {run.name}: resolved configuration\n{run.loaded.to_yaml()}"
    for task in experiment.jobs:
        if task.dependencies:
            yield (
                f"# {run.name}: {task.id} starts after {', '.join(task.dependencies)} "
                "(sbatch --dependency=afterok)"
            )
    for script in sorted(Path(experiment._exp_dir).rglob("*_sbatch.sh")):
        text = script.read_text(encoding="utf-8").replace(str(home), str(shown_home))
        yield f"# {run.name}: {script.name}\n{text}"


def launch(experiment: Any, submitted: Sequence[str]) -> dict[str, str]:
    """Submits the tasks of an experiment; returns the Slurm id of each.

    If sbatch rejects one, cancels the others of the experiment.

    Args:
        experiment: NeMo-Run's experiment.
        submitted: names of the runs that were submitted before, for the error.

    Raises:
        ConfigError: sbatch rejects a task, or prints no id.
    """
    from invoke.exceptions import UnexpectedExit
    from torchx.specs.api import MalformedAppHandleException

    try:
        experiment.run(detach=True, tail_logs=False)
    except MalformedAppHandleException:
        raise ConfigError("sbatch printed no id of a job; check sbatch and `squeue --me`") from None
    except UnexpectedExit as error:
        _cancel_started(experiment)
        shutil.rmtree(experiment._exp_dir, ignore_errors=True)
        lines = error.result.stderr.strip().splitlines()
        reason = "; ".join(line.removeprefix("sbatch: error: ") for line in lines)
        if not reason:
            reason = f"exit code {error.result.exited}"
        outcome = ", nothing was submitted"
        if submitted:
            outcome = f"; submitted before it: {', '.join(submitted)}"
        raise ConfigError(
            f"sbatch rejected the job: {reason}; correct the cluster's file (--cluster) or "
            f"`resources`{outcome}"
        ) from None
    return {str(task.id): _job_id(task) for task in experiment.jobs}


def _cancel_started(experiment: Any) -> None:
    started = [task for task in experiment.jobs if task.handle]
    if started:
        run_program(["scancel", *map(_job_id, started)])


def _job_id(task: Any) -> str:
    job_id = str(task.handle).rsplit("/", 1)[-1]
    if not re.fullmatch(r"[0-9]+(;[\w.-]+)?", job_id):
        raise ConfigError(
            f"sbatch printed {shown(job_id)}, expected the id of a job; check sbatch and "
            "`squeue --me`"
        )
    return job_id


def add_tasks(
    nemo_run: Any, experiment: Any, run: SubmittedRun, submission: Submission
) -> dict[str, str]:
    """Adds the jobs of a run, each dependent on the previous one; returns label -> task."""
    resources = run.loaded.config.resources
    tasks: dict[str, str] = {}

    def add(label: str, arguments: Sequence[str], nodes: int = 1, first: str = "") -> None:
        lines = first + job_lines(submission.cluster, arguments)
        executor = _executor(nemo_run, run, submission.cluster, nodes=nodes, lines=lines)
        previous = list(tasks.values())[-1:]
        script = nemo_run.Script(inline=_NEVER_REACHED)
        task = experiment.add(script, executor=executor, name=label, dependencies=previous)
        tasks[label] = str(task)

    if submission.convert:
        out = str(run.converted)
        words = ["convert", "to-megatron", "--hf", run.loaded.config.model.path, "--out", out]
        # The conversion is atomic. A resubmitted run reuses it.
        add("convert", words, first=f"[ -e {shlex.quote(out)} ] && exit 0\n")
    if submission.train:
        nodes = resources.nodes + resources.rollout_nodes
        add("train", train_arguments(run, submission), nodes)
    if submission.evaluate:
        model = str(run_folder(run.loaded) / "hf")
        config = str(submission.config.resolve())
        add("eval", ["eval", config, *run.overrides, "--model", model])
    for label, arguments in submission.later:
        add(label, arguments)
    return tasks


def _executor(
    nemo_run: Any, run: SubmittedRun, cluster: ClusterConfig, *, nodes: int, lines: str
) -> Any:
    """NeMo-Run's Slurm options of a job on `nodes` nodes, whose script begins with `lines`."""
    from pacs_megatron.launch.tunnel import BoundedTunnel

    for line in lines.splitlines():
        if RESERVED in line:
            raise ConfigError(
                f"NeMo-Run replaces {RESERVED} in scripts, got {line!r}; rename that folder"
            )
    resources = run.loaded.config.resources
    ranks_per_node = ranks_to_start(run.loaded.config) // resources.nodes
    # `requeue` keeps the job's id.
    return nemo_run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        job_name_prefix="pacs.",
        nodes=nodes,
        ntasks_per_node=1,
        cpus_per_task=(cluster.cpus_per_task or 1) * ranks_per_node,
        mem=cluster.mem,
        exclusive=True if cluster.exclusive else None,
        time=resources.time_limit,
        signal=f"B:USR1@{resources.signal_lead_s}",
        # Without this, a job whose dependency failed stays pending.
        additional_parameters={"requeue": True, "kill_on_invalid_dep": "yes"},
        retries=0,
        setup_lines=lines,
        poll_estimated_start_time=False,
        packager=nemo_run.Packager(),
        tunnel=BoundedTunnel(job_dir=""),
        **_gpu_request(cluster, resources.gpus_per_node),
    )


def _gpu_request(cluster: ClusterConfig, gpus: int) -> dict[str, Any]:
    """Slurm's option for GPUs, in the form of the cluster."""
    request: dict[str, Any] = {"gpus_per_node": None, "gres": None}
    if gpus and cluster.gpu_request == "gpus-per-node":
        request["gpus_per_node"] = gpus
    if gpus and cluster.gpu_request == "gres":
        request["gres"] = f"gpu:{gpus}"
    return request
