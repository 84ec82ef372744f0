"""The arguments of `submit`, and the shell lines that turn a job into a script of slurm/.

Every value from a configuration, a cluster file or the environment is quoted.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.cluster import ClusterConfig
from pacs_megatron.runtime.run_folder import run_folder
from pacs_megatron.runtime.shipped import shipped_folder

_OWN_SCRIPTS = {"train": "train.sbatch", "eval": "eval.sbatch"}
"""Verbs with a script of their own in slurm/."""
_ANY_COMMAND = "command.sbatch"


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
    force: bool = False
    """Submit a run that does not fit on a GPU according to `plan`, with a warning."""
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


def train_arguments(run: SubmittedRun, submission: Submission) -> list[str]:
    """The verb and its arguments that train the run."""
    words = ["train", str(submission.config.resolve()), *run.overrides]
    if submission.convert:
        words.append(f"model.path={run.converted}")
    return words


def job_lines(cluster: ClusterConfig, arguments: Sequence[str]) -> str:
    """Shell lines that set up the site and turn the batch script into a script of slurm/.

    `exec` keeps the process, which Slurm signals before the time limit.

    Args:
        cluster: the site.
        arguments: a verb of pacs-megatron and its arguments.
    """
    verb, *rest = arguments
    script = shipped_folder("slurm").resolve() / _OWN_SCRIPTS.get(verb, _ANY_COMMAND)
    words = rest if verb in _OWN_SCRIPTS else arguments
    return "\n".join([*_site_lines(cluster), shlex.join(["exec", "bash", str(script), *words])])


def _site_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines with the settings that a file of PACS_SITE has for a job by hand."""
    # The script itself runs outside of the container, on the interpreter that runs `submit`.
    here = cluster.python if cluster.container is None else (sys.executable,)
    # NeMo-Run's env_vars writes names in capitals and values without quotes.
    environment = {
        **cluster.task_environment(),
        "PACS_PYTHON": shlex.join([*cluster.command_prefix(), *cluster.python]),
        "PACS_BATCH_PYTHON": shlex.join(here),
        "PACS_LAUNCHER": cluster.launcher,
        "PACS_SRUN_ARGS": shlex.join(_srun_arguments(cluster)),
    }
    lines = ["unset PACS_SITE"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [f"module load {shlex.quote(module)}" for module in cluster.modules]
    lines += cluster.setup
    lines.append(f"cd {shlex.quote(os.getcwd())} || exit")
    return lines


def _srun_arguments(cluster: ClusterConfig) -> list[str]:
    """More arguments of each srun: binding, Pyxis, and those of the cluster's file."""
    words = []
    if cluster.cpu_bind:
        words.append(f"--cpu-bind={cluster.cpu_bind}")
    container = cluster.container
    if container is not None and container.runtime == "pyxis":
        words.append(f"--container-image={container.image}")
        words.append(f"--container-workdir={os.getcwd()}")
        if container.mounts:
            words.append(f"--container-mounts={','.join(container.mounts)}")
    return [*words, *cluster.srun_args]
