"""Starts `sglang.launch_server` with what only the server's own interpreter knows.

The text of this file is passed to `python -c`, because the server's interpreter has no
pacs_megatron. It adds

- the folder of the interpreter's programs to PATH: SGLang and flashinfer compile kernels with
  `ninja`, a package of this environment, and search it on PATH (kernels/jit/utils/compile/ninja.py
  and flashinfer/jit/cpp_ext.py, `run_ninja`);
- the API key: every user of the host can read a command line;
- `--mem-fraction-static`: SGLang takes it as a share of the memory that is free at its start
  (mem_cache/kv_cache_configurator.py:3007 in 0.5.23), so the same value gives a restarted server
  beside a trainer less than it had before. The budget here is a share of the GPU's total memory;
  the start waits until that much is free.
"""

import os
import runpy
import sys
import sysconfig
import time

RESERVE = 3 * 2**30
"""Bytes that must be free in addition to the budget: the server's CUDA context, graphs and
activations.
"""
REPORT_S = 10.0


def memory_share(fraction: float, devices: "list[str]") -> float:
    """Share of the free memory that equals `fraction` of the total, on the fullest of these GPUs.

    Waits for free memory.

    Args:
        fraction: share of the total memory of the smallest GPU.
        devices: numbers or UUIDs, the entries of CUDA_VISIBLE_DEVICES.
    """
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    handles = []
    for device in devices:
        if device.isdigit():
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(device)))
        else:
            handles.append(pynvml.nvmlDeviceGetHandleByUUID(device.encode()))

    report_at = 0.0
    while True:
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        budget = fraction * min(info.total for info in memory)
        free = min(info.free for info in memory)
        if free >= budget + RESERVE:
            return float(budget / free)
        if time.monotonic() >= report_at:
            report_at = time.monotonic() + REPORT_S
            sys.stdout.write(
                f"waiting for GPU memory: {(budget + RESERVE) / 2**30:.1f} GiB needed "
                f"(rollout.servers.mem_fraction={fraction} and {RESERVE / 2**30:.0f} GiB), "
                f"{free / 2**30:.1f} GiB free on GPU {','.join(devices)}\n"
            )
            sys.stdout.flush()
        time.sleep(0.5)


def add_programs_to_path() -> None:
    """Puts the programs of this interpreter's environment first on PATH.

    The interpreter may be the one of a container, whose folders the launcher does not know.
    """
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    inherited = os.environ.get("PATH") or os.defpath
    # `dict.fromkeys` removes the second of two equal folders.
    os.environ["PATH"] = os.pathsep.join([*dict.fromkeys(folders), inherited])


def main() -> None:
    add_programs_to_path()
    key = os.environ.pop("PACS_SGLANG_API_KEY", None)
    if key is not None:
        sys.argv += ["--api-key", key]
    fraction = os.environ.pop("PACS_SGLANG_MEM_FRACTION", None)
    if fraction is not None:
        share = memory_share(float(fraction), os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        sys.argv += ["--mem-fraction-static", f"{share:.4f}"]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
