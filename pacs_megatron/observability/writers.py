"""TensorBoard and Weights & Biases: copies of `metrics.jsonl`. For rank 0 only."""

import importlib
import os
import secrets
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pacs_megatron.config.schema import LoggingOptions, WandbOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.observability.metric_words import words_of
from pacs_megatron.observability.metrics import MetricValue
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.environment import check_secret
from pacs_megatron.runtime.files import naming, write_atomically
from pacs_megatron.runtime.run_folder import TENSORBOARD_FOLDER

_WANDB_ID_FILE = "wandb_id"
_WANDB_MODES_WITHOUT_KEY = ("offline", "disabled", "dryrun")


class TensorBoardWriter(Closing):
    """Event files under `<run_dir>/tensorboard`, written by the tensorboard package (no TensorFlow,
    no torch).

    Args:
        run_dir: The run folder.
        first_step: First step that this process writes. TensorBoard ignores an earlier process's
            events from it on, so no step appears twice.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        # Imported here because the import takes most of a second.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._pb = event_pb2
        self._summary_pb = summary_pb2
        self._described: set[str] = set()
        self._folder = run_dir / TENSORBOARD_FOLDER
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with naming(self._folder):
            self._writer = EventFileWriter(str(self._folder))
            self._writer.add_event(
                event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start)
            )
            self._writer.flush()

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Writes one scalar per key, without nulls; with the first one, the report's title and unit
        of the metric.
        """
        event = self._pb.Event(wall_time=time.time(), step=int(row["step"] or 0))
        for key, value in row.items():
            if key != "step" and value is not None:
                event.summary.value.add(
                    tag=key, simple_value=float(value), metadata=self._metadata(key)
                )
        with naming(self._folder):
            self._writer.add_event(event)
            self._writer.flush()

    def _metadata(self, key: str) -> Any:
        """The words of the report for a metric; None after its first value of this process."""
        if key in self._described:
            return None
        self._described.add(key)
        title, unit = words_of(key)
        return self._summary_pb.SummaryMetadata(display_name=title, summary_description=unit)

    def close(self) -> None:
        self._writer.close()


def check_wandb(options: WandbOptions) -> None:
    """Raises ConfigError without the package or its key."""
    check_secret("WANDB_API_KEY")
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    needs_key = os.environ.get("WANDB_MODE") not in _WANDB_MODES_WITHOUT_KEY
    if find_spec("wandb") is None:
        problem = "the package wandb is not installed; run `pip install wandb`"
    elif needs_key and not has_key:
        problem = "WANDB_API_KEY is not set; export it, or set WANDB_MODE=offline,"
    else:
        return
    raise ConfigError(f"logging.wandb.project={options.project}: {problem} or remove logging.wandb")


class WandbWriter(Closing):
    """One W&B run per run folder; a resumed run continues it, and W&B ignores steps that it already
    has.

    Args:
        run_dir: The run folder, which stores the id of the W&B run.
        name: Name of the run.
        options: Project of the run.
        config: The resolved configuration, which W&B shows.

    Raises:
        ConfigError: The package or its key is missing.
    """

    def __init__(
        self, run_dir: Path, name: str, options: WandbOptions, config: Mapping[str, Any]
    ) -> None:
        check_wandb(options)
        wandb = importlib.import_module("wandb")
        id_file = run_dir / _WANDB_ID_FILE
        if not id_file.exists():
            write_atomically(id_file, [secrets.token_hex(8).encode()])
        self._run = wandb.init(
            project=options.project,
            name=name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Logs one W&B step, without nulls."""
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def open_sinks(
    run_dir: Path, name: str, options: LoggingOptions, *, first_step: int, config: Mapping[str, Any]
) -> list[TensorBoardWriter | WandbWriter]:
    """The writers of `options`.

    Args:
        run_dir: The run folder.
        name: Name of the run.
        options: The writers that the run has.
        first_step: First step that this process writes.
        config: The resolved configuration.

    Raises:
        ConfigError: A package or a key is missing.
    """
    sinks: list[TensorBoardWriter | WandbWriter] = []
    if options.wandb is not None:
        sinks.append(WandbWriter(run_dir, name, options.wandb, config))
    if options.tensorboard:
        sinks.append(TensorBoardWriter(run_dir, first_step))
    return sinks
