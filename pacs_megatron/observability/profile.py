"""Profiles of some steps of this rank (`observability.profile`), in `profile/` of the run folder.

The phases of a step, the spans of its Timer, are ranges of the profile. In other steps nothing runs
but a comparison per span.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.observability.spans import Timer
from pacs_megatron.runtime.files import PARTIAL_SUFFIX
from pacs_megatron.runtime.run_folder import PROFILE_FOLDER

logger = logging.getLogger(__name__)

_MAX_MEMORY_EVENTS = 1_000_000
"""Number of the newest allocations and frees in a snapshot of memory"""


class Recorder(Protocol):
    """One kind of profile."""

    suffix: str
    """of the file; empty if another program writes it"""

    def start(self) -> None:
        """Starts recording."""

    def open_range(self, name: str) -> None:
        """Opens a range inside the ranges that are open."""

    def close_range(self) -> None:
        """Closes the innermost range."""

    def stop(self) -> None:
        """Ends recording."""

    def write(self, path: Path) -> None:
        """Writes what was recorded since the last `start`. Raises OSError or RuntimeError."""


class TorchTrace:
    """A trace of torch.profiler: operators, kernels and the phases."""

    suffix = ".pt.trace.json.gz"

    def __init__(self, device: torch.device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._activities = activities
        self._profile: torch.profiler.profile | None = None
        self._ranges: list[AbstractContextManager[Any]] = []

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=self._activities)
        self._profile.start()

    def open_range(self, name: str) -> None:
        opened = torch.profiler.record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._ranges.append(opened)

    def close_range(self) -> None:
        self._ranges.pop().__exit__(None, None, None)

    def stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()

    def write(self, path: Path) -> None:
        assert self._profile is not None
        self._profile.export_chrome_trace(str(path))
        self._profile = None  # frees its events


class NsysRange:
    """A capture range with NVTX ranges, for `nsys profile --capture-range=cudaProfilerApi`."""

    suffix = ""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]

    def open_range(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def close_range(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]

    def write(self, path: Path) -> None:
        """`nsys` writes its own report."""


class MemorySnapshot:
    """A snapshot of CUDA's caching allocator, with the stacks of all allocations."""

    suffix = ".memory.pickle"

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_MEMORY_EVENTS)

    def open_range(self, name: str) -> None:
        """A snapshot has no ranges."""

    def close_range(self) -> None:
        """A snapshot has no ranges."""

    def stop(self) -> None:
        """`write` ends the history, which it reads."""

    def write(self, path: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def recorder_of(options: ProfileOptions, device: torch.device) -> Recorder:
    """The recorder of `options.kind`."""
    if options.kind == "torch":
        return TorchTrace(device)
    return NsysRange() if options.kind == "nsys" else MemorySnapshot()


class StepProfiler:
    """Profiles the listed steps of one rank."""

    def __init__(
        self, options: ProfileOptions | None, run_dir: Path, rank: int, device: torch.device
    ) -> None:
        """Records nothing yet.

        Args:
            options: `observability.profile`; None, or without this rank: no step is profiled.
            run_dir: the run folder.
            rank: this rank.
            device: of this rank.
        """
        self._steps: frozenset[int] = frozenset()
        self._recorder: Recorder | None = None
        if options is not None and rank in options.ranks:
            self._steps = frozenset(options.steps)
            self._recorder = recorder_of(options, device)
        self._folder = run_dir / PROFILE_FOLDER
        self._rank = rank
        self._is_recording = False
        self._open: tuple[str, ...] = ()

    def watch(self, timer: Timer) -> None:
        """Makes the spans of `timer` ranges of the profiles."""
        if self._recorder is not None:
            timer.on_change(self._follow)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the body if `step` is listed. A body that raises leaves no file."""
        recorder = self._recorder
        if recorder is None or step not in self._steps:
            yield
            return

        try:
            recorder.start()
        except RuntimeError as error:  # another profiler records this process
            logger.warning("step %d has no profile of rank %d: %s", step, self._rank, error)
            yield
            return
        recorder.open_range(f"step {step}")
        self._is_recording = True
        try:
            yield
        finally:
            self._end(recorder)
        self._write(recorder, step)

    def _end(self, recorder: Recorder) -> None:
        self._follow(())
        self._is_recording = False
        recorder.close_range()
        recorder.stop()

    def _write(self, recorder: Recorder, step: int) -> None:
        """Writes the file. A profile that cannot be written does not end the run."""
        path = self._folder / f"rank{self._rank}.{step}{recorder.suffix}"
        # The name must keep its end, by which the compression is chosen.
        partial = self._folder / f"{PARTIAL_SUFFIX}.{path.name}"
        try:
            self._folder.mkdir(exist_ok=True)
            recorder.write(partial)
            if recorder.suffix:
                partial.replace(path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                partial.unlink()
            logger.warning("step %d has no profile of rank %d: %s", step, self._rank, error)
            return
        if recorder.suffix:
            logger.info("profile of step %d: %s", step, path)

    def _follow(self, phase: tuple[str, ...]) -> None:
        """Closes and opens ranges, so that the open ones are the spans `phase`."""
        if not self._is_recording:
            return
        assert self._recorder is not None
        num_same = 0
        for old, new in zip(self._open, phase, strict=False):
            if old != new:
                break
            num_same += 1
        for _ in self._open[num_same:]:
            self._recorder.close_range()
        for name in phase[num_same:]:
            self._recorder.open_range(name)
        self._open = phase


def device_span(
    timer: Timer, device: torch.device
) -> Callable[[str], AbstractContextManager[None]]:
    """A function that opens a span of `timer` with the work of a GPU inside.

    It waits for the current stream at both ends of the span, so only runs with step times use it.
    """

    @contextmanager
    def span(name: str) -> Iterator[None]:
        _drain(device)
        with timer.span(name):
            yield
            _drain(device)

    return span


def _drain(device: torch.device) -> None:
    """Waits for the kernels of the current stream; those of other streams may continue."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
