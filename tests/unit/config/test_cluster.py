"""An invalid cluster file ends in one line with key, value, expected value and place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a mapping"),
        ("- a", "expected a mapping (`key: value` lines) at the top, got a list"),
        ("partition: x", "`name` is missing; add it (site.yaml:1)"),
        ("name: x\nacount: y", "unknown key `acount`; did you mean `account`? (site.yaml:2)"),
        (
            "name: x\nlauncher: mpirun",
            "launcher: input should be 'srun' or 'torchrun', got 'mpirun'; correct it (site.yaml:2)",
        ),
        ("name: x\npython: /usr/bin/python", "python: input should be a list, such as [python], got '/usr/bin/python'"),
        (
            "name: x\ncontainer: {runtime: docker, image: y}",
            "container.runtime: input should be 'pyxis', 'apptainer' or",
        ),
        ("name: x\ncontainer: {runtime: pyxis}", "`container.image` is missing; add it"),
        ("name: x\nexclusive: perhaps", "exclusive: input should be a valid boolean, got 'perhaps'"),
        ("name: x\nenv: {A: 1}", "env.A: input should be a valid string, got 1"),
        ("name: x\nenv: {'A B': c}", "expected the name of an environment variable, got 'A B'"),
        ("name: x\nmodules: ['cuda; rm x']", "modules.0: expected the name of a module"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(Path("site.yaml"))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
