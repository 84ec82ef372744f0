"""`doctor`: reports what works on this machine and what to install for the rest. It never fails."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from pacs_megatron.runtime.shipped import shipped_folder
from pacs_megatron.runtime.waiting import run_program


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    """`ok`, `none` (optional and absent) or `bad` (present and harmful, or required and absent)."""
    detail: str
    fix: str = ""


REQUIRED = ("torch", "megatron-core", "transformers", "datasets", "math-verify", "pydantic", "safetensors")
# Megatron-Core 0.16.1 requires this range of Transformer Engine.
TE_RANGE = (Version("2.9"), Version("2.12"))
SGLANG_PYTHON = Path(".venv-sglang/bin/python")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
IB_DEVICES = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (only its size is read)
MIN_SHARED_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
_TIMEOUT_S = 30.0


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def findings() -> list[Finding]:
    """All findings in the order of the report."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _python, _limits, _packages, _cuda, _transformer_engine, _apex, _sglang, _sandbox, _slurm, _nemo_run, _containers
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def report() -> str:
    """The findings as a table, and a summary of what this machine can do."""
    rows = findings()
    width = max(len(row.name) for row in rows)
    lines = [f"{row.state:<4}  {row.name:<{width}}  {row.detail}{f' -> {row.fix}' if row.fix else ''}" for row in rows]
    return "\n".join([*lines, "", *_summary(rows)])


def _summary(rows: list[Finding]) -> list[str]:
    state = {row.name: row.state for row in rows}
    has_required = all(state[name] == "ok" for name in REQUIRED)
    has_cuda = state["CUDA"] == "ok"
    return [
        f"train on CPU (gloo): {_yes(has_required)}",
        f"train on GPU in bf16 and FP8: {_yes(has_required and has_cuda and state['transformer-engine'] == 'ok')} "
        "(FP8 needs sm_89 or later)",
        f"sample with SGLang: {_yes(state['SGLang'] == 'ok')} (the embedded engine needs nothing more)",
        f"submit to Slurm: {_yes(state['Slurm'] == 'ok')} by sbatch; by `submit`: "
        f"{_yes(state['Slurm'] == 'ok' and state['nemo-run'] == 'ok')}",
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _python() -> list[Finding]:
    found = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        Finding("Python", "ok" if good else "bad", found, "" if good else "use Python 3.11 or 3.12"),
        Finding("machine", "ok", f"{platform.platform()}, {cores} cores, {memory:.0f} GiB memory"),
        Finding("shipped files", "ok", f"configs and slurm in {shipped_folder('configs').parent}"),
    ]


def _limits() -> list[Finding]:
    """Limits whose violation causes unrelated error messages."""
    rows = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        fix = f"ulimit -n {MIN_OPEN_FILES} or more: each request in flight and each rank needs a socket"
        rows.append(Finding("open files", "bad", f"at most {files}", fix))
    if SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        if size < MIN_SHARED_BYTES:
            fix = (
                "give the container more (docker --shm-size, --ipc=host): NCCL and weight sync by shared memory use it"
            )
            rows.append(Finding(str(SHARED_MEMORY), "bad", f"{size / 2**20:.0f} MiB", fix))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if IB_DEVICES.is_dir() and any(IB_DEVICES.iterdir()) and locked != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK), or InfiniBand cannot register memory"
        rows.append(Finding("locked memory", "bad", f"at most {locked // 1024} KiB", fix))
    return rows or [Finding("limits", "ok", "open files, shared and locked memory suffice")]


def _packages() -> list[Finding]:
    rows = []
    for name in REQUIRED:
        found = installed(name)
        rows.append(Finding(name, "ok" if found else "bad", found or "not installed", "" if found else "make install"))
    return rows


def _cuda() -> list[Finding]:
    if installed("torch") is None:
        return [Finding("CUDA", "none", "unknown without torch")]
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        if _driver() is None:
            return [Finding("CUDA", "none", f"{built}, no NVIDIA driver", "training runs on CPU over gloo")]
        fix = "install torch for your CUDA (README, Install), or a newer driver; nvidia-smi names its CUDA"
        return [Finding("CUDA", "bad", f"{built}, driver {_driver()}, and it finds no GPU", fix)]
    rows = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        rows.append(f"{props.name} ({props.total_memory / 2**30:.0f} GiB, sm_{props.major}{props.minor})")
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return [
        Finding(
            "CUDA",
            "ok",
            f"{torch.version.cuda}, driver {_driver()}, NCCL {nccl}, {len(rows)} GPUs: {', '.join(sorted(set(rows)))}",
        )
    ]


def _driver() -> str | None:
    """The NVIDIA driver's version, or None without a driver."""
    if not DRIVER_FILE.is_file():
        return None
    words = DRIVER_FILE.read_text(encoding="utf-8").split("\n", 1)[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _output(command: list[str]) -> tuple[int, str, str]:
    """(status, stdout, stderr in one line) of a program; status 1 if it hangs or does not start."""
    try:
        done = run_program(command, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", " ".join(str(error).split())
    return done.returncode, done.stdout.strip(), " ".join(done.stderr.split())


def _transformer_engine() -> list[Finding]:
    found = installed("transformer-engine")
    if found is None:
        fix = (
            "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12' (needs CUDA): bf16 kernels, FP8"
        )
        return [Finding("transformer-engine", "none", "not installed", fix)]
    low, high = TE_RANGE
    if not low <= Version(found) < high:
        return [Finding("transformer-engine", "bad", found, f"megatron-core 0.16.1 wants >= {low}, < {high}")]
    if find_spec("transformer_engine_torch") is None:
        fix = "the PyTorch extension is missing: pip install --no-build-isolation 'transformer-engine[pytorch]'"
        return [Finding("transformer-engine", "bad", found, fix)]
    return [Finding("transformer-engine", "ok", found)]


def _apex() -> list[Finding]:
    """NVIDIA Apex contains `amp_C`; PyPI's `apex` is an abandoned web toolkit of the same name."""
    if find_spec("amp_C") is not None:
        return [Finding("NVIDIA Apex", "ok", "fused optimizer kernels are installed")]
    found = installed("apex")
    if found is not None:
        detail = f"`apex` {found} is installed, but without NVIDIA's kernels: PyPI's apex is another package"
        return [
            Finding("NVIDIA Apex", "bad", detail, "pip uninstall apex; build NVIDIA's from source or use NGC's image")
        ]
    return [Finding("NVIDIA Apex", "none", "not installed; Transformer Engine or torch supply the fused optimizer")]


def _sglang() -> list[Finding]:
    here = installed("sglang")
    if here is not None:
        return [Finding("SGLang", "ok", f"{here}, in this environment")]
    if SGLANG_PYTHON.exists():
        code = "from importlib.metadata import version; print(version('sglang'))"
        status, found, _ = _output([str(SGLANG_PYTHON), "-c", code])
        if status == 0:
            return [Finding("SGLang", "ok", f"{found}, in {SGLANG_PYTHON.parent.parent}")]
        return [Finding("SGLang", "bad", f"{SGLANG_PYTHON} has no sglang", "make install-sglang")]
    return [Finding("SGLang", "none", "not installed", "make install-sglang (its pins clash with Megatron's)")]


def _sandbox() -> list[Finding]:
    from pacs_megatron.rewards.sandbox import find_problem

    problem = find_problem()
    if problem is not None:
        return [
            Finding("sandbox", "none", problem, "make install-sandbox (Debian, root); only reward.name=code needs it")
        ]
    return [Finding("sandbox", "ok", "bubblewrap isolates the programs of reward.name=code")]


def _slurm() -> list[Finding]:
    if shutil.which("sinfo") is None:
        return [
            Finding("Slurm", "none", "no sinfo on PATH", "log in to a cluster, or make install-slurm (Debian, root)")
        ]
    _, found, _ = _output(["sinfo", "--version"])
    status, _, reason = _output(["sinfo", "-h"])
    if status:
        return [Finding("Slurm", "none", found, f"no controller responds: {reason}")]
    return [Finding("Slurm", "ok", found)]


def _nemo_run() -> list[Finding]:
    found, lepton = installed("nemo-run"), installed("leptonai")
    if found is None:
        return [
            Finding("nemo-run", "none", "not installed", "pip install nemo-run==0.11.1 leptonai==0.27.0; or sbatch")
        ]
    if lepton != "0.27.0":
        fix = "pip install leptonai==0.27.0: nemo-run's import fails with newer ones"
        return [Finding("nemo-run", "bad", f"{found} with leptonai {lepton}", fix)]
    return [Finding("nemo-run", "ok", found)]


def _containers() -> list[Finding]:
    there = [name for name in ("apptainer", "singularity", "enroot", "docker") if shutil.which(name)]
    return [
        Finding(
            "containers", "ok" if there else "none", ", ".join(there) or "no Apptainer, enroot or Docker: not needed"
        )
    ]
