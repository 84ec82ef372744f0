"""Replacements of CUDA-only packages: every import works, every call raises NotImplementedError.

SGLang imports names from `sgl_kernel` and `torchvision` at module level on every device; neither
package loads without CUDA. A dense text model on CPU calls none of them.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, NoReturn


class CudaOnly:
    """A name that exists; calling it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} needs CUDA; this is the CPU replacement of tests/support/sglang_cpu"
        )

    def __getattr__(self, name: str) -> "CudaOnly":
        if name.startswith("__"):
            raise AttributeError(name)
        return CudaOnly(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `<package>.<anything>` as an empty module whose attributes are CudaOnly, except the
    modules that exist.
    """

    def __init__(self, package: str, existing: tuple[str, ...]) -> None:
        self.prefix = package + "."
        self.existing = frozenset(self.prefix + name for name in existing)

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self.prefix) or fullname in self.existing:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = attribute_of(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def attribute_of(module: str) -> Any:
    """The module-level `__getattr__` of a replacement."""

    def get(name: str) -> CudaOnly:
        if name.startswith("__"):
            raise AttributeError(name)
        return CudaOnly(f"{module}.{name}")

    return get


def install(package: str, *existing: str) -> Any:
    """Registers the finder of submodules; returns the package's own `__getattr__`.

    Args:
        package: its name.
        existing: submodules that have a file of their own.
    """
    sys.meta_path.insert(0, _Submodules(package, existing))
    return attribute_of(package)
