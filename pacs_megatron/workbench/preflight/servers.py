"""Checks of SGLang: options, version, compilers, and whether a server starts and responds."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.checks import min_server_context
from pacs_megatron.config.rollout_options import SglangRollout, SglangServers
from pacs_megatron.errors import RolloutError
from pacs_megatron.runtime.waiting import NOT_RUN, try_program
from pacs_megatron.sglang import start as start_script
from pacs_megatron.sglang.build import server_apis, server_specs, start_servers
from pacs_megatron.workbench.preflight.check import Check, attempt, judged
from pacs_megatron.workbench.preflight.doctor import SGLANG_VERSION_CODE
from pacs_megatron.workbench.preflight.host import severity

EXPECTED = "0.5.23"
"""Version of SGLang: of requirements/sglang.lock and requirements/sglang-gpu.txt."""
NCCL_CODE = """
import torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except (AttributeError, RuntimeError):  # a CPU build
    nccl = "none"
print(torch.__version__, nccl)
"""
PROGRAMS_CODE = """
scope = {{"__name__": "start"}}
exec({start!r}, scope)
scope["add_programs_to_path"]()

import os, shutil
cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
if cuda is None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
else:
    nvcc = shutil.which(cuda + "/bin/nvcc")
found = {{
    "ninja": shutil.which("ninja"),
    "nvcc": nvcc,
    "c++": shutil.which(os.environ.get("CXX", "c++")),
}}
print(" ".join(name for name, path in found.items() if path is None) or "all")
"""
"""Prints the programs that SGLang and flashinfer do not find when they compile a kernel; they
search `nvcc` as kernels/jit/utils/compile/toolchain.py does (SGLang 0.5.23).
"""
RETRACT_SINCE = (0, 5, 21)
"""First SGLang that flushes its cache while paused requests wait; 0.5.20 rejects it."""
_IMPORT_S = 120.0
_FIRST_RESPONSE_S = 300.0
"""The first request compiles kernels on a GPU."""


def check_servers(loaded: LoadedConfig, model_dir: Path | None, *, start: bool) -> Iterator[Check]:
    """Checks options and interpreter, and whether servers respond.

    Args:
        loaded: the run.
        model_dir: the model's local folder; if it is None, no server is started.
        start: whether to start the first configured server, or to send a request to each url.
    """
    rollout = loaded.config.rollout.sglang
    if rollout is None:
        return
    checks = list(_options(loaded, rollout))
    yield from checks
    if any(check.level == "fail" for check in checks):
        return

    key = "rollout.urls" if rollout.servers is None else "rollout.servers"
    if not start:
        message = "no server was tested (--skip-servers)"
        yield Check("warn", key, message, "run preflight without it once")
    elif rollout.servers is None:
        for url in rollout.urls:
            fix = "start it, or correct the address"
            yield attempt(key, partial(_request, loaded, rollout, url), fix)
    else:
        yield _start(loaded, rollout, rollout.servers, model_dir)


# ---------------------------------------------------------------------------- options and versions
def _options(loaded: LoadedConfig, rollout: SglangRollout) -> Iterator[Check]:
    """API key, version of SGLang and of NCCL, and what compiles kernels."""
    key_variable = rollout.api_key_env
    if key_variable is not None and not os.environ.get(key_variable):
        message = f"{key_variable} is not set"
        yield Check("fail", "rollout.api_key_env", message, "export it, or remove the key")
    servers = rollout.servers
    if servers is None:
        return

    version = _version(servers)
    yield version
    if version.level != "fail":
        yield from _check_pause(rollout, version.message)
    if version.level != "fail" and servers.device == "cuda":
        yield check_compilers(servers.python)
    is_nccl_shared = rollout.sync.transport == "broadcast" and servers.device == "cuda"
    if version.level != "fail" and is_nccl_shared:
        yield check_nccl((sys.executable,), servers.python)


def check_nccl(trainer: tuple[str, ...], servers: tuple[str, ...]) -> Check:
    """Both sides of a broadcast need the same NCCL: it rejects a process group of different
    versions.

    Args:
        trainer: words of the command that starts the trainer's interpreter.
        servers: the same of the servers.
    """
    key = "rollout.sync.transport"
    versions = []
    for side, python in (("trainer", trainer), ("servers", servers)):
        done = try_program([*python, "-c", NCCL_CODE], timeout_s=_IMPORT_S)
        words = done.stdout.split()
        if done.returncode or len(words) != 2:
            lines = done.stderr.strip().splitlines() or ["no output"]
            message = f"NCCL of the {side} is unknown: {lines[-1]}"
            return Check("warn", key, message, "compare both by hand")
        versions.append(words)

    (our_torch, our_nccl), (their_torch, their_nccl) = versions
    message = (
        f"NCCL {our_nccl} (torch {our_torch}) in the trainer, NCCL {their_nccl} (torch "
        f"{their_torch}) in the servers"
    )
    if our_nccl != their_nccl:
        message += ": NCCL rejects the process group"
    fix = "use one torch on both sides (docs/compatibility.md), or rollout.sync.transport=disk"
    return judged(key, our_nccl == their_nccl, message, fix)


def _version(servers: SglangServers) -> Check:
    """The version of SGLang that the configured interpreter imports."""
    key = "rollout.servers.python"
    program = " ".join(servers.python)
    done = try_program([*servers.python, "-c", SGLANG_VERSION_CODE], timeout_s=_IMPORT_S)
    version = done.stdout.strip()
    if done.returncode == NOT_RUN:
        return Check("fail", key, f"{program}: {done.stderr}", "set an existing interpreter")
    if done.returncode or not version:
        fix = "install sglang there (make install-sglang), or set the interpreter that has it"
        return Check("fail", key, f"{program} has no sglang", fix)

    fix = f"pip install sglang=={EXPECTED}, the version that this project is tested with"
    return judged(key, version == EXPECTED, f"sglang {version}", fix, "warn")


def _check_pause(rollout: SglangRollout, version: str) -> Iterator[Check]:
    """Whether this SGLang can update its weights with retracted requests in its queue."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if rollout.sync.pause == "retract" and numbers < RETRACT_SINCE:
        since = ".".join(map(str, RETRACT_SINCE))
        message = f"retract, but {version} keeps its cache while retracted requests wait"
        fix = f"use abort or in_place, or SGLang {since} or later"
        yield Check("fail", "rollout.sync.pause", message, fix)


def check_compilers(python: tuple[str, ...]) -> Check:
    """Whether servers find the programs with which they compile kernels at their start.

    Args:
        python: words of the command that starts the servers' interpreter.
    """
    key = "rollout.servers (compilers)"
    code = PROGRAMS_CODE.format(start=Path(start_script.__file__).read_text(encoding="utf-8"))
    done = try_program([*python, "-c", code], timeout_s=_IMPORT_S)
    words = done.stdout.split()
    if done.returncode or not words:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return Check("warn", key, f"not checked: {lines[-1]}")

    message = "ninja, nvcc and c++ are found"
    if words != ["all"]:
        message = f"{', '.join(words)} not found: the server cannot compile its kernels"
    fix = (
        "ninja belongs to the servers' environment (pip install ninja); load a CUDA module with "
        "nvcc, or set CUDA_HOME; c++ is the system's, or set CXX"
    )
    return judged(key, words == ["all"], message, fix, severity())


# --------------------------------------------------------------------------------- running servers
def _request(loaded: LoadedConfig, rollout: SglangRollout, url: str) -> str:
    """Samples a few tokens from a running server.

    Raises:
        RolloutError: it does not respond, or its context is too short for the run.
        ConfigError: the API key is not valid.
    """
    (api,) = server_apis(rollout, (url,))
    begin = time.monotonic()
    api.warm_up(_FIRST_RESPONSE_S)
    seconds = time.monotonic() - begin

    context = api.context_tokens()
    needed = min_server_context(loaded.config)
    if context is not None and context < needed:
        raise RolloutError(
            f"{url} has a context or KV cache of {context} tokens, and shortens the longest "
            f"responses; start it with at least {needed} for both"
        )
    return f"{url} responds in {seconds:.1f} s, weight version {api.weight_version()}"


def _start(
    loaded: LoadedConfig, rollout: SglangRollout, servers: SglangServers, model_dir: Path | None
) -> Check:
    """Starts the first configured server, samples one token, ends the server."""
    key = "rollout.servers"
    if model_dir is None:
        message = "not started: the model cannot be read"
        return Check("warn", key, message, "correct model.path first")
    if not list(model_dir.glob("*.safetensors")):
        return Check("warn", key, f"not started: {model_dir} has no Hugging Face weights")
    if servers.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            message = "not started: no GPU here"
            return Check("warn", key, message, "run preflight inside the job too")

    model = loaded.config.model.model_copy(update={"path": str(model_dir)})

    def start_and_request() -> str:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pacs-preflight-") as folder:
            specs = server_specs(rollout, model, Path(folder), loaded.config.policy.routing)
            (server,) = start_servers(specs[:1], servers.start_timeout_s)
            try:
                ready_s = time.monotonic() - begin
                response = _request(loaded, rollout, server.url)
                return f"started in {ready_s:.0f} s and {response}; ended"
            finally:
                server.close()

    fix = "check rollout.servers.extra_args, mem_fraction, tp and start_timeout_s"
    return attempt(key, start_and_request, fix)
