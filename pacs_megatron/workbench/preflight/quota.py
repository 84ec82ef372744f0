"""Free space for this user on a file system: free blocks and files, and quotas from the site's
tools.

`statvfs` does not include a user's quota on Lustre and NFS, so this module also runs `lfs quota`
and `quota` if installed.
"""

import math
import os
import shutil
from collections.abc import Sequence
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
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if folder.is_relative_to(mount.mountpoint)
    ]
    # Of several mounts on one folder the last one is visible; `max` returns the first of equals.
    mounts.reverse()
    return max(mounts, key=lambda mount: len(Path(mount.mountpoint).parts), default=None)


def free_space(folder: Path) -> tuple[list[FreeSpace], str | None]:
    """Free space and all quotas of an existing folder.

    Returns:
        The file system's free space, then one element for each quota.
        The reason why a quota is unknown, or None.
    """
    stats = os.statvfs(folder)
    num_bytes = float(stats.f_bavail) * stats.f_frsize
    num_files = float(stats.f_favail) if stats.f_files else math.inf
    spaces = [FreeSpace(num_bytes, num_files, "free space")]

    mount = find_mount(folder)
    if mount is None:
        return spaces, None
    if mount.fstype == "lustre" and shutil.which("lfs"):
        spaces += _lustre_quota("-u", os.getuid(), mount.mountpoint)
        spaces += _lustre_quota("-g", os.getgid(), mount.mountpoint)
        return spaces, None
    if shutil.which("quota"):
        # Its status is 1 if a limit is exceeded.
        done = try_program(["quota", "-w", "-p", "-u"], timeout_s=_TIMEOUT_S)
        return spaces + _parse(done.stdout, mount.device, "quota -u"), None
    if mount.fstype in _NETWORK_TYPES:
        reason = f"no installed tool reads the quota of {mount.mountpoint} ({mount.fstype})"
        return spaces, reason
    return spaces, None


def _lustre_quota(flag: str, number: int, mountpoint: str) -> list[FreeSpace]:
    """The quota of a user (`-u`) or a group (`-g`)."""
    command = ["lfs", "quota", "-q", flag, str(number), mountpoint]
    done = try_program(command, timeout_s=_TIMEOUT_S)
    return _parse(done.stdout, mountpoint, f"lfs quota {flag}")


def _parse(text: str, name: str, source: str) -> list[FreeSpace]:
    """The quotas of file system `name`, without those that have no limit.

    Both tools print: name, KiB used, soft, hard, grace, files used, soft, hard, grace. 0: no limit,
    `*`: exceeded.
    """
    spaces = []
    for line in text.splitlines():
        fields = line.split()
        numbers = [field.rstrip("*") for field in (*fields[1:4], *fields[5:8])]
        is_quota = len(numbers) == 6 and all(number.isdecimal() for number in numbers)
        if fields[:1] != [name] or not is_quota:
            continue

        used_kib, *limits_kib = [float(number) for number in numbers[:3]]
        used_files, *file_limits = [float(number) for number in numbers[3:]]
        limit_kib = _lowest_limit(limits_kib)
        file_limit = _lowest_limit(file_limits)
        if limit_kib == math.inf and file_limit == math.inf:
            continue
        left_kib = max(0.0, limit_kib - used_kib)
        left_files = max(0.0, file_limit - used_files)
        spaces.append(FreeSpace(left_kib * _KIB, left_files, source))
    return spaces


def _lowest_limit(limits: Sequence[float]) -> float:
    """The lower of the soft and the hard limit; infinite without a limit."""
    return min((limit for limit in limits if limit), default=math.inf)
