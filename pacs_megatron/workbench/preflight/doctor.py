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

from pacs_megatron.runtime.environment import (
    DRIVER_FILES,
    apex_kind,
    installed,
    parse_version,
    transformer_engine_problem,
)
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
SGLANG_PYTHONS = (Path(".venv-sglang-gpu/bin/python"), Path(".venv-sglang/bin/python"))
SGLANG_VERSION_CODE = "from importlib.metadata import version; print(version('sglang'))"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_TIMEOUT_S = 30.0


def report() -> str:
    """The results as a table, and a summary of the machine's abilities; `none`: optional and
    absent.
    """
    rows = [
        *python(),
        *packages(),
        cuda(),
        transformer_engine(),
        apex(),
        _sglang(),
        _sandbox(),
        _slurm(),
        _nemo_run(),
    ]
    width = max(len(row.key) for row in rows)
    table = [str(replace(row, key=f"{row.key:<{width}}")) for row in rows]
    return "\n".join([*table, "", *_abilities(rows)])


def _abilities(rows: list[Check]) -> list[str]:
    """One line for each thing that this machine can or cannot do."""
    is_ok = {row.key: row.level == "ok" for row in rows}
    cpu = all(is_ok[name] for name in REQUIRED)
    gpu = cpu and is_ok["CUDA"] and is_ok["transformer-engine"]
    sglang = is_ok["SGLang"]
    slurm = is_ok["Slurm"]
    submit = slurm and is_ok["nemo-run"]
    words = {True: "yes", False: "no"}
    return [
        f"train on CPU (gloo): {words[cpu]}",
        f"train on GPU in bf16 and FP8: {words[gpu]} (FP8 needs sm_89 or later)",
        f"sample with SGLang: {words[sglang]} (the embedded engine needs nothing more)",
        f"submit to Slurm: {words[slurm]} by sbatch; by `submit`: {words[submit]}",
    ]


# ------------------------------------------------------------------------- Python and its packages
def python() -> Iterator[Check]:
    """The interpreter, the machine, and the folder of the shipped files."""
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield judged("Python", is_supported, platform.python_version(), "use Python 3.11, 3.12 or 3.13")

    cores = len(os.sched_getaffinity(0))
    memory_gib = psutil.virtual_memory().total / 2**30
    machine = f"{platform.platform()}, {cores} cores, {memory_gib:.0f} GiB memory"
    yield Check("ok", "machine", machine)

    yield Check("ok", "shipped files", f"configs and slurm in {shipped_folder('configs').parent}")


def packages() -> Iterator[Check]:
    """The required packages, and one failure for every other requirement that is not met."""
    problems = {check.key: check for check in version_problems()}
    for name in REQUIRED:
        yield problems.pop(name, Check("ok", name, str(installed(name))))
    yield from problems.values()


def version_problems(package: str = "pacs-megatron") -> Iterator[Check]:
    """One failure per required distribution that is missing or outside this package's range."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        message = f"{package} is not installed: its requirements cannot be read"
        yield Check("warn", "software", message, "make install")
        return

    for line in lines:
        requirement = Requirement(line)
        # The requirements of an extra do not apply.
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue

        version = installed(requirement.name)
        specifier = requirement.specifier
        if version is None:
            state = "not installed"
        elif specifier.contains(Version(version).base_version, prereleases=True):
            continue
        else:
            state = f"{version} is installed"
        yield Check("fail", requirement.name, f"{state}, {specifier} is required", "make install")


# -------------------------------------------------------------------------------------------- GPUs
def cuda() -> Check:
    """torch's CUDA, the driver, NCCL and the GPUs."""
    if installed("torch") is None:
        return Check("none", "CUDA", "unknown without torch")
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        build = "torch is a CPU build"
        if torch.version.cuda:
            build = f"torch is built for CUDA {torch.version.cuda}"
        if driver is None:
            fix = "training runs on CPU over gloo"
            return Check("none", "CUDA", f"{build}, no NVIDIA driver", fix)
        fix = (
            "install torch for your CUDA (README, Install), or a newer driver; nvidia-smi names "
            "its CUDA"
        )
        return Check("fail", "CUDA", f"{build}, driver {driver}, and it finds no GPU", fix)

    names = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory_gib = gpu.total_memory / 2**30
        names.append(f"{gpu.name} ({memory_gib:.0f} GiB, sm_{gpu.major}{gpu.minor})")
    nccl_parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    nccl = ".".join(str(part) for part in nccl_parts)
    kinds = ", ".join(sorted(set(names)))
    message = f"{torch.version.cuda}, driver {driver}, NCCL {nccl}, {len(names)} GPUs: {kinds}"
    return Check("ok", "CUDA", message)


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None without a driver."""
    if not DRIVER_FILE.is_file():
        has_driver = any(path.exists() for path in DRIVER_FILES)
        return "unknown" if has_driver else None
    first_line = DRIVER_FILE.read_text(encoding="utf-8").split("\n", 1)[0]
    for word in first_line.split():
        if word[:1].isdigit() and "." in word:
            return word
    return "unknown"


def transformer_engine() -> Check:
    """Transformer Engine in the range of versions that Megatron-Core supports."""
    key = "transformer-engine"
    install = "`make install-gpu`"
    version = installed(key)
    engine = parse_version(version)
    megatron = parse_version(installed("megatron-core"))
    if version is None or engine is None:
        return Check("none", key, "not installed", f"{install}: bf16 kernels, FP8")
    if megatron is not None:
        problem = transformer_engine_problem(engine, megatron)
        if problem is not None:
            return Check("fail", key, version, problem)
    has_extension = find_spec("transformer_engine_torch") is not None
    return judged(key, has_extension, version, f"the PyTorch extension is missing: {install}")


def apex() -> Check:
    """NVIDIA Apex; PyPI's `apex` is an abandoned web toolkit of the same name."""
    key = "NVIDIA Apex"
    version = installed("apex") or "of unknown version"
    kind = apex_kind()
    if kind == "nvidia":
        return Check("ok", key, "fused optimizer kernels are installed")
    if kind == "none":
        message = "not installed; Transformer Engine or torch supply the fused optimizer"
        return Check("none", key, message)
    if kind == "no kernels":
        message = f"`apex` {version} was built without its CUDA kernels (no amp_C)"
        return Check("fail", key, message, "build it with --cpp_ext and --cuda_ext, or uninstall")
    message = f"`apex` {version} is PyPI's package of this name, not NVIDIA's: a run rejects it"
    return Check("fail", key, message, "pip uninstall apex; build NVIDIA's from source")


# ---------------------------------------------------------------------------------- other programs
def _sglang() -> Check:
    """SGLang in this environment, else in one that `make` builds."""
    key = "SGLang"
    install = "`make install-gpu`, on CPU `make install-sglang`"
    version_here = installed("sglang")
    if version_here is not None:
        return Check("ok", key, f"{version_here}, in this environment")

    interpreter = next((path for path in SGLANG_PYTHONS if path.exists()), None)
    if interpreter is None:
        return Check("none", key, "not installed", f"{install} (its pins clash with Megatron's)")
    done = try_program([str(interpreter), "-c", SGLANG_VERSION_CODE], timeout_s=_TIMEOUT_S)
    if done.returncode:
        return Check("fail", key, f"{interpreter} has no sglang", install)
    return Check("ok", key, f"{done.stdout.strip()}, in {interpreter.parent.parent}")


def _sandbox() -> Check:
    from pacs_megatron.rewards.sandbox import find_problem

    problem = find_problem()
    message = problem or "bubblewrap isolates the programs of reward.name=code"
    fix = "make install-sandbox (Debian, root); only reward.name=code needs it"
    return judged("sandbox", problem is None, message, fix, "none")


def _slurm() -> Check:
    if shutil.which("sinfo") is None:
        fix = "log in to a cluster, or make install-slurm (Debian, root)"
        return Check("none", "Slurm", "no sinfo on PATH", fix)
    version = try_program(["sinfo", "--version"], timeout_s=_TIMEOUT_S).stdout.strip()
    done = try_program(["sinfo", "-h"], timeout_s=_TIMEOUT_S)
    reason = f"no controller responds: {' '.join(done.stderr.split())}"
    return judged("Slurm", done.returncode == 0, version, reason, "none")


def _nemo_run() -> Check:
    version = installed("nemo-run")
    lepton = installed("leptonai")
    if version is None:
        fix = "pip install nemo-run==0.11.1 leptonai==0.27.0; or sbatch"
        return Check("none", "nemo-run", "not installed", fix)
    if lepton == "0.27.0":
        return Check("ok", "nemo-run", version)
    fix = "pip install leptonai==0.27.0: nemo-run's import fails with newer ones"
    return Check("fail", "nemo-run", f"{version} with leptonai {lepton}", fix)
