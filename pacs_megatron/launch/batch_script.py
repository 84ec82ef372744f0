"""The arguments of `submit`, and the shell text of its batch scripts.

Every value from a configuration, a cluster file or the environment is quoted.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.cluster import ClusterConfig
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.runtime.run_folder import run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Arguments of `submit`."""

    config: Path
    overrides: tuple[str, ...]
    cluster: ClusterConfig
    sweep: tuple[str, ...] = ()
    """texts `key=a,b,c`; each combination of values is a run"""
    seeds: int = 1
    convert: bool = False
    """Convert the model to a Megatron checkpoint in a job before training."""
    evaluate: bool = False
    """Evaluate the exported model in a job after training."""
    train: bool = True
    later: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(label, arguments of pacs-megatron) of jobs that follow the training, one after the other"""


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """One run of a submission."""

    overrides: tuple[str, ...]
    loaded: LoadedConfig

    @property
    def name(self) -> str:
        return self.loaded.config.run.name

    @property
    def converted(self) -> Path:
        """Path of the checkpoint that the conversion job writes."""
        return (run_folder(self.loaded) / "converted").resolve()


def train_command(run: SubmittedRun, submission: Submission) -> str:
    """Shell lines that each task of the trainer runs."""
    arguments = [str(submission.config.resolve()), *run.overrides]
    if submission.convert:
        arguments.append(f"model.path={run.converted}")
    words = shlex.join(arguments)
    lines = [_change_folder()]
    if run.loaded.config.resources.rollout_nodes:
        lines.append(_wait_for_servers(run, submission.cluster))
        words += _overrides_of_servers(run)

    torchrun = ""
    if submission.cluster.launcher == "torchrun":
        torchrun = _torchrun(run)
    python = python_command(submission.cluster)
    lines.append(f"exec {python} -m {torchrun}pacs_megatron train {words}")
    return "\n".join(lines)


def _wait_for_servers(run: SubmittedRun, cluster: ClusterConfig) -> str:
    """A shell line that sets `urls` to the servers of the rollout nodes."""
    config = run.loaded.config
    servers = config.rollout.managed_servers
    assert servers is not None
    return (
        f"urls=$({python_command(cluster)} -m pacs_megatron.launch.job urls "
        f'"$PACS_ATTEMPT/servers" {servers.start_timeout_s} {config.resources.rollout_nodes})'
        " || exit $?"
    )


def _overrides_of_servers(run: SubmittedRun) -> str:
    """Arguments of `train` that attach it to `urls`."""
    rollout = run.loaded.config.rollout.sglang
    assert rollout is not None
    words = ' rollout.servers=null "rollout.urls=[$urls]"'
    if rollout.sync.transport == "broadcast":
        words += ' "rollout.sync.host=$MASTER_ADDR"'
    return words


def _torchrun(run: SubmittedRun) -> str:
    """The words of torchrun between `python -m` and the module that it runs."""
    config = run.loaded.config
    nodes = config.resources.nodes
    return (
        f"pacs_megatron.launch.agent --nnodes={nodes} "
        f"--nproc-per-node={ranks_to_start(config) // nodes} "
        '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" '
        '--rdzv-id="$SLURM_JOB_ID" -m '
    )


def serve_command(run: SubmittedRun, submission: Submission) -> str:
    """Shell lines that the task of each rollout node runs."""
    arguments = shlex.join([str(submission.config.resolve()), *run.overrides])
    return (
        f"{_change_folder()}\n"
        f"exec {python_command(submission.cluster)} -m pacs_megatron.launch.serve "
        f'"$PACS_ATTEMPT/servers" {arguments}'
    )


def site_lines(cluster: ClusterConfig) -> str:
    """Shell lines of each batch script before its first srun.

    They set environment, modules, setup and working directory.
    """
    # NeMo-Run's env_vars writes names in capitals and values without quotes.
    environment = cluster.task_environment()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [f"module load {shlex.quote(module)}" for module in cluster.modules]
    lines += cluster.setup
    lines.append(_change_folder())
    return "\n".join(lines)


def setup_lines(run: SubmittedRun, submission: Submission) -> str:
    """Shell lines of the trainer's batch script before its first srun.

    They set up the site, begin the attempt, and end it when the script exits.
    """
    cluster = submission.cluster
    # The batch script runs outside of the container, so it uses the interpreter that runs `submit`.
    python = shlex.join(cluster.python if cluster.container is None else (sys.executable,))
    run_dir = shlex.quote(str(run_folder(run.loaded).resolve()))
    resources = run.loaded.config.resources
    lines = [
        site_lines(cluster),
        'export MASTER_ADDR="${PACS_MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" '
        '| head -n 1)}"',
        # Another port after a requeue: a process of the node may use the first.
        "export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 12000))",
        f"export PACS_ATTEMPT; PACS_ATTEMPT=$({python} -m pacs_megatron.launch.job begin "
        f"{run_dir}) || exit $?",
        'PACS_ATTEMPT=$(readlink -f "$PACS_ATTEMPT")',
        # Link the log that srun writes for NeMo-Run as the attempt's log.
        'pacs_out=$(scontrol show job "$SLURM_JOB_ID" | sed -n "s/^ *StdOut=//p" | head -n 1)',
        'ln -sfn "$(dirname '
        '"$pacs_out")/log-${SLURM_JOB_NAME}_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}.out" '
        '"$PACS_ATTEMPT/output.log"',
        # A function, because the quoted text of a trap cannot contain quoted values.
        "pacs_end() {",
        "pacs_code=$?",
        "trap - EXIT",
    ]
    if resources.rollout_nodes:
        lines.append('touch "$PACS_ATTEMPT/servers/stop"')
    lines += [
        f'{python} -m pacs_megatron.launch.job end {run_dir} "$pacs_code" {resources.max_attempts}',
        "exit",
        "}",
        "trap pacs_end EXIT",
    ]
    return "\n".join(lines)


def python_command(cluster: ClusterConfig) -> str:
    """The interpreter of all tasks, with its container command."""
    return shlex.join([*cluster.command_prefix(), *cluster.python])


def _change_folder() -> str:
    """A shell line that enters the folder of `submit`."""
    return f"cd {shlex.quote(os.getcwd())} || exit"
