"""`train`: check the configuration and start the ranks, or become a rank if torchrun or srun started this process.

Training runs as a command and is not imported, so a rank's environment is complete before Python loads torch.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType

import psutil  # type: ignore[import-untyped]

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.runtime.environment import find_rank, rank_environment
from pacs_megatron.runtime.run_folder import EXIT_CODE_FILE, run_folder
from pacs_megatron.runtime.run_lock import refuse_if_locked

TRAINING_MODULE = "pacs_megatron.training.main"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_log = logging.getLogger(__name__)


def run_train(config_path: Path, overrides: Sequence[str]) -> int:
    """Train and return the exit code. Raises ConfigError before anything is started or written."""
    loaded = load_config(config_path, overrides)
    place = find_rank(os.environ)
    world_size = place.world_size if place is not None else ranks_to_start(loaded.config)
    check_model_and_layout(loaded, world_size)
    check_model_is_here(loaded)
    if place is None and loaded.config.resources.nodes > 1:
        raise ConfigError(
            f"resources.nodes={loaded.config.resources.nodes}: `train` starts ranks on one host only; use `submit`, or "
            f"sbatch slurm/train.sbatch {config_path} ({loaded.where('resources.nodes')})"
        )
    command = [TRAINING_MODULE, str(config_path), *overrides]
    if place is not None:
        # Not at module level: server processes import this module.
        from pacs_megatron.launch.colocated import are_on_every_node, attach

        if are_on_every_node(loaded.config):
            command += attach(loaded.config, config_path, overrides, place)
        environ = rank_environment(place.local_world_size, single_host=False) | place.variables()
        os.execve(sys.executable, [sys.executable, "-m", *command], environ)  # noqa: S606  this process is the rank
    refuse_if_locked(run_folder(loaded))
    return start_ranks(command, world_size, run_folder(loaded) / EXIT_CODE_FILE)


def check_model_and_layout(loaded: LoadedConfig, world_size: int) -> None:
    """Raises ConfigError or ConversionError if the world size or the model's shape does not fit the layout."""
    from pacs_megatron.models import load_spec

    config = loaded.config
    problems = layout_problems(config, world_size)
    folder = Path(config.model.path).expanduser()
    if not (folder / "config.json").is_file():
        folder = folder / "hf"  # a converted checkpoint
    if (folder / "config.json").is_file():
        problems += shape_problems(config, load_spec(folder), folder.name)
    if problems:
        raise loaded.fail(problems[0])


def check_model_is_here(loaded: LoadedConfig) -> None:
    """Raises ConfigError if `model.path` is neither a folder on this host nor a hub id."""
    from pacs_megatron.models.hub import is_hub_id

    path = loaded.config.model.path
    if not Path(path).expanduser().is_dir() and not is_hub_id(path):
        raise ConfigError(
            f"model.path={path}: no such folder; correct the path, or create the folder first "
            f"({loaded.where('model.path')})"
        )


def start_ranks(command: Sequence[str], num_ranks: int, exit_code_file: Path) -> int:
    """Run `python -m <command>` on `num_ranks` ranks of this host under torchrun; returns the exit code.

    The first SIGTERM or SIGINT goes to the ranks only, which save and stop without a time limit (torchrun kills them
    after 30 s). The second goes to torchrun too. The third kills all.
    """
    before = _stamp(exit_code_file)
    agent = [
        *(sys.executable, "-m", "pacs_megatron.launch.agent"),
        *("--standalone", "--local-addr=127.0.0.1", "--nnodes=1", f"--nproc-per-node={num_ranks}"),
        *("-m", *command),
    ]
    with _Forwarding() as forwarding:
        process = subprocess.Popen(
            agent, env=rank_environment(num_ranks, single_host=True), start_new_session=True, stdin=subprocess.DEVNULL
        )
        forwarding.watch(process.pid)
        try:
            code = process.wait()
        finally:
            _end_group(process.pid)
    if _stamp(exit_code_file) not in (None, before):
        return int(exit_code_file.read_text().strip())
    if code == 0:
        return ExitCode.OK
    if forwarding.signals:
        return 128 + forwarding.signals[0]
    return code if 0 < code < 256 else 128 + abs(code)


class _Forwarding(AbstractContextManager["_Forwarding"]):
    """Forwards signals of this process to the ranks, with more force each time."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._agent_pid: int | None = None
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> _Forwarding:
        for number in _FORWARDED:
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def watch(self, agent_pid: int) -> None:
        """Forward signals to this process and its children, including signals received before this call."""
        self._agent_pid = agent_pid
        if self.signals:
            self._pass_on()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self._agent_pid is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        pid, attempt = self._agent_pid, len(self.signals)
        assert pid is not None
        try:
            ranks = psutil.Process(pid).children()
            if attempt == 1 and ranks:
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
            else:
                os.killpg(pid, signal.SIGTERM if attempt <= 2 else signal.SIGKILL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return  # it has already exited; wait() returns its code


def _end_group(pid: int) -> None:
    """Kill remaining processes of the ranks: servers and workers share the session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino
