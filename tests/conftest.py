"""Shared fixtures. The environment is set before anything imports torch or transformers."""

from __future__ import annotations

import os
import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that
# interrupt them would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    GLOO_SOCKET_IFNAME="lo",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    CUDA_DEVICE_MAX_CONNECTIONS="1",
    # Servers of tests are on loopback, also where the host has a proxy.
    no_proxy=f"127.0.0.1,localhost,{os.environ.get('no_proxy', '')}",
    NO_PROXY=f"127.0.0.1,localhost,{os.environ.get('NO_PROXY', '')}",
)

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests.support.ranks import free_port as _free_port
from tests.support.tiny_models import make_tiny_qwen3

# No test depends on the host's speed.
hypothesis.settings.register_profile("any host", deadline=None)
hypothesis.settings.load_profile("any host")

pytest_plugins = ["pytester", "tests.support.sessions"]


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs of a host that has some, but for a session that names tests/gpu."""
    if not any("gpu" in Path(name.partition("::")[0]).parts for name in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 folder with untied embeddings; read only."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3"), tied=False)


@pytest.fixture(scope="session")
def tiny_qwen3_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 folder with tied embeddings; read only."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3-tied"), tied=True)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def any_tiny_qwen3(request: pytest.FixtureRequest) -> Path:
    """Both of the above, one after the other."""
    name = "tiny_qwen3_tied" if request.param else "tiny_qwen3"
    folder: Path = request.getfixturevalue(name)
    return folder


@pytest.fixture
def make_qwen3(tmp_path: Path) -> Callable[..., Path]:
    """A factory for other shapes:

    `make_qwen3("name", tied=True, num_hidden_layers=4)` writes below tmp_path.
    """

    def make(name: str = "model", **options: object) -> Path:
        return make_tiny_qwen3(tmp_path / name, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    return _free_port()
