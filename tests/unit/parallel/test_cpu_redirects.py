"""The CPU redirects reach Megatron's modules and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.parallel import cpu_redirects
from tests.support.ranks import run_ranks, search_path

GLOBALS = ("zeros", "empty", "tensor", "arange", "cuda", "ones")


def test_global_torch_is_untouched() -> None:
    """After install and a whole policy was built, torch's own functions and methods are the
    originals.
    """

    def on_rank(_rank: int, _world: int) -> dict[str, bool]:
        before = {name: getattr(torch, name) for name in GLOBALS}
        methods = (
            torch.Tensor.cuda,
            torch.Tensor.type,
            torch.cuda.current_device,
            torch.cuda.synchronize,
        )
        assert cpu_redirects.install()
        import megatron.core.optimizer  # noqa: F401
        import megatron.core.pipeline_parallel.schedules as schedules

        with cpu_redirects.cuda_type_names():
            inside = torch.zeros(1).type()
        after = (
            torch.Tensor.cuda,
            torch.Tensor.type,
            torch.cuda.current_device,
            torch.cuda.synchronize,
        )
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
        return {
            "functions": all(getattr(torch, name) is value for name, value in before.items()),
            "methods": all(a is b for a, b in zip(methods, after, strict=True)),
            "inside": inside == "torch.cuda.FloatTensor",
            "outside": torch.zeros(1).type() == "torch.FloatTensor",
            "redirected": schedules.torch is not torch
            and schedules.torch.zeros(1, device="cuda").device.type == "cpu",
            "sys.modules": sys.modules["torch"] is torch
            and sys.modules["torch.cuda"] is torch.cuda,
        }

    (found,) = run_ranks(on_rank, 1)
    assert found == dict.fromkeys(found, True)


def test_a_module_imported_later_is_redirected_too() -> None:
    def on_rank(_rank: int, _world: int) -> tuple[bool, bool, bool]:
        for loaded in [m for m in sys.modules if m.startswith("megatron.core.timers")]:
            del sys.modules[loaded]
        was_loaded = "megatron.core.timers" in sys.modules
        cpu_redirects.install()
        cpu_redirects.install()
        num_finders = sum(isinstance(f, cpu_redirects._RedirectingFinder) for f in sys.meta_path)
        import megatron.core.timers as late

        return was_loaded, num_finders == 1, late.torch is not torch

    assert run_ranks(on_rank, 1) == [(False, True, True)]


def test_megatron_does_not_see_kernels_that_need_a_gpu_but_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def on_rank(_rank: int, _world: int) -> tuple[bool, bool]:
        cpu_redirects.install()
        for loaded in [m for m in sys.modules if m.startswith("megatron.core.fp8_utils")]:
            del sys.modules[loaded]
        import megatron.core.fp8_utils as utils
        import transformer_engine

        return utils.HAVE_TE, transformer_engine.here and sys.modules[
            "transformer_engine"
        ] is transformer_engine

    assert run_ranks(on_rank, 1) == [(False, True)]


@pytest.mark.parametrize(
    "first",
    ["parallel.groups", "checkpoint.dist_files", "training.context", "policy.engine"],
)
def test_in_any_order_of_imports_megatron_finds_no_optimizer_of_a_gpu(
    first: str, tmp_path: Path
) -> None:
    """An environment for GPUs has Transformer Engine, also where a run uses the CPU."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package / "optimizers.py").write_text("class FusedAdam: ...\nclass FusedSGD: ...\n")
    script = (
        f"import pacs_megatron.{first}\n"
        "import megatron.core.optimizer as found\n"
        "print(found.Adam.__module__)\n"
    )
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": search_path(tmp_path),
    }

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == "torch.optim.adamw", done.stdout + done.stderr


def test_with_cuda_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finders = [f for f in sys.meta_path if not isinstance(f, cpu_redirects._RedirectingFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    assert cpu_redirects.install() is False
    assert sys.meta_path == finders
    real: Any = torch.Tensor.type
    with cpu_redirects.cuda_type_names():
        assert torch.Tensor.type is real
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_type_names_are_restored_after_an_error() -> None:
    real = torch.Tensor.type, torch.Tensor.cuda
    with pytest.raises(KeyError), cpu_redirects.cuda_type_names():
        raise KeyError
    assert (torch.Tensor.type, torch.Tensor.cuda) == real


def test_the_stand_ins_behave_like_an_idle_device() -> None:
    cuda = cpu_redirects._STAND_IN.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    assert event.query() and cuda.Stream(device="cuda").record_event().query()
    cuda.default_stream().wait_event(event)
    assert cuda.current_device() == torch.device("cpu")
    with cuda.stream(cuda.Stream()):
        assert cpu_redirects._STAND_IN.full((2,), 3.0, device="cuda").tolist() == [3.0, 3.0]
    assert cpu_redirects._STAND_IN.float32 is torch.float32
