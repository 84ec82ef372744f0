"""Model repositories of the Hugging Face hub: names, the files of a model, and the local snapshot.

Every caller requests the same files: offline, the hub's client rejects a snapshot with fewer files
than requested.
"""

from pathlib import Path
from typing import Any

from pacs_megatron.config.text import local_path
from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.waiting import hub_wait

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""The files of a model: no code, no pickled weights"""


def snapshot(name: str, *, local_files_only: bool = False) -> Path:
    """Folder of the repository's model files, downloaded unless the local cache has them.

    Raises the hub client's errors (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) and
    OSError.
    """
    with hub_wait(name):
        return Path(download(name, local_files_only=local_files_only))


def download(name: str, **options: Any) -> Any:
    """`snapshot_download` of a model's files.

    Raises OSError also for a reply that describes no model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return snapshot_download(name, allow_patterns=list(HUB_FILES), **options)
    except (OSError, HFValidationError):
        raise
    except Exception as error:  # noqa: BLE001  (the client passes on errors of its libraries)
        raise OSError(f"malformed reply or address: {type(error).__name__}: {error}") from None


def config_folder(folder: Path) -> Path:
    """The folder with config.json and tokenizer: `hf/` of a Megatron checkpoint, else the folder
    itself.
    """
    has_config = (folder / "config.json").is_file()
    inner = folder / "hf"
    return inner if inner.is_dir() and not has_config else folder


def model_folder(path: str, key: str = "model.path", *, local_files_only: bool = False) -> Path:
    """The `config_folder` of a local model, or the local copy of a hub id.

    Args:
        path: Folder or hub id.
        key: Configuration key of `path`, for messages.
        local_files_only: Use the local cache of the hub, without network.

    Raises:
        CheckpointError: There is no such model.
    """
    folder = local_path(path)
    if folder.is_dir():
        return config_folder(folder)

    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot(path, local_files_only=local_files_only)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        place = "the local cache (HF_HOME)" if local_files_only else "the hub"
        raise CheckpointError(
            f"{key}={path}: no such folder, and {place} has no such model "
            f"({type(error).__name__}); correct the path, or run `pacs-megatron fetch` on a "
            "machine with network"
        ) from error
