"""`doctor` on hosts that this one is not: limits, drivers, foreign packages, programs that hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.workbench.preflight import doctor


def test_a_driver_without_a_gpu_that_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    version = tmp_path / "version"
    monkeypatch.setattr(doctor, "DRIVER_FILE", version)
    assert doctor.cuda().level == "none"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC "
        "version: x\n"
    )
    found = doctor.cuda()
    assert found.level == "fail" and "driver 580.95.05" in found.message


@pytest.mark.parametrize(
    ("kind", "level", "fix"),
    [
        ("foreign", "fail", "pip uninstall apex"),
        ("no kernels", "fail", "--cuda_ext"),
        ("none", "none", ""),
        ("nvidia", "ok", ""),
    ],
)
def test_apex_is_nvidias_with_its_kernels(
    kind: str, level: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "apex_kind", lambda: kind)
    found = doctor.apex()
    assert found.level == level and fix in found.fix


@pytest.mark.parametrize(
    ("megatron", "engine", "level"),
    [
        ("0.16.1", "2.8.0", "fail"),
        ("0.16.1", "2.11.0", "ok"),
        ("0.16.1", "2.12.0", "fail"),
        ("0.19.2", "2.11.0", "fail"),
        ("0.19.2", "2.20.2", "ok"),
        ("0.19.2", "2.21.0", "fail"),
    ],
)
def test_transformer_engine_that_megatron_takes(
    megatron: str, engine: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"megatron-core": megatron, "transformer-engine": engine}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "find_spec", lambda _name: object())
    found = doctor.transformer_engine()
    assert found.level == level
    if level == "fail":
        assert f"megatron-core {megatron[:4]}, which needs" in found.fix


def test_a_controller_that_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slurm 22.05 || exec sleep 60\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    found = doctor._slurm()
    assert found.level == "none" and "no controller responds" in found.fix


def test_the_report_lists_what_this_machine_can_do() -> None:
    text = doctor.report()
    assert "train on CPU (gloo): yes" in text
    assert all(
        line.startswith(("ok", "none", "fail")) for line in text.split("\n\n")[0].splitlines()
    )
