"""The FP8 state of Transformer Engine: a pass without gradient must not change it, and a checkpoint
has it as a pickle.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pacs_megatron.errors import CheckpointError, one_line

_KEY = "._extra_state"
"""in the key of a module's state"""
_ALLOW = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_TENSORS = (("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"))
_VALUES = (
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),
)
"""read the values of a tensor from a second pickle"""
_RECIPES = {
    "transformer_engine.common.recipe": (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
        *("Format", "_FormatHelper", "MMParams", "QParams"),
    ),
    "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
}
"""module -> classes that are data"""


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


class _Recipe:
    """Takes the place of a recipe, so that a check imports and constructs nothing."""

    def __init__(self, *_args: object) -> None: ...


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _read_values
        if name in _RECIPES.get(module, ()):
            return _Recipe
        if (module, name) in _TENSORS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it loads {module}.{name}, which is no part of a state")


def _read_values(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


@contextlib.contextmanager
def readable_fp8_state(state: Mapping[str, Any]) -> Iterator[None]:
    """Lets Transformer Engine read the FP8 states of a checkpoint inside the block.

    The scales of recipe `delayed` are a pickle, which can execute code. Transformer Engine 2.15 and
    later reject every one of them, earlier versions none. Here each is read with a list of allowed
    classes first.

    Args:
        state: key -> value, of one model. States are uint8 tensors.

    Raises:
        CheckpointError: if a state is damaged, or loads another class.
    """
    for key, value in state.items():
        if _KEY in key and value is not None:
            _check_state(key, value)

    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = "1"
    try:
        yield
    finally:
        del os.environ[_ALLOW]
        if before is not None:
            os.environ[_ALLOW] = before


def _check_state(key: str, value: Any) -> None:
    try:
        content = value.cpu().numpy().tobytes()
        if content:
            _StateUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        reason = one_line(f"{type(error).__name__}: {error}")[:200]
        raise CheckpointError(
            f"the FP8 state {key} of the checkpoint is damaged or unsafe ({reason}); use another "
            "checkpoint"
        ) from None
