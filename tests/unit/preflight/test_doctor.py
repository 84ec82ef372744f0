"""`doctor` on hosts that this one is not: limits, drivers, foreign packages, programs that hang."""

from __future__ import annotations

import resource
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest

from pacs_megatron.preflight import doctor
from pacs_megatron.preflight.check import Check


def rows(found: Iterable[Check]) -> dict[str, str]:
    return {row.key: row.level for row in found}


def test_limits_that_end_a_job_with_a_message_about_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Usage = namedtuple("Usage", "total used free")
    sizes = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: sizes[kind])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(doctor, "IB_DEVICES", tmp_path)
    assert rows(doctor._limits()) == {"open files": "fail", "/dev/shm": "fail"}
    (tmp_path / "mlx5_0").mkdir()
    assert rows(doctor._limits())["locked memory"] == "fail"
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    sizes.update({resource.RLIMIT_NOFILE: infinite, resource.RLIMIT_MEMLOCK: infinite})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(8 << 30, 0, 8 << 30))
    assert rows(doctor._limits()) == {"limits": "ok"}


def test_a_driver_without_a_gpu_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    version = tmp_path / "version"
    monkeypatch.setattr(doctor, "DRIVER_FILE", version)
    assert next(doctor._cuda()).level == "none"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: x\n"
    )
    [found] = doctor._cuda()
    assert found.level == "fail" and "driver 580.95.05" in found.message


def test_pypis_apex_is_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _name: None)
    monkeypatch.setattr(doctor, "installed", lambda name: "0.9.10" if name == "apex" else None)
    [found] = doctor.apex()
    assert found.level == "fail" and "pip uninstall apex" in found.fix


@pytest.mark.parametrize(("version", "level"), [("2.8.0", "fail"), ("2.11.0", "ok"), ("2.12.0", "fail")])
def test_transformer_engine_that_megatron_takes(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda _name: version)
    monkeypatch.setattr(doctor, "find_spec", lambda _name: object())
    assert next(doctor.transformer_engine()).level == level


def test_a_controller_that_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slurm 22.05 || exec sleep 60\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    [found] = doctor._slurm()
    assert found.level == "none" and "no controller responds" in found.fix


def test_the_report_lists_what_this_machine_can_do() -> None:
    text = doctor.report()
    assert "train on CPU (gloo): yes" in text
    assert all(line.startswith(("ok", "none", "fail")) for line in text.split("\n\n")[0].splitlines())
