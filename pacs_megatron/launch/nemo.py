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
    Job,
    Request,
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

    Raises ConfigError.
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
    """Raises ConfigError for a folder that NeMo-Run's unquoted commands and scripts cannot contain."""
    if not _SAFE_FOLDER.fullmatch(str(folder)) or RESERVED in str(folder):
        raise ConfigError(
            f"{key}: NeMo-Run writes to {str(folder)!r} without quotes; use a folder of letters, "
            f"digits and / . _ - + = @, without {RESERVED}, or submit by slurm/train.sbatch"
        )


def dry_run(experiment: Any, job: Job, home: Path, shown_home: Path) -> Iterator[str]:
    """Yields the batch scripts that a submission would write.

    They are written below `home`, a temporary folder.
    """
    experiment.dryrun(log=False, delete_exp_dir=False)
    yield f"# {job.name}: resolved configuration\n{job.loaded.to_yaml()}"
    for task in experiment.jobs:
        if task.dependencies:
            yield f"# {job.name}: {task.id} starts after {', '.join(task.dependencies)} (sbatch --dependency=afterok)"
    for pattern, role in (("*_sbatch.sh", ""), ("scripts/*.sh", ", run by each task")):
        for script in sorted(Path(experiment._exp_dir).rglob(pattern)):
            text = script.read_text(encoding="utf-8").replace(str(home), str(shown_home))
            yield f"# {job.name}: {script.name}{role}\n{text}"


def launch(experiment: Any, before: Sequence[str]) -> dict[str, str]:
    """Slurm id of each task.

    If sbatch rejects one, cancels the others of the experiment and raises ConfigError.
    """
    from invoke.exceptions import UnexpectedExit
    from torchx.specs.api import MalformedAppHandleException

    try:
        experiment.run(detach=True, tail_logs=False)
    except MalformedAppHandleException:
        raise ConfigError("sbatch printed no id of a job; check sbatch and `squeue --me`") from None
    except UnexpectedExit as error:
        started = [
            task
            for task in experiment.jobs
            if getattr(task, "handles", None) or vars(task).get("handle")
        ]
        if started:
            run_program(["scancel", *map(_job_id, started)])
        shutil.rmtree(experiment._exp_dir, ignore_errors=True)
        reason = "; ".join(
            line.removeprefix("sbatch: error: ")
            for line in error.result.stderr.strip().splitlines()
        )
        stay = (
            f"; submitted before it: {', '.join(before)}" if before else ", nothing was submitted"
        )
        raise ConfigError(
            f"sbatch rejected the job: {reason or f'exit code {error.result.exited}'}; correct "
            "the cluster's file (--cluster) or "
            f"`resources`{stay}"
        ) from None
    return {str(task.id): _job_id(task) for task in experiment.jobs}


def _job_id(task: Any) -> str:
    found = str(task.handle).rsplit("/", 1)[-1]
    if not re.fullmatch(r"[0-9]+(;[\w.-]+)?", found):
        raise ConfigError(
            f"sbatch printed {shown(found)}, expected the id of a job; check sbatch and `squeue "
            "--me`"
        )
    return found


def add_tasks(run: Any, experiment: Any, job: Job, request: Request) -> dict[str, str]:
    """Adds the tasks of a run, each dependent on the previous one; returns label -> task."""
    python = (
        f"cd {shlex.quote(os.getcwd())} && exec {python_command(request.cluster)} -m pacs_megatron"
    )
    tasks: dict[str, str] = {}

    def add(label: str, script: Any, executor: Any) -> None:
        before = list(tasks.values())[-1:]
        tasks[label] = str(
            experiment.add(script, executor=executor, name=label, dependencies=before)
        )

    def add_verb(label: str, words: Sequence[str], first: str = "") -> None:
        script = _script(run, f"{first}{python} {shlex.join(words)}")
        add(label, script, _executor(run, job, request.cluster, nodes=1, tasks=1))

    if request.convert:
        out = str(job.converted)
        words = ("convert", "to-megatron", "--hf", job.loaded.config.model.path, "--out", out)
        # The conversion is atomic. A resubmitted run reuses it.
        add_verb("convert", words, f"[ -e {shlex.quote(out)} ] && exit 0\n")
    if request.train:
        add("train", *_trainer(run, job, request))
    if request.evaluate:
        model = str(run_folder(job.loaded) / "hf")
        add_verb("eval", ("eval", str(request.config.resolve()), *job.overrides, "--model", model))
    for label, arguments in request.later:
        add_verb(label, arguments)
    return tasks


def _trainer(run: Any, job: Job, request: Request) -> tuple[Any, Any]:
    """(script, executor) of the trainer; with rollout nodes lists of both, for one heterogeneous
    job.
    """
    config = job.loaded.config
    per_node = ranks_to_start(config) // config.resources.nodes
    tasks = 1 if request.cluster.launcher == "torchrun" else per_node
    trainer = _executor(run, job, request.cluster, nodes=config.resources.nodes, tasks=tasks)
    trainer.setup_lines = _checked(setup_lines(job, request))
    script = _script(run, train_command(job, request))
    if not config.resources.rollout_nodes:
        return script, trainer
    servers = _executor(run, job, request.cluster, nodes=config.resources.rollout_nodes, tasks=1)
    trainer.heterogeneous = servers.heterogeneous = True
    return [script, _script(run, serve_command(job, request))], [trainer, servers]


def _script(run: Any, text: str) -> Any:
    return run.Script(inline=_checked(text))


def _checked(text: str) -> str:
    if RESERVED in text:
        line = next(line for line in text.splitlines() if RESERVED in line)
        raise ConfigError(
            f"NeMo-Run replaces {RESERVED} in scripts, got {line!r}; rename that folder"
        )
    return text


def _executor(run: Any, job: Job, cluster: ClusterConfig, *, nodes: int, tasks: int) -> Any:
    from pacs_megatron.launch.tunnel import BoundedTunnel

    config = job.loaded.config
    container = cluster.container
    gpus = config.resources.gpus_per_node
    pyxis = container if container is not None and container.runtime == "pyxis" else None
    srun_args = [
        "--label",
        *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []),
        *cluster.srun_args,
    ]
    cpus = None
    if cluster.cpus_per_task is not None:
        # A single task on a node gets the cores of all ranks. srun does not inherit the number from
        # sbatch.
        cpus = cluster.cpus_per_task * (ranks_to_start(config) // config.resources.nodes) // tasks
        srun_args.insert(1, f"--cpus-per-task={cpus}")
    # NeMo-Run does not quote the words of srun.
    # `requeue` keeps the job's id. Without `B:` the signal goes to the tasks, which are the ranks.
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        job_name_prefix="pacs.",
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
        gpus_per_node=gpus if gpus and cluster.gpu_request == "gpus-per-node" else None,
        gres=f"gpu:{gpus}" if gpus and cluster.gpu_request == "gres" else None,
        mem=cluster.mem,
        exclusive=True if cluster.exclusive else None,
        time=config.resources.time_limit,
        signal=f"USR1@{config.resources.signal_lead_s}",
        # Without this, a job whose dependency failed stays pending.
        additional_parameters={"requeue": True, "kill_on_invalid_dep": "yes"},
        retries=0,
        container_image=shlex.quote(pyxis.image) if pyxis else None,
        container_mounts=[shlex.quote(mount) for mount in pyxis.mounts] if pyxis else [],
        setup_lines=_checked(site_lines(cluster)),
        srun_args=[shlex.quote(word) for word in srun_args],
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=5,
        poll_estimated_start_time=False,
        packager=run.Packager(),
        tunnel=BoundedTunnel(job_dir=""),
    )
