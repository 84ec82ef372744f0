"""Base class of objects that are closed at the end of a `with` block."""

from typing import Self


class Closing:
    """A context manager whose end calls `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
