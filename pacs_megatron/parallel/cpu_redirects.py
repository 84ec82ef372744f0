"""Runs Megatron-Core on a host without CUDA; no other module redirects CUDA calls.

Megatron-Core uses CUDA directly and has no CPU mode. Without CUDA, `install` replaces the global
name `torch` in every `megatron.core` module, loaded or not yet imported, by a stand-in that sends
those calls to the CPU and all others to the real torch. The torch module itself does not change.
With CUDA, `install` does nothing.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from pacs_megatron.parallel import delta_rule

PREFIX = "megatron.core"
_CUDA_ONLY = ("transformer_engine", "apex", "amp_C")
"""packages whose optimizers and norms need a GPU; Megatron would use them if they are installed"""
_CPU = torch.device("cpu")
_FACTORIES = ("arange", "as_tensor", "eye", "rand", "randint", "randn", "tensor")
_FACTORIES_WITH_LIKE = ("empty", "full", "ones", "zeros")
"""factories of which torch also has a `_like` function"""


class _Event(torch.cpu.Event):
    """Takes the arguments of torch.cuda.Event. CPU calls are synchronous."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...


class _Stream(torch.cpu.Stream):
    """Takes the arguments of torch.cuda.Stream: one queue, always empty."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def record_event(self, *_args: object) -> _Event:  # type: ignore[override]
        return _Event()


class _CudaOnCpu(ModuleType):
    """Replaces torch.cuda by torch.cpu; other attributes come from the real module."""

    Event = _Event
    Stream = _Stream
    synchronize = staticmethod(torch.cpu.synchronize)
    manual_seed = staticmethod(torch.manual_seed)

    @staticmethod
    def get_rng_state(*_args: object) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_args: object) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def empty_cache() -> None:
        """Does nothing, because the CPU has no caching allocator."""

    @staticmethod
    def current_stream(*_args: object) -> _Stream:
        return _Stream()

    @staticmethod
    def default_stream(*_args: object) -> _Stream:
        return _Stream()

    @staticmethod
    def stream(_stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(ModuleType):
    """Replaces the name `torch` inside Megatron's modules."""

    cuda = _CudaOnCpu("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory` with `device="cpu"` in place of any CUDA device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    call.__name__ = factory.__name__
    return call


def _build_stand_in() -> _TorchOnCpu:
    stand_in = _TorchOnCpu("torch")
    like_factories = [f"{name}_like" for name in _FACTORIES_WITH_LIKE]
    for name in (*_FACTORIES, *_FACTORIES_WITH_LIKE, *like_factories):
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    return stand_in


_STAND_IN = _build_stand_in()


def _get_rng_state(*_args: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: object, **_options: object) -> None:
    torch.set_rng_state(state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_REPLACED: dict[str, dict[str, Any]] = {
    # Megatron's functions reach into torch.cuda's private generators.
    f"{PREFIX}.tensor_parallel.random": {
        "_get_cuda_rng_state": _get_rng_state,
        "_set_cuda_rng_state": _set_rng_state,
    },
    # Megatron's function converts the sizes of an all-to-all to numpy only when they come from a
    # GPU. gloo needs numpy too.
    f"{PREFIX}.transformer.moe.token_dispatcher": {
        "maybe_move_tensor_to_cpu": _on_host,
    },
    # torch.compile would need a C++ compiler, in every rank.
    f"{PREFIX}.jit": {
        "jit_fuser": _not_compiled,
    },
    # Triton kernels of flash-linear-attention, without which Megatron builds no gated delta net.
    f"{PREFIX}.ssm.gated_delta_net.common": {
        "HAVE_FLA": True,
        "causal_conv1d": delta_rule.causal_convolution,
        "chunk_gated_delta_rule": delta_rule.gated_delta_rule,
        "l2norm": delta_rule.normalized,
    },
}
"""module -> name -> replacement of what the stand-in for `torch` cannot redirect"""


def _redirect(module: ModuleType) -> None:
    """Replaces the CUDA calls of a loaded Megatron module."""
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _STAND_IN
    module.__dict__.update(_REPLACED.get(module.__name__, {}))


@contextlib.contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Inside the block, importing these packages fails as if they were not installed."""
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    # An entry None makes `import` raise ModuleNotFoundError.
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(loaded)


class _RedirectingFinder(importlib.abc.MetaPathFinder):
    """Redirects a Megatron module directly after its import."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _hidden(_CUDA_ONLY):
                execute(module)
            _redirect(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> bool:
    """Redirects Megatron's CUDA calls to the CPU if there is no CUDA.

    Returns whether they are redirected.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _RedirectingFinder) for finder in sys.meta_path):
        return True

    sys.meta_path.insert(0, _RedirectingFinder())
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX):
            _redirect(module)
    return True


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside the block CPU tensors claim to be on a GPU, if there is no CUDA.

    `Tensor.type()` returns `torch.cuda.FloatTensor` and the like, and `Tensor.cuda()` returns the
    tensor itself. Only Megatron's constructors (optimizer, tied embeddings) check these names.
    """
    if torch.cuda.is_available():
        yield
        return

    real_type = torch.Tensor.type
    real_cuda = torch.Tensor.cuda

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real_type(self, *args, **kwargs)
        if not isinstance(name, str) or name.startswith("torch.cuda."):
            return name
        if not name.startswith("torch."):
            return name
        return "torch.cuda." + name.removeprefix("torch.")

    def same_tensor(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = same_tensor  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real_type  # type: ignore[method-assign]
        torch.Tensor.cuda = real_cuda  # type: ignore[method-assign]
