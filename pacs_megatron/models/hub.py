"""Model repositories of the Hugging Face hub: names, the files of a model, and the local snapshot.

Every caller requests the same files: offline, the hub's client rejects a snapshot with fewer files than requested.
"""

from pathlib import Path

from pacs_megatron.config.text import HUB_ID
from pacs_megatron.runtime.waiting import hub_wait

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a repository: `name` or `owner/name`."""
    return HUB_ID.fullmatch(name) is not None


def snapshot(name: str, *, local_files_only: bool = False) -> Path:
    """Folder of the repository's model files, downloaded unless the local cache has them; no code, no pickled weights.

    Raises the hub client's errors (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) and OSError.
    """
    from huggingface_hub import snapshot_download

    with hub_wait(name):
        return Path(snapshot_download(name, local_files_only=local_files_only, allow_patterns=list(HUB_FILES)))
