"""The end of a step by a stop request."""


class Interrupted(Exception):  # noqa: N818  (not an error: a stop request)
    """A rank has a stop request. Raised on all ranks; the loop saves the position of the run and returns."""
