"""One rank of a training run: `python -m pacs_megatron.training.main <config> [key=value ...]` under torchrun or srun."""

import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.errors import ConfigError, ExitCode, PacsError
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.run_folder import (
    ATTEMPT_VARIABLE,
    CONFIG_FILE,
    EXIT_CODE_FILE,
    LOG_FOLDER,
    changed_since,
    run_folder,
    write_environment,
)

logger = logging.getLogger(__name__)
RANK_0_FIRST_S = 10.0


def prepare_folder(loaded: LoadedConfig, run_dir: Path) -> None:
    """Rank 0: the resolved configuration into the run's folder. Raises as `changed_since` does."""
    for key in changed_since(loaded, run_dir):
        logger.info("changed since the last attempt: %s", key)
    write_atomically(run_dir / CONFIG_FILE, [loaded.to_yaml().encode()])
    write_environment(run_dir, {})


def run_rank(config_path: Path, overrides: Sequence[str]) -> ExitCode:
    """Everything from the configuration to the exit code. Raises PacsError for what a user can cure."""
    loaded = load_config(config_path, overrides)
    run_dir = run_folder(loaded)
    rank_number = int(os.environ.get("RANK", "0"))
    setup_logging(None, rank_number)
    created = rank_number == 0 and not run_dir.exists()
    # After the cheap checks: these imports take seconds.
    from pacs_megatron.parallel import groups
    from pacs_megatron.rollout.driver_client import DriverClient
    from pacs_megatron.training import context, loop
    from pacs_megatron.training.signals import StopFlag
    from pacs_megatron.training.watchdog import Watchdog

    stop = StopFlag(run_dir)
    stop.install()
    with ExitStack() as stack:
        try:
            model_dir = context.resolve_model(loaded.config.model.path)
            driver = None
            if rank_number == 0:
                if ATTEMPT_VARIABLE not in os.environ:
                    # A batch script did it when the attempt began; a stop may have come since.
                    stop.clear_file()
                prepare_folder(loaded, run_dir)
                # The driver loads data while this process builds the model.
                driver = DriverClient(
                    run_dir,
                    model_dir,
                    timeout_s=loaded.config.parallel.control_timeout_s,
                    heartbeat_s=loaded.config.parallel.heartbeat_s,
                )
                stack.callback(driver.close)
            built = context.build_on_all_ranks(loaded.config, run_dir, model_dir, driver, stop)
        except PacsError:
            stack.close()
            if created:
                # Nothing has been computed: a wrong input leaves no half-made run behind.
                shutil.rmtree(run_dir, ignore_errors=True)
                with suppress(OSError):  # other runs are in it
                    run_dir.parent.rmdir()
            raise
        if built.server_sync is not None:
            stack.callback(built.server_sync.close)
        setup_logging(run_dir / LOG_FOLDER, rank_number)
        watchdog = Watchdog(run_dir, rank_number, built.rank.layout.world_size, loaded.config.parallel.hang_timeout_s)
        built.timer.on_change(watchdog.phase)
        built.channel.on_heartbeat = watchdog.alive
        watchdog.start()
        stack.callback(watchdog.close)
        code = loop.train(built)
    groups.shutdown()
    return code


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code, and leaves it in the run's folder (torchrun hides it)."""
    if not arguments:
        sys.stderr.write("usage: python -m pacs_megatron.training.main <config> [key=value ...]\n")
        return int(ExitCode.MISCONFIGURED)
    config_path, overrides = Path(arguments[0]), arguments[1:]
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        code = run_rank(config_path, overrides)
    except PacsError as error:
        logger.debug("%s", traceback.format_exc())
        if is_first:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        else:
            _leave_it_to_rank_0(error)
        code = error.exit_code
    if is_first:
        _leave_exit_code(config_path, overrides, code)
    # Other ranks may hang in a collective that this one left: end without waiting for anything.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def _leave_it_to_rank_0(error: PacsError) -> None:
    """Most errors meet all ranks, and one line is enough. Ended here too soon, this rank would have rank 0 ended before
    it spoke; where rank 0 has nothing to say the launcher still waits, and this rank speaks."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(RANK_0_FIRST_S)
    sys.stderr.write(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}\n")


def _leave_exit_code(config_path: Path, overrides: Sequence[str], code: ExitCode) -> None:
    try:
        run_dir = run_folder(load_config(config_path, overrides))
    except ConfigError:
        return  # there is no run folder to leave it in
    if run_dir.is_dir():
        write_atomically(run_dir / EXIT_CODE_FILE, [f"{int(code)}\n".encode()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
