"""`fetch`: downloads the model and data of a run to the local caches, so that jobs run offline.

Resumes an interrupted download, and keeps complete files.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.errors import ConfigError, DataError, PacsError
from pacs_megatron.models.hub import download, snapshot
from pacs_megatron.runtime.files import GIB, existing_parent, write_atomically
from pacs_megatron.runtime.waiting import hub_wait, report_wait

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def fetch(config_path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Downloads everything; yields one line per item.

    Raises:
        ConfigError: a download failed.
        DataError: a data set is not readable.
    """
    config = load_config(config_path, overrides).config
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigError(
            "HF_HUB_OFFLINE is set, but `fetch` uses the network; unset it for this command"
        )
    yield _fetch_model("model.path", config.model.path)
    for key, path in config.objective.other_models.items():
        yield _fetch_model(key, path)
    for dataset in (*config.data.train_sets, *config.evaluation.benchmarks):
        yield _fetch_data(dataset)


@report_wait("for the hub to send the model")
def _fetch_model(key: str, path: str) -> str:
    if Path(path).is_dir():
        return f"model {path}: a local folder"
    import httpx
    from huggingface_hub.errors import HFValidationError

    try:
        with hub_wait(path):
            files = download(path, dry_run=True)
        num_bytes = sum(file.file_size or 0 for file in files)
        num_missing_bytes = sum(file.file_size or 0 for file in files if file.will_download)
        _check_free_space(key, path, num_missing_bytes)
        folder = snapshot(path)
        _write_reference(folder)
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise _download_error(key, path, error) from None

    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ConfigError(f"{key}={path} has no .safetensors files; choose a repository that has")
    return f"model {path}: {folder}, {len(files)} files, {num_bytes / GIB:.2f} GiB"


def _write_reference(snapshot_folder: Path) -> None:
    """Writes the name of the default revision's snapshot, which an offline job needs.

    The hub's client ignores a failed write.
    """
    from huggingface_hub import constants

    reference = snapshot_folder.parents[1] / "refs" / constants.DEFAULT_REVISION
    name = snapshot_folder.name
    if not reference.is_file() or reference.read_text(encoding="utf-8") != name:
        write_atomically(reference, [name.encode()])


def _check_free_space(key: str, path: str, num_missing_bytes: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(existing_parent(cache)).free
    if num_missing_bytes > free:
        raise ConfigError(
            f"{key}={path} needs {num_missing_bytes / GIB:.1f} GiB more, but {cache} has "
            f"{free / GIB:.1f} GiB free; free some space, or set HF_HOME to another folder"
        )


def _download_error(key: str, path: str, error: Exception) -> PacsError:
    """The one-line error for each failure of a download."""
    from huggingface_hub import constants, errors

    is_wrapped = isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError)
    if is_wrapped and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the original error, before the fallback to the cache
    hub = constants.ENDPOINT
    reason = " ".join(str(error).split())[:200]
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None

    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        text = (
            f"cannot write {constants.HF_HUB_CACHE} ({error.strerror}); free some space, or set "
            "HF_HOME to another folder"
        )
    elif isinstance(error, errors.GatedRepoError):
        text = f"gated; accept its terms at {hub}/{path}, log in (`hf auth login`) and run it again"
    elif isinstance(error, errors.HFValidationError):
        text = "neither a folder nor a hub id (name/name); correct the path"
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        text = (
            f"{hub} has no such repository, or it is private; correct the id, or run "
            "`hf auth login`"
        )
    elif status is not None:
        text = f"{hub} returned HTTP {status} ({reason}); run it again later"
    else:
        text = (
            f"{hub} is unreachable, or the download was interrupted ({type(error).__name__}: "
            f"{reason}); run it again with network access: complete files are kept. Set "
            "HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror"
        )
    return ConfigError(f"{key}={path}: {text}")


@report_wait("for the hub to send the data")
def _fetch_data(dataset: DatasetOptions) -> str:
    import httpx

    from pacs_megatron.data.sources import read_rows

    try:
        rows = read_rows(dataset)
    except httpx.HTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"data {dataset.path}: the download was interrupted ({type(error).__name__}: "
            f"{reason}); run it again"
        ) from None
    filtered = f", {rows.num_filtered} outside `where`" if dataset.where else ""
    paths = ", ".join(dataset.paths)
    return f"data {paths} ({dataset.split}): {len(rows.used)} rows{filtered}"
