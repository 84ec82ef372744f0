"""`fetch`: on a machine with a network, bring what a run needs into the local caches; jobs then run offline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError, DataError
from pacs_megatron.launch.known_models import KNOWN_MODELS
from pacs_megatron.models import read_spec

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def fetch(config_path: Path, overrides: Sequence[str], *, wheels: Path | None) -> Iterator[str]:
    """Yields a line for each thing that is now local. Raises ConfigError or DataError with the hub's own reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from pacs_megatron.data.sources import read_rows

    config = load_config(config_path, overrides).config
    path = config.model.path
    if Path(path).is_dir():
        yield f"model {path}: a local folder"
    else:
        try:
            folder = Path(snapshot_download(path, allow_patterns=MODEL_FILES))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model.path={path}: the hub does not give it ({type(error).__name__}: {reason}); correct the path, log in "
                "(hf auth login) for a gated model, or unset HF_HUB_OFFLINE"
            ) from None
        _compare(path, folder)
        yield f"model {path}: {folder}"
    for dataset in (config.data.train, *config.evaluation.benchmarks):
        yield f"data {dataset.path} ({dataset.split}): {len(read_rows(dataset))} rows"
    if wheels is not None:
        yield _fetch_wheels(wheels)


def _compare(path: str, folder: Path) -> None:
    """The architecture that `plan` assumed for a hub id must be the one that came."""
    known = KNOWN_MODELS.get(path)
    found = read_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if known is not None and read_spec(known) != found:
        raise ConfigError(f"{path} is not what `plan` assumes: {found} instead of {read_spec(known)}; report this")


def _fetch_wheels(target: Path) -> str:
    lock = Path(__file__).parents[2] / "requirements" / "base.lock"
    if not lock.is_file():
        raise DataError(f"{lock} is missing; run `fetch --wheels` from a checkout")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(target), "-r", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"pip download: {' '.join(done.stderr.split())[-300:]}; see `pip download -r {lock.name}`")
    return (
        f"wheels in {target}; on the cluster: pip install --no-index --find-links {target} -r requirements/{lock.name}"
    )
