"""Fuzz tests: 500 inputs each in `make test-full`; PACS_FUZZ_INPUTS sets another number, for the campaign."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

NUM_INPUTS = int(os.environ.get("PACS_FUZZ_INPUTS", "500"))


def fuzz(test: Callable[..., Any], num_inputs: int = NUM_INPUTS) -> Callable[..., Any]:
    """Marks a hypothesis test as a long one and sets its number of inputs; goes above `@given`."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    configured = settings(max_examples=num_inputs, deadline=None, suppress_health_check=checks, derandomize=True)
    marked: Callable[..., Any] = pytest.mark.full(configured(test))
    return marked


@functools.cache
def json_documents() -> st.SearchStrategy[Any]:
    """Values that JSON can express: finite numbers, text of UTF-8 without NUL, a few levels."""
    text = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    leaves = (
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
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
            [b"[" * 5000, b"9" * 5000, b"\\ud800", b"\\u0000", b"null", b"-1", b"1e999", b"NaN", b"{}", b"[]"]
        ),
    )
    return st.tuples(place, st.integers(0, 12), pieces).map(change)
