"""The commands of `pacs-megatron convert`.

Each returns its summary; `pacs_megatron/cli.py` has the options.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pacs_megatron.errors import ConversionError
from pacs_megatron.observability import logs
from pacs_megatron.runtime.waiting import report_wait


@contextmanager
def _command() -> Iterator[None]:
    """Logs to the console inside the block.

    SIGTERM ends it like Ctrl-C, so `with` blocks remove partial output.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    logs.setup_command_logging()
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        with report_wait("for the libraries to load and the conversion to end"):
            yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@_command()
def to_megatron(hf: str, **options: Any) -> str:
    """Hugging Face folder or hub id -> Megatron checkpoint."""
    from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron

    return hf_to_megatron(hf, ConversionOptions(**options))


@_command()
def to_hf(checkpoint: Path, step: int | None, **options: Any) -> str:
    """Converted or training checkpoint -> Hugging Face folder."""
    from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf

    return megatron_to_hf(checkpoint, ConversionOptions(**options), step=step)


@_command()
def verify(
    hf: str, checkpoint: Path, certificate: Path, *, step: int | None, logits: bool, **options: Any
) -> str:
    """Compares a Hugging Face folder with a checkpoint; `options` are those of LogitsOptions."""
    from pacs_megatron.convert.logits import LogitsOptions
    from pacs_megatron.convert.verify import verify

    if not logits and any(options[axis] != 1 for axis in ("tp", "pp", "ep")):
        raise ConversionError(
            "--tp, --pp and --ep are the layout of --logits; add --logits or remove them"
        )
    logits_options = LogitsOptions(**options) if logits else None
    return verify(hf, checkpoint, certificate, step=step, logits=logits_options)
