"""`doctor`: reports what works on this machine and what to install for the rest. It never fails."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from pacs_megatron.preflight.check import Check
from pacs_megatron.runtime.environment import installed
from pacs_megatron.runtime.shipped import shipped_folder
from pacs_megatron.runtime.waiting import try_program

REQUIRED = ("torch", "megatron-core", "transformers", "datasets", "math-verify", "pydantic", "safetensors")
# Megatron-Core 0.16.1 requires this range of Transformer Engine.
TE_RANGE = (Version("2.9"), Version("2.12"))
SGLANG_PYTHONS = (Path(".venv-sglang-gpu/bin/python"), Path(".venv-sglang/bin/python"))
DRIVER_FILE = Path("/proc/driver/nvidia/version")
IB_DEVICES = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (only its size is read)
MIN_SHARED_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
_TIMEOUT_S = 30.0


def findings() -> list[Check]:
    """All findings in the order of the report; `none`: optional and absent."""
    checks = (
        python, _limits, packages, _cuda, transformer_engine, apex, _sglang, _sandbox, _slurm, _nemo_run, _containers
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def report() -> str:
    """The findings as a table, and a summary of what this machine can do."""
    rows = findings()
    width = max(len(row.key) for row in rows)
    lines = [str(replace(row, key=f"{row.key:<{width}}")) for row in rows]
    is_ok = {row.key: row.level == "ok" for row in rows}
    has_required = all(is_ok[name] for name in REQUIRED)
    words = {True: "yes", False: "no"}
    return "\n".join(
        [
            *lines,
            "",
            f"train on CPU (gloo): {words[has_required]}",
            f"train on GPU in bf16 and FP8: {words[has_required and is_ok['CUDA'] and is_ok['transformer-engine']]} "
            "(FP8 needs sm_89 or later)",
            f"sample with SGLang: {words[is_ok['SGLang']]} (the embedded engine needs nothing more)",
            f"submit to Slurm: {words[is_ok['Slurm']]} by sbatch; by `submit`: "
            f"{words[is_ok['Slurm'] and is_ok['nemo-run']]}",
        ]
    )


def python() -> Iterator[Check]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Check(
        "ok" if good else "fail", "Python", platform.python_version(), "" if good else "use Python 3.11 or 3.12"
    )
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    yield Check("ok", "machine", f"{platform.platform()}, {cores} cores, {memory:.0f} GiB memory")
    yield Check("ok", "shipped files", f"configs and slurm in {shipped_folder('configs').parent}")


def _limits() -> Iterator[Check]:
    """Limits whose violation causes unrelated error messages."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else MIN_SHARED_BYTES
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    few_files = files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES
    few_locked = IB_DEVICES.is_dir() and any(IB_DEVICES.iterdir()) and locked != resource.RLIM_INFINITY
    if few_files:
        fix = f"ulimit -n {MIN_OPEN_FILES} or more: each request in flight and each rank needs a socket"
        yield Check("fail", "open files", f"at most {files}", fix)
    if size < MIN_SHARED_BYTES:
        fix = "give the container more (docker --shm-size, --ipc=host): NCCL and weight sync by shared memory use it"
        yield Check("fail", str(SHARED_MEMORY), f"{size / 2**20:.0f} MiB", fix)
    if few_locked:
        fix = "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK), or InfiniBand cannot register memory"
        yield Check("fail", "locked memory", f"at most {locked // 1024} KiB", fix)
    if not (few_files or few_locked or size < MIN_SHARED_BYTES):
        yield Check("ok", "limits", "open files, shared and locked memory suffice")


def packages() -> Iterator[Check]:
    """The required packages, and one failure for every other requirement that is not met."""
    broken = {check.key: check for check in version_problems()}
    for name in REQUIRED:
        yield broken.pop(name, Check("ok", name, str(installed(name))))
    yield from broken.values()


def version_problems(package: str = "pacs-megatron") -> Iterator[Check]:
    """One failure per required distribution that is missing or outside this package's range."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        yield Check("warn", "software", f"{package} is not installed: its requirements cannot be read", "make install")
        return
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = installed(wanted.name)
        if found is None:
            yield Check("fail", wanted.name, f"not installed, {wanted.specifier} is required", "make install")
        elif not wanted.specifier.contains(Version(found).base_version, prereleases=True):
            yield Check("fail", wanted.name, f"{found} is installed, {wanted.specifier} is required", "make install")


def _cuda() -> Iterator[Check]:
    if installed("torch") is None:
        yield Check("none", "CUDA", "unknown without torch")
        return
    import torch

    driver = _driver()
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        if driver is None:
            yield Check("none", "CUDA", f"{built}, no NVIDIA driver", "training runs on CPU over gloo")
            return
        fix = "install torch for your CUDA (README, Install), or a newer driver; nvidia-smi names its CUDA"
        yield Check("fail", "CUDA", f"{built}, driver {driver}, and it finds no GPU", fix)
        return
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})" for gpu in gpus}
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    found = f"{torch.version.cuda}, driver {driver}, NCCL {nccl}, {len(gpus)} GPUs: {', '.join(sorted(kinds))}"
    yield Check("ok", "CUDA", found)


def _driver() -> str | None:
    """The NVIDIA driver's version, or None without a driver."""
    if not DRIVER_FILE.is_file():
        return None
    words = DRIVER_FILE.read_text(encoding="utf-8").split("\n", 1)[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def transformer_engine() -> Iterator[Check]:
    key, install = "transformer-engine", "`make install-gpu`"
    found = installed(key)
    low, high = TE_RANGE
    if found is None:
        yield Check("none", key, "not installed", f"{install}: bf16 kernels, FP8")
    elif not low <= Version(found) < high:
        yield Check("fail", key, found, f"megatron-core 0.16.1 needs >= {low}, < {high}")
    elif find_spec("transformer_engine_torch") is None:
        yield Check("fail", key, found, f"the PyTorch extension is missing: {install}")
    else:
        yield Check("ok", key, found)


def apex() -> Iterator[Check]:
    """NVIDIA Apex contains `amp_C`; PyPI's `apex` is an abandoned web toolkit of the same name."""
    key, found = "NVIDIA Apex", installed("apex")
    if find_spec("amp_C") is not None:
        yield Check("ok", key, "fused optimizer kernels are installed")
    elif found is not None:
        detail = f"`apex` {found} is installed, but without NVIDIA's kernels: PyPI's apex is another package"
        yield Check("fail", key, detail, "pip uninstall apex; build NVIDIA's from source")
    else:
        yield Check("none", key, "not installed; Transformer Engine or torch supply the fused optimizer")


def _sglang() -> Iterator[Check]:
    here, python = installed("sglang"), next((path for path in SGLANG_PYTHONS if path.exists()), None)
    install = "`make install-gpu`, on CPU `make install-sglang`"
    if here is not None:
        yield Check("ok", "SGLang", f"{here}, in this environment")
    elif python is not None:
        code = "from importlib.metadata import version; print(version('sglang'))"
        done = try_program([str(python), "-c", code], timeout_s=_TIMEOUT_S)
        if done.returncode == 0:
            yield Check("ok", "SGLang", f"{done.stdout.strip()}, in {python.parent.parent}")
        else:
            yield Check("fail", "SGLang", f"{python} has no sglang", install)
    else:
        yield Check("none", "SGLang", "not installed", f"{install} (its pins clash with Megatron's)")


def _sandbox() -> Iterator[Check]:
    from pacs_megatron.rewards.sandbox import find_problem

    problem = find_problem()
    if problem is None:
        yield Check("ok", "sandbox", "bubblewrap isolates the programs of reward.name=code")
    else:
        yield Check("none", "sandbox", problem, "make install-sandbox (Debian, root); only reward.name=code needs it")


def _slurm() -> Iterator[Check]:
    if shutil.which("sinfo") is None:
        yield Check("none", "Slurm", "no sinfo on PATH", "log in to a cluster, or make install-slurm (Debian, root)")
        return
    found = try_program(["sinfo", "--version"], timeout_s=_TIMEOUT_S).stdout.strip()
    done = try_program(["sinfo", "-h"], timeout_s=_TIMEOUT_S)
    reason = f"no controller responds: {' '.join(done.stderr.split())}"
    yield Check("none", "Slurm", found, reason) if done.returncode else Check("ok", "Slurm", found)


def _nemo_run() -> Iterator[Check]:
    found, lepton = installed("nemo-run"), installed("leptonai")
    if found is None:
        yield Check("none", "nemo-run", "not installed", "pip install nemo-run==0.11.1 leptonai==0.27.0; or sbatch")
    elif lepton != "0.27.0":
        fix = "pip install leptonai==0.27.0: nemo-run's import fails with newer ones"
        yield Check("fail", "nemo-run", f"{found} with leptonai {lepton}", fix)
    else:
        yield Check("ok", "nemo-run", found)


def _containers() -> Iterator[Check]:
    there = [name for name in ("apptainer", "singularity", "enroot", "docker") if shutil.which(name)]
    text = ", ".join(there) or "no Apptainer, enroot or Docker: not needed"
    yield Check("ok" if there else "none", "containers", text)
