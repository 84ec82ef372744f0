"""FP8 state of Transformer Engine's modules in passes without gradient."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def _newest_amax(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """float32 [tensors] per module with delayed scaling: the row of its amax history that casts write to."""
    for chunk in chunks:
        for module in chunk.modules():
            for key in ("scaling_fwd", "scaling_bwd"):
                history = getattr(getattr(module, "fp8_meta", {}).get(key), "amax_history", None)
                if history is not None:
                    yield history[0]


@contextlib.contextmanager
def unchanged_fp8_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restores the amax histories of delayed scaling after a pass without gradient; other recipes have no state.

    Transformer Engine records the amax of every cast, also without gradient, and the next update would compute its
    scales from the maximum over score passes and updates.
    """
    before = {amax.data_ptr(): amax.clone() for amax in _newest_amax(chunks)}
    try:
        yield
    finally:
        with torch.no_grad():
            for amax in _newest_amax(chunks):
                saved = before.get(amax.data_ptr())
                # A first pass creates the state: its newest row starts at 0.
                amax.zero_() if saved is None else amax.copy_(saved)
