"""Hostile YAML: limits of size, depth and numbers; every fault is one line, in bounded time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.config.yaml_tree import MAX_YAML_BYTES
from pacs_megatron.errors import ConfigError
from tests.support.fuzz import damaged, fuzz
from tests.support.run_files import BASE


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: " + "[" * 2000 + "]" * 2000, "nested more than 32 levels"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 levels"),
        ("{a: " * 3000 + "1" + "}" * 3000, "nested more than 32 levels"),
        (f"a: {'9' * 5000}", "a number of 5000 digits, expected at most 24"),
        ('a: "\\0"', "text contains NUL or a lone surrogate"),
        ('"\\ud800": 1', "text contains NUL or a lone surrogate"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ("a: &x [1]\nb: [*x, *x]", "anchors and aliases are not supported"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x01", "not valid YAML"),
        (f"a: {'x' * MAX_YAML_BYTES}", f"more than {MAX_YAML_BYTES} bytes"),
    ],
)
def test_hostile_files(base: Path, text: str, expected: str) -> None:
    base.write_text(text)
    assert expected in refusal(base)


@pytest.mark.parametrize(
    "override",
    [
        "run.name=" + "[" * 3000,
        ".".join("a" * 3000) + "=1",
        "run.steps=" + "9" * 5000,
        "run.name=\udcff",
        "run.name=a\0b",
        "x" * 100_000,
        "parallel.control_timeout_s=1e300",
        "parallel.hang_timeout_s=1e9",
        "reward.workers=1000000",
        "reward.memory_limit_gib=1e300",
        "rollout.sampling.stop=['']",
        "data.chat_template_args={tools: 3}",
        "run.steps=" + "1" * 24,
    ],
)
def test_hostile_overrides(base: Path, override: str) -> None:
    refusal(base, override)


def test_the_index_of_a_list_is_short(base: Path) -> None:
    key = "evaluation.benchmarks"
    assert "expected a list" in refusal(base, f"{key}=[{{path: x}}]", f"{key}.{'9' * 5000}.path=x")


def test_odd_files(base: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in refusal(tmp_path / "fifo")  # and does not wait for a writer
    assert "it is a folder; give a file" in refusal(tmp_path)
    assert "embedded null byte; give a file" in refusal(Path("a\0b"))
    assert "File name too long" in refusal(Path("a" * 300))
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot read the configuration" in refusal(tmp_path / "loop")
    for name in ("a\\0b", "fifo", "b" * 300):
        base.write_text(f'include: "{name}"\n')
        refusal(base)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_cluster(tmp_path / "fifo")


def test_includes_that_multiply(base: Path, tmp_path: Path) -> None:
    """24 files, each including the next one twice: 2 ** 24 files."""
    for number in range(24):
        (tmp_path / f"{number}.yaml").write_text(
            f"include: [{number + 1}.yaml, {number + 1}.yaml]\n"
        )
    (tmp_path / "24.yaml").write_text("run: {steps: 3}\n")
    assert "more than 100 files by `include:`" in refusal(tmp_path / "0.yaml")


def test_includes_that_are_large_together(base: Path, tmp_path: Path) -> None:
    """Each file alone is read: 90 of them took minutes."""
    for number in range(3):
        (tmp_path / f"{number}.yaml").write_text(f"x: {'y' * (MAX_YAML_BYTES // 2)}\n")
    base.write_text("include: [0.yaml, 1.yaml, 2.yaml]\n" + BASE)
    assert f"more than {MAX_YAML_BYTES} bytes by `include:`, the last is 1.yaml" in refusal(base)


def test_huge_sizes_are_checked(base: Path) -> None:
    refusal(
        base,
        "resources.nodes=1000000000000000",
        "parallel.tp=7",
        "resources.gpus_per_node=8",
        "resources.gpu=h100",
    )
    refusal(base, "run.nproc=1000000000000000", "parallel.tp=7")


@fuzz
@given(data=damaged(BASE.encode()))
def test_damaged_files(base: Path, data: bytes) -> None:
    base.write_bytes(data)
    try:
        load_config(base).to_yaml()
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


@fuzz
@given(
    text=st.text(max_size=60),
    form=st.sampled_from(["{}", "run.name={}", "{}=1", "data.train={}", "objective.{}"]),
)
def test_any_override(base: Path, text: str, form: str) -> None:
    try:
        load_config(base, [form.format(text)]).to_yaml()
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


@fuzz
@given(
    data=damaged(
        b"name: x\naccount: a\nenv: {A: b}\npython: [python, -u]\ncontainer: {runtime: pyxis, "
        b"image: i}\n"
    )
)
def test_damaged_cluster_files(base: Path, data: bytes) -> None:
    base.write_bytes(data)
    try:
        load_cluster(base)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
