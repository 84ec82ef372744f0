"""`doctor`: reports what works on this machine and what to install for the rest. It never fails."""

import os
import platform
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

from pacs_megatron.runtime.environment import DRIVER_FILES, installed
from pacs_megatron.runtime.shipped import shipped_folder
from pacs_megatron.runtime.waiting import try_program
from pacs_megatron.workbench.preflight.check import Check, judged

REQUIRED = (
    "torch",
    "megatron-core",
    "transformers",
    "datasets",
    "math-verify",
    "pydantic",
    "safetensors",
)
# Megatron-Core 0.16.1 requires this range of Transformer Engine.
TE_RANGE = (Version("2.9"), Version("2.12"))
SGLANG_PYTHONS = (Path(".venv-sglang-gpu/bin/python"), Path(".venv-sglang/bin/python"))
SGLANG_VERSION_CODE = "from importlib.metadata import version; print(version('sglang'))"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_TIMEOUT_S = 30.0


def report() -> str:
    """The findings as a table, and a summary of the machine's abilities; `none`: optional and
    absent.
    """
    own = (cuda(), transformer_engine(), apex(), _sglang(), _sandbox(), _slurm(), _nemo_run())
    rows = [*python(), *packages(), *own]
    width = max(len(row.key) for row in rows)
    is_ok = {row.key: row.level == "ok" for row in rows}
    cpu = all(is_ok[name] for name in REQUIRED)
    gpu = cpu and is_ok["CUDA"] and is_ok["transformer-engine"]
    slurm = is_ok["Slurm"]
    words = {True: "yes", False: "no"}
    return "\n".join(
        [
            *(str(replace(row, key=f"{row.key:<{width}}")) for row in rows),
            "",
            f"train on CPU (gloo): {words[cpu]}",
            f"train on GPU in bf16 and FP8: {words[gpu]} (FP8 needs sm_89 or later)",
            f"sample with SGLang: {words[is_ok['SGLang']]} (the embedded engine needs nothing "
            "more)",
            f"submit to Slurm: {words[slurm]} by sbatch; by `submit`: "
            f"{words[slurm and is_ok['nemo-run']]}",
        ]
    )


def python() -> Iterator[Check]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield judged("Python", good, platform.python_version(), "use Python 3.11 or 3.12")
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    yield Check("ok", "machine", f"{platform.platform()}, {cores} cores, {memory:.0f} GiB memory")
    yield Check("ok", "shipped files", f"configs and slurm in {shipped_folder('configs').parent}")


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
        yield Check(
            "warn",
            "software",
            f"{package} is not installed: its requirements cannot be read",
            "make install",
        )
        return
    for wanted in map(Requirement, lines):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = installed(wanted.name)
        if found is None or not wanted.specifier.contains(
            Version(found).base_version, prereleases=True
        ):
            state = "not installed" if found is None else f"{found} is installed"
            yield Check(
                "fail", wanted.name, f"{state}, {wanted.specifier} is required", "make install"
            )


def cuda() -> Check:
    if installed("torch") is None:
        return Check("none", "CUDA", "unknown without torch")
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is a CPU build"
        )
        if driver is None:
            return Check(
                "none", "CUDA", f"{built}, no NVIDIA driver", "training runs on CPU over gloo"
            )
        fix = "install torch for your CUDA (README, Install), or a newer driver; nvidia-smi names its CUDA"
        return Check("fail", "CUDA", f"{built}, driver {driver}, and it finds no GPU", fix)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {
        f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})"
        for gpu in gpus
    }
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    found = f"{torch.version.cuda}, driver {driver}, NCCL {nccl}, {len(gpus)} GPUs: {', '.join(sorted(kinds))}"
    return Check("ok", "CUDA", found)


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None without a driver."""
    if not DRIVER_FILE.is_file():
        return "unknown" if any(path.exists() for path in DRIVER_FILES) else None
    words = DRIVER_FILE.read_text(encoding="utf-8").split("\n", 1)[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def transformer_engine() -> Check:
    key = "transformer-engine"
    install = "`make install-gpu`"
    found = installed(key)
    low, high = TE_RANGE
    if found is None:
        return Check("none", key, "not installed", f"{install}: bf16 kernels, FP8")
    if not low <= Version(found) < high:
        return Check("fail", key, found, f"megatron-core 0.16.1 needs >= {low}, < {high}")
    is_whole = find_spec("transformer_engine_torch") is not None
    return judged(key, is_whole, found, f"the PyTorch extension is missing: {install}")


def apex() -> Check:
    """NVIDIA Apex contains `amp_C`; PyPI's `apex` is an abandoned web toolkit of the same name."""
    key = "NVIDIA Apex"
    found = installed("apex")
    if find_spec("amp_C") is not None:
        return Check("ok", key, "fused optimizer kernels are installed")
    if found is None:
        return Check(
            "none", key, "not installed; Transformer Engine or torch supply the fused optimizer"
        )
    detail = (
        f"`apex` {found} is installed, but without NVIDIA's kernels: PyPI's apex is another package"
    )
    return Check("fail", key, detail, "pip uninstall apex; build NVIDIA's from source")


def _sglang() -> Check:
    here = installed("sglang")
    python = next((path for path in SGLANG_PYTHONS if path.exists()), None)
    install = "`make install-gpu`, on CPU `make install-sglang`"
    if here is not None:
        return Check("ok", "SGLang", f"{here}, in this environment")
    if python is None:
        return Check(
            "none", "SGLang", "not installed", f"{install} (its pins clash with Megatron's)"
        )
    done = try_program([str(python), "-c", SGLANG_VERSION_CODE], timeout_s=_TIMEOUT_S)
    if done.returncode:
        return Check("fail", "SGLang", f"{python} has no sglang", install)
    return Check("ok", "SGLang", f"{done.stdout.strip()}, in {python.parent.parent}")


def _sandbox() -> Check:
    from pacs_megatron.rewards.sandbox import find_problem

    problem = find_problem()
    message = problem or "bubblewrap isolates the programs of reward.name=code"
    fix = "make install-sandbox (Debian, root); only reward.name=code needs it"
    return judged("sandbox", problem is None, message, fix, "none")


def _slurm() -> Check:
    if shutil.which("sinfo") is None:
        return Check(
            "none",
            "Slurm",
            "no sinfo on PATH",
            "log in to a cluster, or make install-slurm (Debian, root)",
        )
    found = try_program(["sinfo", "--version"], timeout_s=_TIMEOUT_S).stdout.strip()
    done = try_program(["sinfo", "-h"], timeout_s=_TIMEOUT_S)
    reason = f"no controller responds: {' '.join(done.stderr.split())}"
    return judged("Slurm", done.returncode == 0, found, reason, "none")


def _nemo_run() -> Check:
    found = installed("nemo-run")
    lepton = installed("leptonai")
    if found is None:
        return Check(
            "none",
            "nemo-run",
            "not installed",
            "pip install nemo-run==0.11.1 leptonai==0.27.0; or sbatch",
        )
    if lepton == "0.27.0":
        return Check("ok", "nemo-run", found)
    fix = "pip install leptonai==0.27.0: nemo-run's import fails with newer ones"
    return Check("fail", "nemo-run", f"{found} with leptonai {lepton}", fix)
