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
    python_command,
    serve_command,
    setup_lines,
    site_lines,
    train_command,
)
from pacs_megatron.runtime.run_folder import run_folder
from pacs_megatron.runtime.waiting import report_wait, run_program

RESERVED = "/nemo_run"
"""Text that NeMo-Run replaces in all scripts by the job's folder."""
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
    for pattern, role in (("*_sbatch.sh", ""), ("scripts/*.sh", ", run by each task")):
        for script in sorted(Path(experiment._exp_dir).rglob(pattern)):
            text = script.read_text(encoding="utf-8").replace(str(home), str(shown_home))
            yield f"# {run.name}: {script.name}{role}\n{text}"


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
    # A heterogeneous task has `handles`, and its property `handle` raises before the launch.
    started = [
        task
        for task in experiment.jobs
        if getattr(task, "handles", None) or vars(task).get("handle")
    ]
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
    """Adds the tasks of a run, each dependent on the previous one; returns label -> task."""
    python = python_command(submission.cluster)
    program = f"cd {shlex.quote(os.getcwd())} && exec {python} -m pacs_megatron"
    tasks: dict[str, str] = {}

    def add(label: str, script: Any, executor: Any) -> None:
        previous = list(tasks.values())[-1:]
        task = experiment.add(script, executor=executor, name=label, dependencies=previous)
        tasks[label] = str(task)

    def add_verb(label: str, words: Sequence[str], first: str = "") -> None:
        script = _script(nemo_run, f"{first}{program} {shlex.join(words)}")
        executor = _executor(nemo_run, run, submission.cluster, nodes=1, tasks=1)
        add(label, script, executor)

    if submission.convert:
        out = str(run.converted)
        words = ("convert", "to-megatron", "--hf", run.loaded.config.model.path, "--out", out)
        # The conversion is atomic. A resubmitted run reuses it.
        add_verb("convert", words, f"[ -e {shlex.quote(out)} ] && exit 0\n")
    if submission.train:
        add("train", *_trainer(nemo_run, run, submission))
    if submission.evaluate:
        model = str(run_folder(run.loaded) / "hf")
        config = str(submission.config.resolve())
        add_verb("eval", ("eval", config, *run.overrides, "--model", model))
    for label, arguments in submission.later:
        add_verb(label, arguments)
    return tasks


def _trainer(nemo_run: Any, run: SubmittedRun, submission: Submission) -> tuple[Any, Any]:
    """(script, executor) of the trainer.

    With rollout nodes lists of both, for one heterogeneous job.
    """
    cluster = submission.cluster
    resources = run.loaded.config.resources
    ranks_per_node = ranks_to_start(run.loaded.config) // resources.nodes
    tasks = 1 if cluster.launcher == "torchrun" else ranks_per_node
    trainer = _executor(nemo_run, run, cluster, nodes=resources.nodes, tasks=tasks)
    trainer.setup_lines = _checked(setup_lines(run, submission))
    script = _script(nemo_run, train_command(run, submission))
    if not resources.rollout_nodes:
        return script, trainer

    servers = _executor(nemo_run, run, cluster, nodes=resources.rollout_nodes, tasks=1)
    serve_script = _script(nemo_run, serve_command(run, submission))
    trainer.heterogeneous = True
    servers.heterogeneous = True
    return [script, serve_script], [trainer, servers]


def _script(nemo_run: Any, text: str) -> Any:
    return nemo_run.Script(inline=_checked(text))


def _checked(text: str) -> str:
    """The text of a script; raises ConfigError if NeMo-Run would change it."""
    for line in text.splitlines():
        if RESERVED in line:
            raise ConfigError(
                f"NeMo-Run replaces {RESERVED} in scripts, got {line!r}; rename that folder"
            )
    return text


def _executor(
    nemo_run: Any, run: SubmittedRun, cluster: ClusterConfig, *, nodes: int, tasks: int
) -> Any:
    """NeMo-Run's Slurm options of a task on `nodes` nodes with `tasks` processes on each."""
    from pacs_megatron.launch.tunnel import BoundedTunnel

    resources = run.loaded.config.resources
    cpus = None
    if cluster.cpus_per_task is not None:
        # A single task on a node gets the cores of all ranks.
        ranks_per_node = ranks_to_start(run.loaded.config) // resources.nodes
        cpus = cluster.cpus_per_task * ranks_per_node // tasks
    # `requeue` keeps the job's id. Without `B:` the signal goes to the tasks, which are the ranks.
    return nemo_run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        job_name_prefix="pacs.",
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
        mem=cluster.mem,
        exclusive=True if cluster.exclusive else None,
        time=resources.time_limit,
        signal=f"USR1@{resources.signal_lead_s}",
        # Without this, a job whose dependency failed stays pending.
        additional_parameters={"requeue": True, "kill_on_invalid_dep": "yes"},
        retries=0,
        setup_lines=_checked(site_lines(cluster)),
        srun_args=_srun_args(cluster, cpus),
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=5,
        poll_estimated_start_time=False,
        packager=nemo_run.Packager(),
        tunnel=BoundedTunnel(job_dir=""),
        **_gpu_request(cluster, resources.gpus_per_node),
        **_container(cluster),
    )


def _srun_args(cluster: ClusterConfig, cpus: int | None) -> list[str]:
    """Arguments of srun, quoted, because NeMo-Run does not quote them."""
    words = ["--label"]
    if cpus is not None:
        # srun does not inherit the number from sbatch.
        words.append(f"--cpus-per-task={cpus}")
    if cluster.cpu_bind:
        words.append(f"--cpu-bind={cluster.cpu_bind}")
    words += cluster.srun_args
    return [shlex.quote(word) for word in words]


def _gpu_request(cluster: ClusterConfig, gpus: int) -> dict[str, Any]:
    """Slurm's option for GPUs, in the form of the cluster."""
    request: dict[str, Any] = {"gpus_per_node": None, "gres": None}
    if gpus and cluster.gpu_request == "gpus-per-node":
        request["gpus_per_node"] = gpus
    if gpus and cluster.gpu_request == "gres":
        request["gres"] = f"gpu:{gpus}"
    return request


def _container(cluster: ClusterConfig) -> dict[str, Any]:
    """Options of a container that srun starts; other containers are part of the command."""
    container = cluster.container
    if container is None or container.runtime != "pyxis":
        return {"container_image": None, "container_mounts": []}
    return {
        "container_image": shlex.quote(container.image),
        "container_mounts": [shlex.quote(mount) for mount in container.mounts],
    }
