"""The FP8 state of a checkpoint, a pickle of Transformer Engine: what may be in it."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch

from pacs_megatron.errors import CheckpointError
from pacs_megatron.policy.fp8_state import readable_fp8_state

KEY = "decoder.layers.0.mlp.linear_fc1._extra_state"
ALLOW = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
RECIPE = b"ctransformer_engine.common.recipe\nDelayedScaling\n)R."


class Command:
    """Its pickle runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch loaded",)


def as_state(content: bytes) -> dict[str, Any]:
    return {KEY: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def scales() -> dict[str, Any]:
    return {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"fp8_checkpoint": True}}


@pytest.mark.parametrize(
    "state",
    [as_state(pickle.dumps(scales())), as_state(RECIPE), {KEY: torch.empty(0)}, {KEY: None}],
    ids=["scales", "recipe", "stateless", "other-layers"],
)
@pytest.mark.parametrize("before", [None, "0"])
def test_a_state_is_readable_inside_the_block_only(
    state: dict[str, Any], before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    if before is not None:
        monkeypatch.setenv(ALLOW, before)
    with readable_fp8_state(state):
        assert os.environ[ALLOW] == "1"
    assert os.environ.get(ALLOW) == before


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (as_state(pickle.dumps(scales() | {"x": Command()}))[KEY], "loads posix.system"),
        (as_state(RECIPE.replace(b"DelayedScaling", b"os.system"))[KEY], "os.system"),
        (as_state(pickle.dumps(scales())[:-9])[KEY], "damaged or unsafe"),
        (b"a file of an old format", "AttributeError"),
    ],
    ids=["command", "other-name", "cut", "no-tensor"],
)
def test_another_pickle_is_not_loaded(
    value: Any, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ALLOW, raising=False)
    with pytest.raises(CheckpointError, match=reason) as caught, readable_fp8_state({KEY: value}):
        pytest.fail("the block must not be entered")
    assert KEY in str(caught.value)
    assert ALLOW not in os.environ and not list(tmp_path.iterdir())


def test_the_values_of_a_tensor_are_a_second_pickle(tmp_path: Any) -> None:
    """A tensor inside a pickle has its values as bytes of `torch.save`."""
    content = pickle.dumps(scales())
    hidden = tmp_path / "hidden"
    torch.save({"x": Command()}, hidden)
    # The reader of values with the bytes of another object.
    inner = hidden.read_bytes()
    call = (
        b"ctorch.storage\n_load_from_bytes\n(B" + len(inner).to_bytes(4, "little") + inner + b"tR."
    )
    with readable_fp8_state(as_state(content)):
        pass
    with pytest.raises(CheckpointError, match="damaged or unsafe"):
        readable_fp8_state(as_state(call)).__enter__()
