"""The real server and the modelled node (tests/support/node/servers.py) agree where a CPU can show
it.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.sglang import build
from pacs_megatron.sglang.api import ServerUnreachableError
from tests.integration.sglang.conftest import START_S, own_options
from tests.support.needs import require_sglang
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(1800)]


class ForeignTensor:
    """Pickles as torch's handle of a CUDA tensor on a device that the server does not see."""

    def __reduce__(self) -> tuple[Any, ...]:
        place = (
            torch.Tensor,
            (8,),
            (1,),
            0,
            torch.UntypedStorage,
            torch.bfloat16,
            "GPU-of-another-server",
        )
        handle = (b"", 16, 0, False, b"", 0, b"", False)
        return reductions.rebuild_cuda_tensor, (*place, *handle)


def test_a_handle_of_another_gpu_ends_the_server(tmp_path: Path) -> None:
    """So each rank has to send handles of its own GPU to the server there (training/sync.py)."""
    require_sglang()
    options = own_options()
    assert options.servers is not None
    model = ModelOptions(path=str(make_tiny_qwen3(tmp_path / "model")))
    [server] = build.start_servers(build.server_specs(options, model, tmp_path), START_S)
    try:
        api = server.api
        api.begin_weight_update()
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([("model.norm.weight", ForeignTensor())])
        body = {"serialized_named_tensors": [base64.b64encode(buffer.getvalue()).decode()]}
        with pytest.raises(ServerUnreachableError):
            api.post("/update_weights_from_tensor", body, timeout_s=120.0)
        log = server.log_path.read_text()
        assert "Scheduler hit an exception" in log
        assert "Invalid device_uuid=GPU-of-another-server" in log
    finally:
        server.close()
