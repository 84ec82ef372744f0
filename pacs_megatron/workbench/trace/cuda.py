"""torch.cuda on a host without a GPU: what a process of eight GPUs would see.

Only queries and calls without a numeric effect are replaced; no operation on tensors is.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

DEVICE = torch.device("cuda", 0)

# Replaced without their types: that they are replaced is the purpose of this module.
_cuda: Any = torch.cuda
_tensor_class: Any = torch.Tensor
_storage_class: Any = torch.UntypedStorage
_module_class: Any = torch.nn.Module
_fake_tensor: Any = fake_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPU that the process pretends to have."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] = (9, 0)
    per_node: int = 8


_on_wait: list[Callable[[str], None]] = []
"""called when the host waits for the GPU"""


def _wait(operation: str) -> None:
    for call in _on_wait:
        call(operation)


class _Stream:
    """A stream that is always idle."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.cuda_stream = 0
        self.device = DEVICE

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, *_args: object) -> None: ...

    def wait_stream(self, *_args: object) -> None: ...

    def synchronize(self) -> None:
        _wait("Stream.synchronize")

    def query(self) -> bool:
        return True


class _Event:
    """An event that has always happened."""

    def __init__(self, *_args: object, **_options: object) -> None: ...

    def record(self, *_args: object) -> None: ...

    def wait(self, *_args: object) -> None: ...

    def synchronize(self) -> None:
        _wait("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_args: object) -> float:
        return 0.0


def replace_cuda(
    gpu: GpuFacts,
    on_resize: Callable[[torch.UntypedStorage], None],
    on_wait: Callable[[str], None],
) -> None:
    """Replaces the queries of torch.cuda for the rest of this process.

    Args:
        gpu: what the queries answer.
        on_resize: called after each `UntypedStorage.resize_`, which is not an operation of the
            dispatcher.
        on_wait: called with the name of each function that waits for the GPU.
    """
    _on_wait[:] = [on_wait]
    _replace_queries(gpu)
    _replace_streams()
    _replace_generators(gpu.per_node)
    _replace_tensor_methods(on_resize)

    _fake_tensor.init_gpu_context = lambda *_args, **_options: None
    _module_class._apply = _apply


def _replace_queries(gpu: GpuFacts) -> None:
    properties = types.SimpleNamespace(
        total_memory=gpu.memory_bytes,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=132,
        name=gpu.name,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65536,
    )
    answers: dict[str, object] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": gpu.per_node,
        "current_device": 0,
        "_lazy_init": None,
        "init": None,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "set_device": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "is_current_stream_capturing": False,
        "ipc_collect": None,
        "memory_stats": {},
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        "is_bf16_supported": True,
        "can_device_access_peer": True,
    }
    for name, answer in answers.items():
        setattr(_cuda, name, _constant(answer))
    _cuda.synchronize = lambda *_args, **_options: _wait("cuda.synchronize")

    _cuda.nvtx.range_push = _constant(0)
    _cuda.nvtx.range_pop = _constant(0)
    cudart = types.SimpleNamespace(cudaHostRegister=_constant(0), cudaHostUnregister=_constant(0))
    _cuda.cudart = _constant(cudart)


def _constant(answer: object) -> Callable[..., Any]:
    return lambda *_args, **_options: answer


def _replace_streams() -> None:
    stream = _Stream()
    _cuda.Stream = _Stream
    _cuda.Event = _Event
    _cuda.current_stream = _constant(stream)
    _cuda.default_stream = _constant(stream)
    _cuda.set_stream = _constant(None)
    _cuda.stream = lambda *_args, **_options: contextlib.nullcontext()


def _replace_generators(count: int) -> None:
    generator = torch.Generator()
    replacements: dict[str, Any] = {
        "get_rng_state": lambda *_args, **_options: generator.get_state(),
        "set_rng_state": lambda state, *_args, **_options: generator.set_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
    }
    _cuda.default_generators = (generator,) * count
    for name, replacement in replacements.items():
        setattr(_cuda, name, replacement)
        setattr(_cuda.random, name, replacement)


def _replace_tensor_methods(on_resize: Callable[[torch.UntypedStorage], None]) -> None:
    _tensor_class.record_stream = _constant(None)
    _tensor_class.pin_memory = lambda self, *_args, **_options: self
    _tensor_class.is_pinned = _constant(False)

    real_resize = _storage_class.resize_
    real_numpy = _tensor_class.numpy

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        resized = real_resize(self, size)
        on_resize(self)
        return resized

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        if isinstance(self, FakeTensor):
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy at {call_site()}"
            )
        return real_numpy(self, **options)

    _storage_class.resize_ = resize
    _tensor_class.numpy = numpy


def _apply(
    self: torch.nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
    changed: dict[int, torch.Tensor] | None = None,
) -> torch.nn.Module:
    """Module._apply with new Parameters.

    torch assigns to `param.data` on a GPU, and swaps fake tensors instead, which fails because the
    mode refers to them weakly. So attributes move to the new Parameter.
    """
    changed = {} if changed is None else changed
    if recurse:
        for module in self.children():
            if type(module)._apply is _apply:
                _apply(module, change, recurse, changed)
            else:
                module._apply(change)  # type: ignore[no-untyped-call]

    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        moved = changed.get(id(parameter))
        if moved is None:
            with torch.no_grad():
                moved = change(parameter)
        if moved.device == parameter.device and moved.dtype == parameter.dtype:
            continue
        if not isinstance(moved, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
        changed[id(parameter)] = moved
        self._parameters[name] = moved

    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = change(buffer)
    return self


def call_site(skip: int = 1, limit: int = 3) -> str:
    """The innermost frames outside of torch and this package, as file:line."""
    frames = itertools.islice(_program_frames(skip + 2), limit)
    return " < ".join(f"{file}:{frame.f_lineno}" for file, frame in frames)


def call_function(skip: int = 1) -> str:
    """The innermost function outside of torch and this package, as file:function.

    A function inside of another has the outer one's name; comprehensions are none of their own in
    Python 3.12.
    """
    for file, frame in _program_frames(skip + 2):
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        return f"{file}:{name}"
    return ""


def _program_frames(skip: int) -> Iterator[tuple[str, types.FrameType]]:
    """Frames outside of torch and this package, innermost first, each with its short file name."""
    frame: types.FrameType | None = sys._getframe(skip)
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = "/workbench/trace/" in file or file.endswith("contextlib.py")
        if "/torch/" not in file and not is_own and "<" not in file:
            short = file.split("/site-packages/")[-1]
            if "/pacs_megatron/" in short:
                short = "pacs_megatron/" + short.rpartition("/pacs_megatron/")[2]
            yield short, frame
        frame = frame.f_back
