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
class Request:
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
class Job:
    """One run of a request."""

    overrides: tuple[str, ...]
    loaded: LoadedConfig

    @property
    def name(self) -> str:
        return self.loaded.config.run.name

    @property
    def converted(self) -> Path:
        """Path of the checkpoint that the conversion job writes."""
        return (run_folder(self.loaded) / "converted").resolve()


def train_command(job: Job, request: Request) -> str:
    """Shell lines that each task of the trainer runs."""
    arguments = [str(request.config.resolve()), *job.overrides]
    if request.convert:
        arguments.append(f"model.path={job.converted}")
    python = python_command(request.cluster)
    config = job.loaded.config
    resources = job.loaded.config.resources
    urls = attached = torchrun = ""
    if resources.rollout_nodes:
        rollout = config.rollout.sglang
        servers = config.rollout.managed_servers
        assert rollout is not None and servers is not None
        arguments_of_urls = (
            f'"$PACS_ATTEMPT/servers" {servers.start_timeout_s} {resources.rollout_nodes}'
        )
        urls = f"urls=$({python} -m pacs_megatron.launch.job urls {arguments_of_urls}) || exit $?\n"
        attached = ' rollout.servers=null "rollout.urls=[$urls]"'
        attached += (
            ' "rollout.sync.host=$MASTER_ADDR"' if rollout.sync.transport == "broadcast" else ""
        )
    if request.cluster.launcher == "torchrun":
        torchrun = (
            f".launch.agent --nnodes={resources.nodes} "
            f"--nproc-per-node={ranks_to_start(config) // resources.nodes} "
            '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" '
            '--rdzv-id="$SLURM_JOB_ID" -m pacs_megatron'
        )
    train = f"exec {python} -m pacs_megatron{torchrun} train {shlex.join(arguments)}{attached}"
    return f"cd {shlex.quote(os.getcwd())} || exit\n{urls}{train}"


def serve_command(job: Job, request: Request) -> str:
    """Shell lines that the task of each rollout node runs."""
    arguments = shlex.join([str(request.config.resolve()), *job.overrides])
    return (
        f"cd {shlex.quote(os.getcwd())} || exit\n"
        f"exec {python_command(request.cluster)} -m pacs_megatron.launch.serve "
        f'"$PACS_ATTEMPT/servers" {arguments}'
    )


def site_lines(cluster: ClusterConfig) -> str:
    """Shell lines of each batch script before its first srun: environment, modules, setup, working
    directory.
    """
    # NeMo-Run's env_vars writes names in capitals and values without quotes.
    lines = [
        f"export {name}={shlex.quote(value)}" for name, value in cluster.task_environment().items()
    ]
    lines.extend(f"module load {shlex.quote(module)}" for module in cluster.modules)
    lines.extend(cluster.setup)
    return "\n".join([*lines, f"cd {shlex.quote(os.getcwd())} || exit"])


def setup_lines(job: Job, request: Request) -> str:
    """Shell lines of the trainer's batch script before its first srun: setup, begin and end of the
    attempt.
    """
    cluster = request.cluster
    config = job.loaded.config
    # The batch script runs outside of the container, so it uses the interpreter that runs `submit`.
    python = shlex.join(cluster.python if cluster.container is None else (sys.executable,))
    run_dir = shlex.quote(str(run_folder(job.loaded).resolve()))
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
        *(['touch "$PACS_ATTEMPT/servers/stop"'] if config.resources.rollout_nodes else []),
        f'{python} -m pacs_megatron.launch.job end {run_dir} "$pacs_code" '
        f"{config.resources.max_attempts}",
        "exit",
        "}",
        "trap pacs_end EXIT",
    ]
    return "\n".join(lines)


def python_command(cluster: ClusterConfig) -> str:
    """The interpreter of all tasks, with its container command."""
    return shlex.join([*cluster.command_prefix(), *cluster.python])
