"""Files outside of the package's code that an installation includes: configurations, Slurm scripts, locks."""

from pathlib import Path

from pacs_megatron.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """`configs`, `slurm` or `requirements`: inside the installed package, or at the top of a checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def run_file(text: str) -> Path:
    """The file of a run: a path, or the name of a shipped one, such as `pacs-qwen3-8b-1n8g-tp2`."""
    return _named_file("runs", text)


def cluster_file(text: str) -> Path:
    """The file of a cluster: a path, or the name of a shipped one, such as `example-bare`."""
    return _named_file("clusters", text)


def _named_file(kind: str, text: str) -> Path:
    """Raises ConfigError for a name that is neither a file nor shipped."""
    path = Path(text)
    if path.exists() or path.suffix in (".yaml", ".yml") or path.name != text:
        return path
    folder = shipped_folder("configs") / kind
    found = folder / f"{text}.yaml"
    if not found.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise ConfigError(f"{text}: neither a file nor a shipped configuration; give a path or one of {names}")
    return found
