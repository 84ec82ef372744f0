"""The FP8 state of Transformer Engine, which a pass without gradient must not change."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def _newest_amax(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """The row of each amax history that casts write to: float32 [tensors], a view.

    Only modules with delayed scaling have histories, one for each direction.
    """
    for module in _modules(chunks):
        fp8_meta = getattr(module, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            history = getattr(fp8_meta.get(key), "amax_history", None)
            if history is not None:
                yield history[0]


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for chunk in chunks:
        yield from chunk.modules()


@contextlib.contextmanager
def unchanged_fp8_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restores the state of FP8 after a pass without gradient.

    The state is the amax histories of delayed scaling and the queues of recomputation. Transformer
    Engine fills both in every pass, and the next update would compute its scales from them.
    """
    before = {amax.data_ptr(): amax.clone() for amax in _newest_amax(chunks)}
    try:
        yield
    finally:
        with torch.no_grad():
            for amax in _newest_amax(chunks):
                saved = before.get(amax.data_ptr())
                if saved is not None:
                    amax.copy_(saved)
                else:
                    # The first pass creates the state; its newest row starts at 0.
                    amax.zero_()

        # Without a module of Transformer Engine, the package may not be installed.
        if any(hasattr(module, "fp8_meta") for module in _modules(chunks)):
            from transformer_engine.pytorch import distributed as te

            # No backward pass is pending, so all queued entries come from this pass.
            te.activation_recompute_forward._is_first_fp8_module.clear()
            manager = te.FP8GlobalStateManager
            # Transformer Engine 2.15 and later keep the state in an object of its own.
            state = getattr(manager, "quantization_state", manager)
            for queue in state.fp8_tensors_recompute_buffer:
                queue.clear()
