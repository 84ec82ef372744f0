"""Logging: one line per record with the rank, one file per rank, and console lines above the
progress bar.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from pacs_megatron.errors import terminal_line

PROGRESS_LOGGER = "pacs_megatron.progress"
"""Logger of progress lines: always written to the log file, to the console only without a live bar.
"""


class LineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 [rank 0] INFO message`; control characters of the message are escaped.

    Messages contain model output, which must not forge a line or move the cursor. A traceback keeps
    its lines.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"%(asctime)s [rank {rank}] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        return terminal_line(super().formatMessage(record))


class _TextFormatter(logging.Formatter):
    """The message alone; its control characters are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        return terminal_line(super().formatMessage(record))


class _ConsoleHandler(logging.Handler):
    """Writes above the live bar. Losing the terminal does not stop a run."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        with suppress(OSError, ValueError):  # ValueError: the stream was closed
            if record.name == PROGRESS_LOGGER and self._stream.isatty():
                return  # the bar shows the same
            with tqdm.external_write_mode(file=self._stream):
                self._stream.write(line)
                self._stream.flush()


class _RankFile(logging.FileHandler):
    """The log file of one rank.

    Its failure, such as a full disk, is reported once and does not stop a run.
    """

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"{self.baseFilename}: lines are missing ({sys.exc_info()[1]})\n")

    def close(self) -> None:
        with suppress(OSError):  # it writes the bytes that a failed write has left
            super().close()


def setup_logging(log_dir: Path | None, rank: int, *, stream: TextIO | None = None) -> None:
    """Logs to the console and, with `log_dir`, to `<log_dir>/rank<k>.log` (appended).

    The console shows INFO of rank 0 and warnings of other ranks; the files contain INFO of every
    rank. A second call replaces the handlers of the first.

    Args:
        log_dir: Folder of the files; None writes none.
        rank: Rank of this process.
        stream: The console; default: stderr.
    """
    console = _ConsoleHandler(sys.stderr if stream is None else stream)
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handlers: list[logging.Handler] = [console]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / f"rank{rank}.log"
        handlers.append(_RankFile(path, encoding="utf-8", errors="backslashreplace"))
    _set_handlers(handlers, LineFormatter(rank))


def setup_command_logging() -> None:
    """Logs INFO to standard error, for a command without ranks: the text of each record alone."""
    _set_handlers([_ConsoleHandler(sys.stderr)], _TextFormatter())


def _set_handlers(handlers: Sequence[logging.Handler], formatter: logging.Formatter) -> None:
    """Replaces the handlers of an earlier call."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ConsoleHandler | _RankFile):
            root.removeHandler(handler)
            handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)

    # INFO of this package only, not of other libraries.
    root.setLevel(logging.WARNING)
    logging.getLogger("pacs_megatron").setLevel(logging.INFO)
    # A CUDA build of torch warns here on every host without a GPU; nothing that we run builds an
    # extension.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
