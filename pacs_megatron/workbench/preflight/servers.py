"""Checks of SGLang: options, version, and whether a server starts and responds."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.rollout_options import SglangRollout, SglangServers
from pacs_megatron.runtime.waiting import NOT_RUN, try_program
from pacs_megatron.sglang.build import server_apis, server_specs, start_servers
from pacs_megatron.workbench.preflight.check import Check, attempt, judged
from pacs_megatron.workbench.preflight.doctor import SGLANG_VERSION_CODE

EXPECTED = {"cpu": "0.5.23", "cuda": "0.5.20"}
"""Version of SGLang by device: of requirements/sglang.lock and requirements/sglang-gpu.txt."""
NCCL_CODE = """
import torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except (AttributeError, RuntimeError):  # a CPU build
    nccl = "none"
print(torch.__version__, nccl)
"""
_IMPORT_S = 120.0
_FIRST_RESPONSE_S = 300.0
"""The first request compiles kernels on a GPU."""


def check_servers(loaded: LoadedConfig, model_dir: Path | None, *, start: bool) -> Iterator[Check]:
    """Options and interpreter; with `start` also starts the first configured server, or sends a
    request to each url.

    `model_dir` is the model's local folder; if it is None, no server is started.
    """
    rollout = loaded.config.rollout.sglang
    if rollout is None:
        return
    checks = list(_options(loaded, rollout))
    yield from checks
    key = "rollout.urls" if rollout.servers is None else "rollout.servers"
    if any(check.level == "fail" for check in checks):
        return
    if not start:
        yield Check(
            "warn", key, "no server was tested (--skip-servers)", "run preflight without it once"
        )
    elif rollout.servers is None:
        for url in rollout.urls:
            yield attempt(
                key, lambda url=url: _request(rollout, url), "start it, or correct the address"
            )  # type: ignore[misc]
    else:
        yield _start(loaded, rollout, rollout.servers, model_dir)


def _options(loaded: LoadedConfig, rollout: SglangRollout) -> Iterator[Check]:
    if rollout.api_key_env is not None and not os.environ.get(rollout.api_key_env):
        yield Check(
            "fail",
            "rollout.api_key_env",
            f"{rollout.api_key_env} is not set",
            "export it, or remove the key",
        )
    if rollout.servers is None:
        return
    longest = max_sequence_tokens(loaded.config)
    judged = loaded.config.evaluation.sampling
    if judged is not None:
        longest = max(longest, loaded.config.data.max_prompt_tokens + judged.max_response_tokens)
    context = rollout.servers.context_length
    if context is not None and context < longest:
        message = f"{context} tokens, but prompts and responses may reach {longest}"
        yield Check("fail", "rollout.servers.context_length", message, f"use at least {longest}")
    version = _version(rollout.servers)
    yield version
    if (
        version.level != "fail"
        and rollout.sync.transport == "broadcast"
        and rollout.servers.device == "cuda"
    ):
        yield check_nccl((sys.executable,), rollout.servers.python)


def check_nccl(trainer: tuple[str, ...], servers: tuple[str, ...]) -> Check:
    """Both sides of a broadcast need the same NCCL: it rejects a process group of different
    versions.
    """
    key = "rollout.sync.transport"
    found = []
    for side, python in (("trainer", trainer), ("servers", servers)):
        done = try_program([*python, "-c", NCCL_CODE], timeout_s=_IMPORT_S)
        words = done.stdout.split()
        if done.returncode or len(words) != 2:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return Check(
                "warn", key, f"NCCL of the {side} is unknown: {reason}", "compare both by hand"
            )
        found.append(words)
    (torch, nccl), (their_torch, their_nccl) = found
    text = f"NCCL {nccl} (torch {torch}) in the trainer, NCCL {their_nccl} (torch {their_torch}) in the servers"
    text += "" if nccl == their_nccl else ": NCCL rejects the process group"
    fix = "use one torch on both sides (docs/compatibility.md), or rollout.sync.transport=disk"
    return judged(key, nccl == their_nccl, text, fix)


def _version(servers: SglangServers) -> Check:
    key = "rollout.servers.python"
    program = " ".join(servers.python)
    done = try_program([*servers.python, "-c", SGLANG_VERSION_CODE], timeout_s=_IMPORT_S)
    found = done.stdout.strip()
    if done.returncode == NOT_RUN:
        return Check("fail", key, f"{program}: {done.stderr}", "set an existing interpreter")
    if done.returncode or not found:
        fix = "install sglang there (make install-sglang), or set the interpreter that has it"
        return Check("fail", key, f"{program} has no sglang", fix)
    expected = EXPECTED[servers.device]
    fix = f"pip install sglang=={expected}, the version for rollout.servers.device={servers.device}"
    return judged(key, found == expected, f"sglang {found}", fix, "warn")


def _request(rollout: SglangRollout, url: str) -> str:
    """Samples one token from a running server. Raises RolloutError or ConfigError."""
    (api,) = server_apis(rollout, (url,))
    begin = time.monotonic()
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    api.query("/generate", lambda response: response["meta_info"], body, _FIRST_RESPONSE_S)
    return (
        f"{url} responds in {time.monotonic() - begin:.1f} s, weight version {api.weight_version()}"
    )


def _start(
    loaded: LoadedConfig, rollout: SglangRollout, servers: SglangServers, model_dir: Path | None
) -> Check:
    """Starts the first configured server, samples one token, ends the server."""
    key = "rollout.servers"
    if model_dir is None:
        return Check(
            "warn", key, "not started: the model cannot be read", "correct model.path first"
        )
    if not list(model_dir.glob("*.safetensors")):
        return Check("warn", key, f"not started: {model_dir} has no Hugging Face weights")
    if servers.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return Check(
                "warn", key, "not started: no GPU here", "run preflight inside the job too"
            )

    def starts() -> str:
        model = loaded.config.model.model_copy(update={"path": str(model_dir)})
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pacs-preflight-") as folder:
            specs = server_specs(rollout, model, Path(folder), loaded.config.policy.routing)
            (server,) = start_servers(specs[:1], servers.start_timeout_s)
            try:
                ready_s = time.monotonic() - begin
                return f"started in {ready_s:.0f} s and {_request(rollout, server.url)}; ended"
            finally:
                server.close()

    return attempt(
        key, starts, "check rollout.servers.extra_args, mem_fraction, tp and start_timeout_s"
    )
