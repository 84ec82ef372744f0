"""Seconds per phase of a step, and callbacks for a change of the phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PhaseHook = Callable[[tuple[str, ...]], None]
"""Called with the names of the open spans, outermost first; () if none is open."""


class Timer:
    """Sums the seconds of named spans until `take` returns and clears them. For one thread only.

    Spans nest: `update` with `forward` inside gives `time/update_s` (total) and
    `time/update/forward_s`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._hooks: list[PhaseHook] = []
        self._since = clock()

    def on_change(self, hook: PhaseHook) -> None:
        """Calls `hook` at the start and end of every span."""
        self._hooks.append(hook)

    @property
    def phase(self) -> tuple[str, ...]:
        """Names of the open spans, outermost first."""
        return tuple(self._open)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times the body, also if it raises."""
        self._open.append(name)
        path = "/".join(self._open)
        started = self._clock()
        try:
            self._notify()
            yield
        finally:
            self._seconds[path] = self._seconds.get(path, 0.0) + self._clock() - started
            self._open.pop()
            self._notify()

    def take(self) -> dict[str, float]:
        """Returns and clears the seconds.

        Returns:
            `time/<phase>_s` of all spans that ended since the last call, and `time/step_s`, the
            time since then.
        """
        since = self._since
        self._since = self._clock()
        taken = {f"time/{path}_s": seconds for path, seconds in sorted(self._seconds.items())}
        self._seconds.clear()
        return taken | {"time/step_s": self._since - since}

    def _notify(self) -> None:
        for hook in self._hooks:
            hook(self.phase)
