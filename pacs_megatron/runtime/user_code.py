"""Imports a function that the configuration names: `module:function` or `path/to/file.py:function`.

The module's own code runs, and may raise anything.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pacs_megatron.errors import ConfigError, shown


def describe(error: BaseException) -> str:
    """One line for any exception, even if its `__str__` raises."""
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # noqa: BLE001  text of a plug-in: it may raise anything
        text = f"no text, its __str__ raised {type(second).__name__}"
    return f"{type(error).__name__}: {text}"[:1000]


def import_function(name: str, key: str) -> Callable[..., Any]:
    """The function.

    Args:
        name: `module:function` or `path/to/file.py:function`; a path is absolute, or relative to
            the working directory.
        key: of the configuration, for messages.

    Raises:
        ConfigError: it is not found, its module cannot be imported, or it cannot be called.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"{key}={name!r}: expected module:function or path/to/file.py:function")
    file = None
    if where.endswith(".py"):
        file = Path(os.path.realpath(os.path.expanduser(where)))
        if not file.is_file():
            raise ConfigError(f"{key}={shown(name, 300)}: no file {file}; correct the path")
    try:
        module = importlib.import_module(where) if file is None else _load_file(file)
    except BaseException as error:  # the user's module runs here and may raise anything
        raise ConfigError(
            f"{key}={name!r}: importing {file or where} raised {describe(error)}; the workers must "
            "be able to import it"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise ConfigError(f"{key}={name!r}: {attribute} is {kind} there, expected a function")
    function: Callable[..., Any] = found
    return function


def _load_file(file: Path) -> ModuleType:
    name = f"pacs_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the module runs, because dataclasses look it up there
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a module beside it replaces no installed one
    spec.loader.exec_module(module)
    return module
