"""One stand-in server: its place is taken by a server inside the modelled host's process, until
this process is killed.
"""

import os
import shutil
import sys

from node_link import call, connect


def caches() -> "list[str]":
    """Folders of compiled kernels, as SGLang 0.5.23 and flashinfer 0.7.2 choose them.

    srt/environ.py:2308 and kernels/jit/utils/compile/cache.py:317; flashinfer jit/env.py:66.
    """
    base = os.environ.get("SGLANG_CACHE_DIR", os.path.expanduser("~/.cache/sglang"))
    flashinfer = os.environ.get("FLASHINFER_WORKSPACE_BASE", base)
    return [
        base,
        os.environ.get("SGLANG_JIT_CACHE_DIR", os.path.expanduser("~/.cache/sglang/jit")),
        os.path.join(flashinfer, ".cache", "flashinfer"),
        os.environ.get("TRITON_CACHE_DIR", os.path.join(base, "triton")),
        os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(base, "inductor")),
    ]


with connect() as link:
    environment = {
        "python": sys.executable,
        "home": os.environ["HOME"],
        "ninja": shutil.which("ninja"),
        "caches": caches(),
    }
    server = {
        "args": sys.argv[1:],
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "pid": os.getpid(),
        "environment": environment,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    answer = call(link, {"op": "serve", **server})
print(answer["reason"], flush=True)
sys.exit(answer["code"])
