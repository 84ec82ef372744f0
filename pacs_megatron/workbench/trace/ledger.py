"""Bytes that live on the fake GPU, with the place that allocated them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import torch

BLOCK_BYTES = 512
"""CUDA's caching allocator rounds up to it (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)"""


@dataclass(frozen=True, slots=True)
class Label:
    """The place that allocated a storage."""

    phase: str
    module: str
    """path of the innermost module, layer numbers left out; empty outside of a forward"""
    operation: str

    @property
    def part(self) -> str:
        """The part of the model, or `state`: weights, gradients and optimizer."""
        if self.phase == "build":
            return "state"
        return self.module or "outside of modules"


@dataclass(frozen=True, slots=True)
class Moment:
    """The largest sum of live bytes at an allocation of one kind, within a phase."""

    phase: str
    label: Label
    """of the allocation"""
    num_bytes: int
    by_part: dict[str, int]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the largest sum of live bytes within a phase."""

    num_bytes: int
    by_label: Counter[Label]


@dataclass(slots=True)
class _Block:
    storage: weakref.ref[torch.UntypedStorage]
    serial: int
    num_bytes: int
    label: Label


@dataclass(frozen=True, slots=True)
class _Event:
    """A change of the live bytes: a block appears, vanishes, or gets another size."""

    change: int
    serial: int
    label: Label


class Ledger:
    """Follows the storages of fake CUDA tensors from their allocation to their end."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._blocks: dict[int, _Block] = {}
        self._events: list[_Event] = []
        self._phases: list[tuple[str, int]] = []
        self._serial = 0

    def start_phase(self, name: str) -> None:
        """Begins the phase `name`; a name may come more than once."""
        self._phases.append((name, len(self._events)))

    def add(self, tensor: torch.Tensor, label: Label) -> None:
        """Counts the storage of `tensor`, once however many tensors share it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is not None and block.storage() is not None:
            self.resize(storage)
            return

        self._serial += 1
        serial = self._serial
        num_bytes = _rounded(storage.nbytes())
        reference = weakref.ref(storage, lambda _: self._free(key, serial))
        self._blocks[key] = _Block(reference, serial, num_bytes, label)
        self._change(num_bytes, serial, label)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Counts the present size of a storage that is known."""
        block = self._blocks.get(storage._cdata)
        if block is None or block.storage() is None:
            return
        num_bytes = _rounded(storage.nbytes())
        if num_bytes != block.num_bytes:
            self._change(num_bytes - block.num_bytes, block.serial, block.label)
            block.num_bytes = num_bytes

    def peaks(self) -> dict[str, Peak]:
        """The peak of every phase, over all of its occurrences."""
        highest: dict[str, tuple[int, int]] = {}  # phase -> (bytes, number of events until then)
        name = ""
        starts = {position: phase for phase, position in self._phases}
        live = 0
        for number, event in enumerate(self._events):
            name = starts.get(number, name)
            live += event.change
            if live > highest.get(name, (0, 0))[0]:
                highest[name] = (live, number + 1)

        return {
            phase: Peak(num_bytes, self._composition(stop))
            for phase, (num_bytes, stop) in highest.items()
        }

    def moments(self) -> list[Moment]:
        """The peak at each kind of allocation, of every phase.

        Each of them grows linearly with the layers; the phase's peak, their maximum, need not.
        """
        highest: dict[tuple[str, Label], tuple[int, int]] = {}
        starts = {position: phase for phase, position in self._phases}
        name = ""
        live = 0
        for number, event in enumerate(self._events):
            name = starts.get(number, name)
            live += event.change
            key = (name, event.label)
            if event.change > 0 and live > highest.get(key, (0, 0))[0]:
                highest[key] = (live, number)

        stops = {number for _, number in highest.values()}
        by_part: Counter[str] = Counter()
        compositions: dict[int, dict[str, int]] = {}
        for number, event in enumerate(self._events):
            by_part[event.label.part] += event.change
            if number in stops:
                compositions[number] = dict(+by_part)

        return [
            Moment(phase, label, num_bytes, compositions[number])
            for (phase, label), (num_bytes, number) in highest.items()
        ]

    def _composition(self, stop: int) -> Counter[Label]:
        """Live bytes by label after the first `stop` events."""
        by_label: Counter[Label] = Counter()
        for event in self._events[:stop]:
            by_label[event.label] += event.change
        return +by_label

    def _free(self, key: int, serial: int) -> None:
        block = self._blocks.get(key)
        # A new storage may have the address of an old one.
        if block is None or block.serial != serial:
            return
        del self._blocks[key]
        self._change(-block.num_bytes, serial, block.label)

    def _change(self, change: int, serial: int, label: Label) -> None:
        self.live_bytes += change
        self._events.append(_Event(change, serial, label))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
