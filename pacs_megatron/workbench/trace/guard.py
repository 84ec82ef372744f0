"""Autograd over fake CUDA tensors in a torch that finds no GPU.

`load_guard` runs before the first import of torch, so this module imports nothing that imports it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.waiting import try_program

SOURCE = Path(__file__).with_name("guard.cpp")
_COMPILE_LIMIT_S = 600.0


def load_guard() -> ctypes.CDLL:
    """Compiles guard.cpp once for the installed torch, and loads it.

    Returns:
        The library; `install_guard` completes the work after the import of torch.

    Raises:
        ConfigError: if torch was imported already, or the C++ compiler or torch's headers are
            missing or do not fit.
    """
    if "torch" in sys.modules:
        raise ConfigError("the guard of fake CUDA must be loaded before torch is imported")

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("torch is not installed; run `make install`")
    torch_dir = Path(next(iter(spec.submodule_search_locations)))

    library = cache_folder() / f"guard-{_digest()}.so"
    if not library.is_file():
        _compile(torch_dir, library)
    try:
        # torch's library first, where this one finds its symbols.
        ctypes.CDLL(str(torch_dir / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ConfigError(f"{library}: {error}; remove the file and try again") from None


def install_guard(library: ctypes.CDLL) -> None:
    """Completes `load_guard` after the import of torch.

    Raises:
        ConfigError: if torch does not use the guard.
    """
    if not library.pacs_install_guard():
        raise ConfigError(
            f"torch {importlib.metadata.version('torch')} created its CUDA hooks before the fake "
            "ones were loaded; fake CUDA does not work with this version"
        )


def cache_folder() -> Path:
    """The folder of what may be made again: the compiled guard and traces."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pacs_megatron"


def _digest() -> str:
    """Of everything that the library depends on."""
    parts = [SOURCE.read_text(), importlib.metadata.version("torch"), sys.version]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(torch_dir: Path, library: Path) -> None:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"fake CUDA needs a C++ compiler, and {compiler!r} is not on PATH; install g++, or set "
            "CXX to a compiler"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first: several processes may compile at once.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [
            compiler,
            *("-std=c++20", "-O0", "-shared", "-fPIC"),
            f"-I{torch_dir / 'include'}",
            str(SOURCE),
            *("-o", str(built)),
        ]
        result = try_program(command, timeout_s=_COMPILE_LIMIT_S)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            reason = lines[0] if lines else f"exit code {result.returncode}"
            raise ConfigError(f"{compiler} cannot compile {SOURCE.name}: {reason}")
        built.replace(library)
