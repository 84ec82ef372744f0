"""Free space for this user on a file system: free blocks and files, and quotas from the site's
tools.

`statvfs` does not include a user's quota on Lustre and NFS, so this module also runs `lfs quota`
and `quota` if installed.
"""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pacs_megatron.runtime.waiting import try_program

_TIMEOUT_S = 20.0
_KIB = 1024
_NETWORK_TYPES = ("lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "panfs", "wekafs")


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Bytes and files that may still be written."""

    num_bytes: float
    num_files: float
    """infinite if the file system does not count files"""
    source: str
    """`free space`, `lfs quota -u`, ..."""


def find_mount(folder: Path) -> Any:
    """The mount of `folder` (psutil's `sdiskpart`): the longest mount point above it; None if there
    is none.
    """
    above = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if folder.is_relative_to(mount.mountpoint)
    ]
    return max(reversed(above), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)


def free_space(folder: Path) -> tuple[list[FreeSpace], str | None]:
    """(free space and all quotas, reason why a quota is unknown or None), for an existing folder."""
    stats = os.statvfs(folder)
    files = float(stats.f_favail) if stats.f_files else math.inf
    found = [FreeSpace(float(stats.f_bavail) * stats.f_frsize, files, "free space")]
    mount = find_mount(folder)
    if mount is None:
        return found, None
    if mount.fstype == "lustre" and shutil.which("lfs"):
        for flag, number in (("-u", os.getuid()), ("-g", os.getgid())):
            done = try_program(
                ["lfs", "quota", "-q", flag, str(number), mount.mountpoint], timeout_s=_TIMEOUT_S
            )
            found += _parse(done.stdout, mount.mountpoint, f"lfs quota {flag}")
        return found, None
    if shutil.which("quota"):
        text = try_program(
            ["quota", "-w", "-p", "-u"], timeout_s=_TIMEOUT_S
        ).stdout  # status 1: a limit is exceeded
        return found + _parse(text, mount.device, "quota -u"), None
    unknown = mount.fstype in _NETWORK_TYPES
    return (
        found,
        f"no installed tool reads the quota of {mount.mountpoint} ({mount.fstype})"
        if unknown
        else None,
    )


def _parse(text: str, name: str, source: str) -> list[FreeSpace]:
    """Both tools print: name, KiB used, soft, hard, grace, files used, soft, hard, grace.

    0: no limit, `*`: exceeded.
    """
    found = []
    for fields in (line.split() for line in text.splitlines()):
        numbers = [field.rstrip("*") for field in (*fields[1:4], *fields[5:8])]
        if (
            fields[:1] != [name]
            or len(numbers) < 6
            or not all(number.isdecimal() for number in numbers)
        ):
            continue
        used, *limits = map(float, numbers[:3])
        files, *limits_of_files = map(float, numbers[3:])
        limit, limit_of_files = (
            min(filter(None, each), default=math.inf) for each in (limits, limits_of_files)
        )
        if min(limit, limit_of_files) < math.inf:
            found.append(
                FreeSpace(max(0.0, limit - used) * _KIB, max(0.0, limit_of_files - files), source)
            )
    return found
