"""Files outside of the package's code that an installation includes: configurations, Slurm scripts,
locks.
"""

from pathlib import Path

from pacs_megatron.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """`configs`, `slurm` or `requirements`: inside the installed package, or at the top of a
    checkout.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def run_file(text: str, kind: str = "runs") -> Path:
    """A path, or the file of a shipped configuration, such as `pacs-qwen3-8b-1n8g-tp2`.

    Raises ConfigError.
    """
    path = Path(text)
    if path.exists() or path.suffix in (".yaml", ".yml") or path.name != text:
        return path
    folder = shipped_folder("configs") / kind
    found = folder / f"{text}.yaml"
    if not found.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise ConfigError(
            f"{text}: neither a file nor a shipped configuration; give a path or one of {names}"
        )
    return found


def cluster_file(text: str) -> Path:
    """As `run_file`, of a cluster, such as `example-bare`."""
    return run_file(text, "clusters")
