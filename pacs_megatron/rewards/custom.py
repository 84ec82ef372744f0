"""A user's own function, named in the configuration."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import ConfigError, RewardError


class Custom:
    """Calls `function(prompt, response)`; the reward is its number, as a float."""

    def __init__(self, function: str) -> None:
        """`function` is `module:function` or `path/to/file.py:function`. Raises ConfigError when it cannot be called."""
        self._name = function
        self._function = _load(function)

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Raises RewardError when the function raises or returns no number."""
        try:
            value = self._function(prompt, response)
        except RewardError:
            raise
        except Exception as error:  # a plug-in may raise anything: it is this sample's failure, not the run's
            raise RewardError(f"reward.function={self._name} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, int | float):
            raise RewardError(f"reward.function={self._name} returned {type(value).__name__}, expected a float")
        return float(value)


def _load(function: str) -> Callable[[Prompt, str], Any]:
    where, _, attribute = function.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"reward.function={function!r}: expected module:function or path/to/file.py:function")
    module = _load_file(where, function) if where.endswith(".py") else _load_module(where, function)
    if not hasattr(module, attribute):
        raise ConfigError(f"reward.function={function!r}: {where} has no {attribute!r}; define it or correct the name")
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"reward.function={function!r} is a {type(found).__name__}, expected a function")
    try:
        inspect.signature(found).bind("prompt", "response")
    except TypeError as error:
        raise ConfigError(
            f"reward.function={function!r} cannot be called as f(prompt, response): {error}; give it these two arguments"
        ) from error
    return found  # type: ignore[no-any-return]


def _load_module(name: str, function: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module runs here and may raise anything
        raise ConfigError(_import_message(function, name, error)) from error


def _load_file(path: str, function: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"reward.function={function!r}: no file {file}; correct the path")
    name = f"pacs_custom_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.function={function!r}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as in _load_module
        raise ConfigError(_import_message(function, str(file), error)) from error
    return module


def _import_message(function: str, where: str, error: Exception) -> str:
    return (
        f"reward.function={function!r}: importing {where} raised {type(error).__name__}: {error}; "
        "it must be importable by the reward workers"
    )
