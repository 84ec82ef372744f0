"""An invalid cluster file ends in one line with key, value, expected value and place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pacs_megatron.config.cluster import ClusterConfig, load_cluster
from pacs_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a mapping"),
        ("- a", "expected a mapping (`key: value` lines) at the top, got a list"),
        (
            "partition: x",
            "`name` is missing; add it: Name of the cluster, for messages. (site.yaml:1)",
        ),
        ("name: x\nacount: y", "unknown key `acount`; did you mean `account`? (site.yaml:2)"),
        (
            "name: x\nlauncher: mpirun",
            "launcher='mpirun': expected one of srun, torchrun; did you mean srun? (site.yaml:2)",
        ),
        (
            "name: x\npython: /usr/bin/python",
            "python='/usr/bin/python': expected a list: [a, b] (site.yaml:2)",
        ),
        (
            "name: x\ncontainer: {runtime: docker, image: y}",
            "container.runtime='docker': expected one of pyxis, apptainer, enroot",
        ),
        ("name: x\ncontainer: {runtime: pyxis}", "`container.image` is missing; add it"),
        ("name: x\nexclusive: perhaps", "exclusive='perhaps': expected a boolean, not text"),
        ("name: x\nenv: {A: 1}", "env.A=1: expected a string; put it in quotes"),
        ("name: x\nenv: {'A B': c}", "expected the name of an environment variable, got 'A B'"),
        ("name: x\nmodules: ['cuda; rm x']", "modules.0: expected the name of a module"),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(Path("site.yaml"))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


CACHES = (
    "SGLANG_CACHE_DIR",
    "SGLANG_JIT_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TVM_FFI_CACHE_DIR",
    "CUDA_CACHE_PATH",
)


def test_compiled_kernels_are_cached_below_scratch() -> None:
    """Not in $HOME, where processes of all nodes wait for each other's locks."""
    variables = ClusterConfig(name="x", scratch="/scratch/").task_environment()
    folder = f"/scratch/pacs-kernels-{os.getuid()}"
    for name in CACHES:
        assert variables[name] == folder or variables[name].startswith(f"{folder}/"), name
    # SGLang's kernels do not lie in the folder of another program.
    assert len({variables[name] for name in CACHES}) == len(CACHES)
    mine = ClusterConfig(name="x", scratch="/scratch", env={"TRITON_CACHE_DIR": "/mine"})
    assert mine.task_environment()["TRITON_CACHE_DIR"] == "/mine"
    assert not set(CACHES) & set(ClusterConfig(name="x").task_environment())
