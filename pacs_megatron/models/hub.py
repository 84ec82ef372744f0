"""Model repositories of the Hugging Face hub: names, the files of a model, and the local snapshot.

Every caller requests the same files: offline, the hub's client rejects a snapshot with fewer files than requested.
"""

from pathlib import Path

from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.waiting import hub_wait

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def snapshot(name: str, *, local_files_only: bool = False) -> Path:
    """Folder of the repository's model files, downloaded unless the local cache has them; no code, no pickled weights.

    Raises the hub client's errors (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) and OSError.
    """
    from huggingface_hub import snapshot_download

    with hub_wait(name):
        return Path(snapshot_download(name, local_files_only=local_files_only, allow_patterns=list(HUB_FILES)))


def config_folder(folder: Path) -> Path:
    """The folder with config.json and tokenizer: `hf/` of a Megatron checkpoint, else the folder itself."""
    inner = folder / "hf"
    return inner if inner.is_dir() and not (folder / "config.json").is_file() else folder


def model_folder(path: str, key: str = "model.path", *, local_files_only: bool = False) -> Path:
    """The `config_folder` of the model that `key` names: of a local folder, or the local copy of a hub id.

    Raises CheckpointError for anything else.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return config_folder(folder)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot(path, local_files_only=local_files_only)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        where = "the local cache (HF_HOME)" if local_files_only else "the hub"
        raise CheckpointError(
            f"{key}={path}: no such folder, and {where} has no such model ({type(error).__name__}); correct the "
            "path, or run `pacs-megatron fetch` on a machine with network"
        ) from error
