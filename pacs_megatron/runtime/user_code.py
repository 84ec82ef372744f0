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

from pacs_megatron.config.text import local_path, near_file
from pacs_megatron.errors import ConfigError, shown

_MAX_TEXT = 1000
"""Characters of an exception in a message"""


def describe(error: BaseException, *, named: bool = True) -> str:
    """One line for any exception, even if its `__str__` raises.

    Args:
        error: The exception.
        named: The line starts with the exception's type.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # noqa: BLE001  text of a plug-in: it may raise anything
        text = f"no text, its __str__ raised {type(second).__name__}"
    if named:
        text = f"{type(error).__name__}: {text}"
    return text[:_MAX_TEXT]


def find_file(name: str, key: str) -> Path | None:
    """The file of `path/to/file.py:function`, None for a module's function.

    Args:
        name: `module:function` or `path/to/file.py:function`; a path is absolute, or relative to
            the working directory.
        key: of the configuration, for messages.

    Raises:
        ConfigError: `name` has another form, or the file does not exist.
    """
    path, _, attribute = name.rpartition(":")
    if not path or not attribute or path.endswith(":"):
        raise ConfigError(
            f"{key}={shown(name, 300)}: expected module:function or path/to/file.py:function"
        )
    if not path.endswith(".py"):
        return None
    file = Path(os.path.realpath(local_path(path)))
    if not os.path.isfile(file):
        raise ConfigError(
            f"{key}={shown(name, 300)}: no file {shown(str(file), 300)}; correct the path"
            f"{near_file(file)}"
        )
    return file


def import_function(name: str, key: str) -> Callable[..., Any]:
    """The function.

    Args:
        name: as for `find_file`.
        key: of the configuration, for messages.

    Raises:
        ConfigError: it is not found, its module cannot be imported, or it cannot be called.
    """
    file = find_file(name, key)
    where, _, attribute = name.rpartition(":")
    try:
        module = importlib.import_module(where) if file is None else _load_file(file)
    except BaseException as error:  # the user's module runs here and may raise anything
        raise ConfigError(
            f"{key}={name!r}: importing {file or where} raised {describe(error)}; the worker "
            "processes must be able to import it"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{key}={name!r}: {where} has no {attribute!r}; define it or correct the name"
        )
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"{key}={name!r} is a {type(found).__name__}, expected a function")
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
