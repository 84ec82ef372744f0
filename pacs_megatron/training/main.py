"""Runs one rank of a training run.

Usage: `python -m pacs_megatron.training.main <config> [key=value ...]` under torchrun or srun.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from pacs_megatron.checkpoint.beside import Beside
from pacs_megatron.checkpoint.names import describe_newest, newest_position
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.errors import ExitCode, PacsError, RewardError, RolloutError, one_line
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.runtime import run_folder as folders
from pacs_megatron.runtime.command_line import report_error
from pacs_megatron.runtime.cores import bind_rank
from pacs_megatron.runtime.environment import check_apex, hide_gpus
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.processes import AGENT_PID, die_with_parent
from pacs_megatron.runtime.run_lock import FolderInUseError, RunLock
from pacs_megatron.runtime.waiting import first_word_in_time, report_wait
from pacs_megatron.training.signals import STOP_FILE, StopFlag

# The name is `__main__` under torchrun, whose INFO is not logged.
logger = logging.getLogger("pacs_megatron.training.main")
_PRINT_AFTER_S = 10.0
"""Rank 0 prints an error that all ranks have; the other ranks print it only after this time."""


def main(arguments: Sequence[str]) -> int:
    """Ends the process with the exit code, which rank 0 also writes to the run folder (torchrun
    hides it).
    """
    if not arguments:
        sys.stderr.write("usage: python -m pacs_megatron.training.main <config> [key=value ...]\n")
        return int(ExitCode.MISCONFIGURED)
    # One line for an error of TensorBoard's thread (disk full); the main thread raises the same
    # error.
    threading.excepthook = lambda args: logger.error(
        "%s: %r", args.thread and args.thread.name, args.exc_value
    )
    if AGENT_PID in os.environ:
        # torchrun starts each rank in its own session, so a rank would outlive torchrun.
        die_with_parent(signal.SIGTERM, int(os.environ[AGENT_PID]))

    is_first = os.environ.get("RANK", "0") == "0"
    run_dir: Path | None = None  # known once the configuration is read
    is_in_use = False  # by another process, so nothing is written to the folder
    try:
        loaded = load_config(Path(arguments[0]), arguments[1:])
        run_dir = folders.run_folder(loaded)
        with first_word_in_time():
            code = _run(loaded, run_dir)
    except PacsError as error:
        logger.debug("%s", traceback.format_exc())
        _print_error(error, is_first)
        code = error.exit_code
        is_in_use = isinstance(error, FolderInUseError)
    except Exception as error:  # noqa: BLE001  a bug: one line and a report, no collectives
        logger.debug("%s", traceback.format_exc())
        code = _print_unexpected(error)

    is_written = not is_in_use and (is_first or code not in (ExitCode.OK, ExitCode.PREEMPTED))
    if is_written and run_dir is not None and run_dir.is_dir():
        exit_code_file = folders.EXIT_CODE_FILE if is_first else folders.FAILED_RANK_FILE
        folders.write_exit_code(run_dir, code, exit_code_file)

    # Other ranks may hang in a collective that this rank left, so exit without waiting for them.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def run_rank(config_path: Path, overrides: Sequence[str]) -> ExitCode:
    """Runs one rank of the configuration and returns its exit code. Raises PacsError."""
    loaded = load_config(config_path, overrides)
    return _run(loaded, folders.run_folder(loaded))


def _run(loaded: LoadedConfig, run_dir: Path) -> ExitCode:
    rank_number = int(os.environ.get("RANK", "0"))
    setup_logging(None, rank_number)
    check_apex()  # before Megatron-Core imports a package of this name
    if not loaded.config.resources.gpus_per_node and hide_gpus() and not rank_number:
        logger.info("resources.gpus_per_node=0: the run uses the CPU, not this host's GPUs")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Before a thread is started: a thread keeps the cores that it started with.
    bind_rank(loaded.config, rank_number, local_rank, ranks_here)
    if rank_number:
        return _train(loaded, run_dir, rank_number, None, is_new=False)

    is_new = not run_dir.exists()
    with RunLock(run_dir, "train") as lock:
        # A batch script removes the files of the last attempt before it starts the ranks.
        if folders.ATTEMPT_VARIABLE not in os.environ:
            for name in (folders.FAILED_RANK_FILE, STOP_FILE):
                (run_dir / name).unlink(missing_ok=True)
        return _train(loaded, run_dir, rank_number, lock, is_new=is_new)


def _train(
    loaded: LoadedConfig, run_dir: Path, rank_number: int, lock: RunLock | None, *, is_new: bool
) -> ExitCode:
    """Builds this rank and trains; `lock` is rank 0's, `is_new` whether it created `run_dir`."""
    # After the cheap checks: these imports take seconds.
    with report_wait("" if rank_number else "for torch and Megatron to load"):
        from pacs_megatron.parallel import groups
        from pacs_megatron.rollout.driver_client import DriverClient
        from pacs_megatron.training import context, loop
        from pacs_megatron.training.watchdog import Watchdog

    config = loaded.config
    stop = StopFlag(run_dir)
    driver = None
    with ExitStack() as stack:
        try:
            with report_wait(
                "" if rank_number else "for the model, the data, the driver and the other ranks"
            ):
                stop.install(partial(_end_during_start, run_dir, lock), with_file=rank_number == 0)
                model_dir = model_folder(config.model.path)
                if rank_number == 0:
                    _write_configuration(loaded, run_dir)
                    # The driver loads data while this process builds the model.
                    driver = DriverClient(
                        run_dir, model_dir, timeout_s=config.parallel.control_timeout_s
                    )
                    driver.should_stop = stop.is_set
                    stack.callback(driver.close)
                run = context.build_on_all_ranks(config, run_dir, model_dir, driver, stop)
                if run.server_sync is not None:
                    stack.callback(run.server_sync.close)
        except PacsError as error:
            stack.close()
            # The messages of these errors name a log in the folder.
            names_log = isinstance(error, RolloutError | RewardError)
            if is_new and not names_log:
                _remove_folder(run_dir)
            raise

        setup_logging(run_dir / folders.LOG_FOLDER, rank_number)
        for line in driver.notices if driver is not None else ():
            logger.warning("%s", line)
        kept_beside = Beside(model_dir).describe() if run.rank.rank == 0 else ""
        if kept_beside:
            logger.info("%s", kept_beside)
        watchdog = Watchdog(
            run_dir,
            rank_number,
            run.rank.layout.world_size,
            config.parallel.hang_timeout_s,
            stop_reason=lambda: stop.reason,
            lead_s=config.resources.signal_lead_s,
        )
        run.timer.on_change(watchdog.phase)
        run.channel.on_heartbeat = watchdog.alive
        for policy in run.models:
            policy.on_microbatch(watchdog.alive)
        watchdog.start()
        stack.callback(watchdog.close)
        code = loop.train(run)
    groups.shutdown()
    return code


def _write_configuration(loaded: LoadedConfig, run_dir: Path) -> None:
    """Logs and records what changed since the last attempt, and writes configuration and
    environment.
    """
    changed = folders.changed_since(loaded, run_dir)
    if changed:
        newest = newest_position(run_dir)
        step = newest.step if newest else 0
        for key, before, after in folders.record_changes(loaded, run_dir, changed, step):
            logger.info("changed since the last attempt: %s from %s to %s", key, before, after)
    write_atomically(run_dir / folders.CONFIG_FILE, [loaded.to_yaml().encode()])
    folders.write_environment(run_dir, {})


def _remove_folder(run_dir: Path) -> None:
    """Removes a new run folder: nothing was computed, and invalid input leaves no folder behind."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):  # the folder has other runs
        run_dir.parent.rmdir()


def _end_during_start(run_dir: Path, lock: RunLock | None, reason: str) -> None:
    """Ends this process at once: there is nothing to save, and the main thread may block for
    minutes (ranks, I/O).
    """
    code = int(ExitCode.PREEMPTED)
    if lock is not None:
        failed = run_dir / folders.FAILED_RANK_FILE
        if failed.exists():
            code = folders.read_exit_code(failed, ExitCode.FAILED)
            reason = "another rank failed"
        sys.stderr.write(f"{reason} before training: nothing to save; {describe_newest(run_dir)}\n")
        folders.write_exit_code(run_dir, code)
        lock.close()
    os._exit(code)


def _print_error(error: PacsError, is_first: bool) -> None:
    """Prints an error that ends the run, on rank 0 at once."""
    where = ""
    if not is_first:
        where = f"rank {os.environ['RANK']}: "
        # Rank 0 prints an error that all ranks raise, and exits first: torchrun then ends the
        # other ranks.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PRINT_AFTER_S)
    sys.stderr.write(f"{type(error).__name__}: {where}{error}\n")


def _print_unexpected(error: Exception) -> ExitCode:
    """Prints an error that is not ours; returns the exit code."""
    # gloo does not define its own exception class.
    is_connection = "/gloo/transport/" in str(error) or type(error).__name__ in (
        "DistBackendError",
        "DistNetworkError",
    )
    if not is_connection:
        return ExitCode(report_error(error))

    cause = str(error).splitlines()[0]
    message = f"lost the connection to another rank, whose message has the cause ({cause})"
    sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {one_line(message)}\n")
    return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
