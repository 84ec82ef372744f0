"""Fuzz tests:

500 inputs each in `make test-full`; PACS_FUZZ_INPUTS sets another number, for the campaign.

PACS_FUZZ_SEED draws other inputs, so a campaign can run in pieces. PACS_FUZZ_LOG records a line for
each test.
"""

import cProfile
import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

NUM_INPUTS = int(os.environ.get("PACS_FUZZ_INPUTS", "500"))
SEED = os.environ.get("PACS_FUZZ_SEED")
LOG = os.environ.get("PACS_FUZZ_LOG")
MAX_CALLS = 2_000_000
"""Function calls of one input, which take seconds at most.

A bound that does not depend on the host's speed.
"""
MAX_GROWTH_BYTES = 256 * 2**20
"""Growth of the process's largest resident size after the first input."""


def fuzz(
    test: Callable[..., Any], num_inputs: int = NUM_INPUTS, max_calls: int = MAX_CALLS
) -> Callable[..., Any]:
    """Marks a hypothesis test as a long one and sets its number of inputs; goes above `@given`."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    configured = settings(
        max_examples=num_inputs,
        deadline=None,
        suppress_health_check=checks,
        derandomize=SEED is None,
        database=None,
    )
    handle: Any = test
    handle.hypothesis.inner_test = _bounded(handle.hypothesis.inner_test, max_calls)
    marked: Callable[..., Any] = pytest.mark.full(configured(test))
    return marked if SEED is None else seed(int(SEED))(marked)


def _bounded(test: Callable[..., Any], max_calls: int) -> Callable[..., Any]:
    """`test`, which fails for an input that needs too many calls or too much memory."""
    inputs = 0
    most = 0
    largest_at_first = 0

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal inputs, most, largest_at_first
        profile = cProfile.Profile(builtins=False)
        profile.enable()
        try:
            return test(*args, **kwargs)
        finally:
            profile.disable()
            if not inputs:  # it also imports modules, and creates hypothesis's table of characters
                largest_at_first = _largest_bytes()
            else:
                most = max(most, sum(entry.callcount for entry in profile.getstats()))
            inputs += 1
            growth = _largest_bytes() - largest_at_first
            assert most < max_calls, f"{most} calls for one input"
            assert growth < MAX_GROWTH_BYTES, f"{growth} bytes of memory"
            if LOG and inputs % 100 == 0:
                text = (
                    f"{inputs} inputs, most calls {most}, growth of memory {growth / 2**20:.0f} MiB"
                )
                Path(LOG).write_text(f"{test.__module__}::{test.__name__}: {text}\n")

    return run


def _largest_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@functools.cache
def json_documents() -> st.SearchStrategy[Any]:
    """Values that JSON can express: finite numbers, text of UTF-8 without NUL, a few levels."""
    text = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(10**20), 10**20)
        | st.floats(allow_nan=False, allow_infinity=False)
    )
    return st.recursive(
        leaves | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=8,
    )


@functools.cache
def damaged(document: bytes) -> st.SearchStrategy[bytes]:
    """`document` with a few bytes changed, a piece removed, repeated or replaced by nonsense."""

    def change(draw: tuple[int, int, bytes]) -> bytes:
        start, length, piece = draw
        return document[:start] + piece + document[start + length :]

    place = st.integers(0, len(document))
    pieces = st.one_of(
        st.binary(max_size=6),
        st.sampled_from(
            [
                b"[" * 400,
                b"9" * 5000,
                b"\\ud800",
                b"\\u0000",
                b"null",
                b"-1",
                b"1e999",
                b"NaN",
                b"{}",
                b"[]",
            ]
        ),
    )
    return st.tuples(place, st.integers(0, 12), pieces).map(change)
