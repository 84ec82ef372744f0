"""`train`: checks the configuration and starts the ranks.

If torchrun or srun started this process, it becomes a rank instead.

Runs training as a new command instead of importing it, so a rank's environment is complete before
Python loads torch.
"""

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

import psutil

from pacs_megatron.checkpoint.names import describe_newest
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.config.reward_options import (
    AgentReward,
    CodeReward,
    CustomReward,
    SingleReward,
    WeightedReward,
)
from pacs_megatron.config.text import HUB_ID, local_path
from pacs_megatron.errors import ConfigError, ExitCode, PacsError
from pacs_megatron.launch.certified import certificate_line
from pacs_megatron.launch.serve import are_on_every_node, attach
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.rewards import sandbox
from pacs_megatron.runtime.command_line import program
from pacs_megatron.runtime.environment import RankPlace, find_rank, rank_environment
from pacs_megatron.runtime.files import is_file
from pacs_megatron.runtime.run_folder import (
    ATTEMPT_VARIABLE,
    EXIT_CODE_FILE,
    FAILED_RANK_FILE,
    REPORT_FILE,
    changed_since,
    read_exit_code,
    run_folder,
    write_exit_code,
)
from pacs_megatron.runtime.run_lock import LOCK_FILE, check_not_locked
from pacs_megatron.runtime.waiting import COMMAND_START, command_start, report_wait

TRAINING_MODULE = "pacs_megatron.training.main"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_POLL_S = 1.0


def run_train(config_path: Path, overrides: Sequence[str]) -> int:
    """Trains and returns the exit code.

    Raises:
        ConfigError: before a process is started.
    """
    loaded = load_config(config_path, overrides)
    place = find_rank(os.environ)
    if place is not None:
        try:
            become_rank(loaded, place, config_path, overrides)
        except PacsError as error:
            # In a batch script srun would report the signal of the ranks that it ends instead.
            if ATTEMPT_VARIABLE in os.environ:
                file = EXIT_CODE_FILE if place.rank == 0 else FAILED_RANK_FILE
                write_exit_code(run_folder(loaded), error.exit_code, file)
            raise

    resources = loaded.config.resources
    world_size = ranks_to_start(loaded.config)
    run_dir = run_folder(loaded)
    if resources.nodes > 1:
        check_model_and_layout(loaded, world_size)
        raise ConfigError(
            f"resources.nodes={resources.nodes}: `train` starts ranks on one host only; use "
            f"`submit`, or sbatch slurm/train.sbatch {config_path} "
            f"({loaded.where('resources.nodes')})"
        )
    _check(loaded, world_size)
    check_not_locked(run_dir)
    changed_since(loaded, run_dir)  # raises for another run's folder
    exit_code_file = run_dir / EXIT_CODE_FILE
    is_file(exit_code_file, ConfigError)  # raises for a folder of this name
    command = [TRAINING_MODULE, str(config_path), *overrides]
    code = start_ranks(command, world_size, exit_code_file, lead_s=resources.signal_lead_s)
    if code == ExitCode.OK:
        sys.stderr.write("".join(f"{line}\n" for line in closing_lines(loaded, overrides)))
    return code


def closing_lines(loaded: LoadedConfig, overrides: Sequence[str]) -> list[str]:
    """The files that a finished run has written, and the next command.

    Args:
        loaded: configuration of the run.
        overrides: of the command, for the next one.
    """
    run_dir = run_folder(loaded)
    folder = shlex.quote(str(run_dir))
    words = [program(), "eval", str(loaded.path), *overrides, "--model", str(run_dir / "hf")]
    command = " ".join([words[0], *map(shlex.quote, words[1:])])
    if not loaded.config.evaluation.benchmarks:
        command = f"{program()} compare {folder} OTHER_RUN"
    return [
        f"done       {loaded.config.run.steps} steps",
        f"weights    {run_dir / 'hf'} (Hugging Face format)",
        f"report     {run_dir / REPORT_FILE} (open it in a browser)",
        f"next       {command}",
    ]


def become_rank(
    loaded: LoadedConfig, place: RankPlace, config_path: Path, overrides: Sequence[str]
) -> NoReturn:
    """Checks the configuration, then turns this process of torchrun or srun into a rank.

    Raises:
        ConfigError, DataError: the configuration does not fit this host or world size.
    """
    _check(loaded, place.world_size, place.rank)
    command = [TRAINING_MODULE, str(config_path), *overrides]
    if are_on_every_node(loaded.config):
        command += attach(loaded.config, config_path, overrides, place)
    environ = rank_environment(place.local_world_size, single_host=False) | place.variables()
    os.execve(sys.executable, [sys.executable, "-m", *command], environ)  # noqa: S606


def _check(loaded: LoadedConfig, world_size: int, rank: int = 0) -> None:
    """Checks the run; rank 0 reports its certificate.

    Raises ConfigError, ConversionError or DataError.
    """
    check_model_and_layout(loaded, world_size)
    check_files_are_here(loaded)
    if rank == 0:
        _check_sandboxes(loaded)  # rewards run on rank 0's host
    line = certificate_line(loaded)
    if line is not None and rank == 0:
        sys.stderr.write(f"{line}\n")


def _check_sandboxes(loaded: LoadedConfig) -> None:
    for reward in _rewards(loaded):
        if isinstance(reward, CodeReward) and reward.sandbox != "none":
            sandbox.check(reward.sandbox)


def _rewards(loaded: LoadedConfig) -> Sequence[SingleReward | AgentReward | None]:
    """The rewards without weights; None if no reward is set."""
    reward = loaded.config.reward
    if isinstance(reward, WeightedReward):
        return [component.reward for component in reward.components]
    return [reward]


def check_model_and_layout(loaded: LoadedConfig, world_size: int) -> None:
    """Checks that the layout fits the world size and the model's files.

    Raises:
        ConfigError: it does not.
        ConversionError, DataError: a file of the model is damaged.
    """
    from pacs_megatron.data.tokenizer import GENERATION_CONFIG, MODEL_CONFIG, read_eos_ids
    from pacs_megatron.models import load_spec
    from pacs_megatron.models.hub import config_folder

    config = loaded.config
    problems = layout_problems(config, world_size)
    folder = config_folder(local_path(config.model.path))
    if folder.is_dir():
        spec = load_spec(folder)
        problems += shape_problems(config, spec, folder.name)
        for file in (folder / MODEL_CONFIG, folder / GENERATION_CONFIG):
            eos_ids = read_eos_ids(file) if is_file(file) else set()
            largest = max(eos_ids, default=0)
            if largest >= spec.vocab_size:
                problems.append(
                    f"{file}: eos_token_id is {largest}, but config.json has "
                    f"vocab_size={spec.vocab_size}; correct it"
                )
    if problems:
        raise loaded.fail(problems[0])


def check_files_are_here(loaded: LoadedConfig) -> None:
    """Checks that the files and packages that the run names exist on this host.

    Raises:
        ConfigError, DataError: one is missing.
    """
    from pacs_megatron.agents.files import agent_digests
    from pacs_megatron.data.sources import find_source
    from pacs_megatron.observability.writers import check_wandb
    from pacs_megatron.runtime.user_code import find_file

    config = loaded.config
    _check_model_path(loaded, "model.path", config.model.path)
    for key, path in config.objective.other_models.items():
        _check_model_path(loaded, key, path)
    for dataset in (*config.data.train_sets, *config.evaluation.benchmarks):
        for path in dataset.paths:
            find_source(path)
    for reward in _rewards(loaded):
        if isinstance(reward, CustomReward):
            find_file(reward.function, "reward.function")
    agents = config.rollout.agents
    if agents is not None:
        agent_digests(agents)  # raises for a file that cannot be read
    if config.logging.wandb is not None:
        check_wandb(config.logging.wandb)


def _check_model_path(loaded: LoadedConfig, key: str, path: str) -> None:
    """Raises ConfigError if `path`, the value of `key`, is neither a folder nor a hub id."""
    if not local_path(path).is_dir() and not HUB_ID.fullmatch(path):
        raise ConfigError(
            f"{key}={path}: no such folder; correct the path, or create it first "
            f"({loaded.where(key)})"
        )


def start_ranks(
    command: Sequence[str], num_ranks: int, exit_code_file: Path, *, lead_s: float = math.inf
) -> int:
    """Runs `python -m <command>` on ranks of this host under torchrun.

    The first SIGTERM or SIGINT goes to the ranks only, because torchrun kills them after 30 s; they
    save and stop within `lead_s`. Processes that SIGSTOP has stopped continue. The second signal
    also goes to torchrun. The third signal, or the end of `lead_s`, kills all.

    Args:
        command: module and its arguments.
        num_ranks: number of ranks.
        exit_code_file: file that rank 0 writes; the run's lock is beside it.
        lead_s: seconds between a stop request and the end of all processes.

    Returns:
        The exit code.
    """
    before = _stamp(exit_code_file)
    lock = exit_code_file.with_name(LOCK_FILE)
    lock_before = _stamp(lock)
    agent = [sys.executable, "-m", "pacs_megatron.launch.agent"]
    agent += ["--standalone", "--local-addr=127.0.0.1", "--nnodes=1"]
    agent += [f"--nproc-per-node={num_ranks}", "-m", *command]

    def waits_for() -> str:
        """Empty after the start and after a stop request: a rank reports its waits."""
        has_ended = torchrun.signals or torchrun.ranks_have_ended
        is_starting = _stamp(lock) == lock_before and not has_ended
        return "for torchrun to start the ranks" if is_starting else ""

    with _Torchrun(agent, num_ranks) as torchrun, report_wait(waits_for):
        code = torchrun.wait(lead_s)

    if _stamp(exit_code_file) not in (None, before):
        return read_exit_code(exit_code_file, ExitCode.FAILED)
    if code == 0:
        return ExitCode.OK
    reason = "not saved"
    if torchrun.signals:
        code = 128 + torchrun.signals[0]
        reason = f"{signal.Signals(torchrun.signals[0]).name}: the ranks reported no save"
    if not 0 < code < 128:
        sys.stderr.write(f"{reason}; {describe_newest(exit_code_file.parent)}\n")
    return code if 0 < code < 256 else 128 + abs(code)


class _Torchrun:
    """torchrun and its ranks. Forwards signals of this process; see `start_ranks`."""

    def __init__(self, command: Sequence[str], num_ranks: int) -> None:
        self.signals: list[int] = []
        """signals that this process received"""
        self._agent: psutil.Popen | None = None
        self._ranks: list[psutil.Process] = []
        self._num_ranks = num_ranks
        # Before the start: a signal that arrives while torchrun starts is passed on afterwards.
        self._old_handlers = {
            number: signal.signal(number, self._on_signal) for number in _FORWARDED
        }
        environ = rank_environment(num_ranks, single_host=True)
        environ[COMMAND_START] = str(command_start())
        # If SIGCHLD is ignored, the kernel reaps a child and its exit code is lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._agent = psutil.Popen(
            command, env=environ, start_new_session=True, stdin=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        if self.signals:  # received while it started
            self._pass_on()
        return self

    def __exit__(self, *exc: object) -> None:
        """Kills the remaining processes, also ranks, which torchrun starts in separate sessions."""
        _send(self._tree(), signal.SIGKILL)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    @property
    def ranks_have_ended(self) -> bool:
        """Whether ranks have started and none is alive; torchrun may need seconds more."""
        return bool(self._ranks) and not any(map(_is_alive, self._ranks))

    def wait(self, lead_s: float) -> int:
        """The exit code of torchrun.

        Kills all processes `lead_s` after a stop request or after the end of torchrun.
        """
        assert self._agent is not None
        code: int | None = None
        while code is None or (code < 0 and any(map(_is_alive, self._ranks))):
            with suppress(psutil.TimeoutExpired):
                code = self._agent.wait(_POLL_S)
            if code is not None and code < 0 and not self.signals:
                sys.stderr.write(
                    f"torchrun (pid {self._agent.pid}) was killed by {signal.Signals(-code).name}\n"
                )
                self._on_signal(signal.SIGTERM, None)
            if self.signals and time.monotonic() - self._since > lead_s:
                sys.stderr.write(
                    f"the ranks did not end within resources.signal_lead_s={lead_s:g}; killing "
                    "them\n"
                )
                return -signal.SIGKILL
            if len(self._ranks) < self._num_ranks:
                self._tree()
            if self.signals:
                # A starting rank may have missed the first signal.
                _send(self._ranks, signal.SIGTERM)
            if code is not None:
                time.sleep(_POLL_S)
        return code

    def _tree(self) -> list[psutil.Process]:
        """The processes of the run.

        Records the ranks, which cannot be found after the end of torchrun.
        """
        if self._agent is None:
            return []
        with suppress(psutil.NoSuchProcess):
            self._ranks = self._agent.children() or self._ranks
        tree = [self._agent, *self._ranks]
        for rank in self._ranks:
            with suppress(psutil.NoSuchProcess):
                tree += rank.children(recursive=True)
        return tree

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.signals:
            self._since = time.monotonic()
        self.signals.append(number)
        if self._agent is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        """Forwards the last signal, by the rules of `start_ranks`."""
        tree = self._tree()
        attempt = len(self.signals)
        stopped = self._ranks
        if attempt > 1 or not self._ranks:
            stopped = tree[:1] + self._ranks
        _send(stopped, signal.SIGTERM)
        _send(tree, signal.SIGKILL if attempt > 2 else signal.SIGCONT)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Time and inode, which change when the file is written again; None without the file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino
