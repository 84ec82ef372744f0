"""`fetch`: on a machine with a network, bring what a run needs into the local caches; jobs then run offline.

A connection that breaks is taken up again near where it broke; given again, the command keeps every whole file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.errors import ConfigError, DataError, PacsError
from pacs_megatron.models import read_spec
from pacs_megatron.models.hub import HUB_FILES, snapshot
from pacs_megatron.plan.constants import GIB
from pacs_megatron.plan.known_models import KNOWN_MODELS
from pacs_megatron.preflight.check import existing_parent

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

LOCK = Path(__file__).parents[2] / "requirements" / "base.lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def fetch(config_path: Path, overrides: Sequence[str], *, wheels: Path | None) -> Iterator[str]:
    """Yields a line for each thing that is now local.

    Raises ConfigError for what cannot be had, with the reason, and DataError for a data set that cannot be read.
    """
    config = load_config(config_path, overrides).config
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigError("HF_HUB_OFFLINE is set, and `fetch` is there to use the network; unset it for this command")
    yield _fetch_model(config.model.path)
    for dataset in (config.data.train, *config.evaluation.benchmarks):
        yield _fetch_data(dataset)
    if wheels is not None:
        yield fetch_wheels(wheels)


# --------------------------------------------------------------------------------------------------------------- model
def _fetch_model(path: str) -> str:
    if Path(path).is_dir():
        return f"model {path}: a local folder"
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        wanted = snapshot_download(path, allow_patterns=list(HUB_FILES), dry_run=True)
        num_bytes = sum(file.file_size or 0 for file in wanted)
        _check_room(path, wanted)
        folder = snapshot(path)
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise _named(path, error) from None
    if not any(file.filename.endswith(".safetensors") for file in wanted):
        raise ConfigError(f"model.path={path} has no .safetensors files; choose a repository that has")
    _compare(path, folder)
    return f"model {path}: {folder}, {len(wanted)} files, {num_bytes / GIB:.2f} GiB"


def _check_room(path: str, wanted: Sequence[DryRunFileInfo]) -> None:
    """Before the first byte: nobody wants to learn it after an hour."""
    from huggingface_hub import constants

    missing = sum(file.file_size or 0 for file in wanted if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(existing_parent(cache)).free
    if missing > free:
        raise ConfigError(
            f"model.path={path} needs {missing / GIB:.1f} GiB more and {cache} has {free / GIB:.1f} GiB left; make room, "
            "or set HF_HOME to another folder"
        )


def _named(path: str, error: Exception) -> PacsError:
    """One line with what to do, for each way in which a download fails."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__  # the client looked into its cache after this one, in vain
    key, hub = f"model.path={path}", constants.ENDPOINT
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return ConfigError(
            f"{key}: no room left in {constants.HF_HUB_CACHE}; make room, or set HF_HOME, and run it again"
        )
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{key} is gated; accept its terms at {hub}/{path}, log in (hf auth login) and run it again")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{key} is neither a folder nor a hub id (name/name); correct the path")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return ConfigError(f"{key}: {hub} has no such repository, or it is private; correct it, or hf auth login")
    if status is not None:
        return ConfigError(f"{key}: {hub} answers HTTP {status} ({reason}); run it again later")
    return ConfigError(
        f"{key}: {hub} was not reached, or the download broke off ({type(error).__name__}: {reason}); run it again where "
        "there is a network: whole files are kept. Proxies: HTTPS_PROXY; a mirror: HF_ENDPOINT"
    )


def _compare(path: str, folder: Path) -> None:
    """The architecture that `plan` assumed for a hub id must be the one that came."""
    known = KNOWN_MODELS.get(path)
    found = read_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if known is not None and read_spec(known) != found:
        raise ConfigError(f"{path} is not what `plan` assumes: {found} instead of {read_spec(known)}; report this")


# ---------------------------------------------------------------------------------------------------------------- data
def _fetch_data(dataset: DatasetOptions) -> str:
    import httpx

    from pacs_megatron.data.sources import read_rows

    try:
        count = len(read_rows(dataset))
    except httpx.HTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"data {dataset.path}: the download broke off ({type(error).__name__}: {reason}); run it again"
        ) from None
    return f"data {dataset.path} ({dataset.split}): {count} rows"


# -------------------------------------------------------------------------------------------------------------- wheels
def fetch_wheels(target: Path, lock: Path = LOCK) -> str:
    """All wheels of the lock, for this interpreter and platform; what is there already is not loaded again."""
    if not lock.is_file():
        raise DataError(f"{lock} is missing; run `fetch --wheels` from a checkout")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--dest", str(target), "--find-links", str(target), "-r", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = " ".join(lines[-1].split())[:300] if lines else f"pip ended with {done.returncode}"
        raise ConfigError(f"fetch --wheels {target}: {reason}; look at the index (pip config list) and the room there")
    files = sorted(target.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    return (
        f"{len(files)} wheels in {target}, {size / GIB:.2f} GiB; where there is no network: "
        f"make install PIP_ARGS='--no-index --find-links {target}'"
    )
