"""Files outside of the package's code that an installation includes: configurations, Slurm scripts,
locks.
"""

import os
from pathlib import Path

from pacs_megatron.config.text import near_file
from pacs_megatron.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """`configs`, `slurm` or `requirements`: inside the installed package, or at the top of a
    checkout.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def run_file(text: str, kind: str = "runs") -> Path:
    """The path of a configuration that the user named.

    Args:
        text: A path, or the name of a shipped configuration, such as `pacs-qwen3-8b-1n8g-tp2`.
        kind: Folder of the shipped configurations, below `configs`.

    Raises:
        ConfigError: `text` is neither.
    """
    path = Path(os.path.expanduser(text))
    is_plain_name = path.name == text and path.suffix not in (".yaml", ".yml")
    if path.exists() or not is_plain_name:
        return path

    folder = shipped_folder("configs") / kind
    file = folder / f"{text}.yaml"
    if not file.is_file():
        names = sorted(shipped.stem for shipped in folder.glob("*.yaml"))
        near = near_file(path) or did_you_mean(text, names)
        raise ConfigError(
            f"{text}: neither a file nor a shipped configuration{near or ';'} give a path or one "
            f"of {', '.join(names)}"
        )
    return file


def cluster_file(text: str) -> Path:
    """Same as `run_file` for the configuration of a cluster, such as `example-bare`."""
    return run_file(text, "clusters")
