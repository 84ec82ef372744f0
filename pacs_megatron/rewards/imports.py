"""The modules beside a file that it imports, found in the source without running it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed modules"""


def imported_beside(file: Path) -> dict[str, Path]:
    """Dotted name -> file of each module that `file` imports from its own folder or package.

    Directly, or through other such modules. Other imports, such as installed packages, are left
    out, and so are names that only exist at run time (`importlib.import_module(name)`).

    Args:
        file: A Python file; one with a syntax error imports nothing.
    """
    package = _package_of(file)
    root = file.parents[len(package)]
    # Neighbours of an installed single-file module are other projects.
    if not package and root.name in _INSTALLED:
        return {}

    found: dict[str, Path] = {}
    pending = [(file, package)]
    while pending:
        source, its_package = pending.pop()
        for name in _imported_names(source, its_package):
            if package and name.split(".")[0] != package[0]:
                continue
            module = _find(root, name)
            if module is None or module == file or name in found:
                continue
            found[name] = module
            parts = tuple(name.split("."))
            pending.append((module, parts if module.name == "__init__.py" else parts[:-1]))
    return found


def _package_of(file: Path) -> tuple[str, ...]:
    """The names of the packages around a file; empty if its folder has no `__init__.py`."""
    names: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return tuple(names)


def _imported_names(file: Path, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of modules that a file may import, with the packages around each."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            # `from a import b`: b may be a module.
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in names:
            parts = name.split(".")
            # A module beside the file replaces none of the standard library.
            if not name or parts[0] in sys.stdlib_module_names:
                continue
            for end in range(1, len(parts) + 1):
                yield ".".join(parts[:end])


def _find(root: Path, name: str) -> Path | None:
    """The file of a module below `root`."""
    path = root.joinpath(*name.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None
