"""Base class of objects that are closed at the end of a `with` block."""

from typing import Self


class Closing:
    """A context manager that calls `close` at the end of its block."""

    def close(self) -> None:
        """Releases what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
