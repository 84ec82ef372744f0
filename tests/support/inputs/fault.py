"""fault.py WHO FAULT: trains, and kills or stops one process of the run after two checkpoints.

The launcher then gets SIGTERM, unless the fault ends the run itself. Ends with the run's exit code,
and with 9 if a process stays, the run takes too long, or its newest checkpoint is not whole.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pacs_megatron.checkpoint.manifest import check_checkpoint
from pacs_megatron.checkpoint.names import newest_position
from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint

LEAD_S = 120.0
WORDS = {
    "launch.agent": "torchrun",
    "training.main": "rank",
    "rollout.driver": "driver",
    "rewards.worker": "worker",
}
RUN = Path("runs/tiny").absolute()


def processes_of(launcher: int) -> dict[str, psutil.Process]:
    """The processes of a run with two ranks by their part in it."""
    found = {"launcher": psutil.Process(launcher)}
    for child in found["launcher"].children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            rank = child.environ().get("RANK", "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        name = next((name for word, name in WORDS.items() if word in command), "")
        if name:
            found[name + (rank if name == "rank" else "")] = child
    return found


def main(who: str, fault: str) -> int:
    """Returns the exit code."""
    command = [sys.executable, "-m", "pacs_megatron", "train", "tiny.yaml", "run.steps=4000"]
    run = subprocess.Popen([*command, f"resources.signal_lead_s={LEAD_S:.0f}"])
    known: dict[str, psutil.Process] = {}
    try:
        while (newest_position(RUN) or (0, 0)) < (2, 0):
            if run.poll() is not None:
                return run.returncode or 9
            time.sleep(0.2)
        known = processes_of(run.pid)
        assert len(known) == 6, known
        started = time.monotonic()
        if fault == "kill":
            known[who].kill()
        else:
            known[who].suspend()
        if fault == "stop" or who == "worker":
            run.send_signal(signal.SIGTERM)
        if fault == "stop" and who == "launcher":
            known[who].resume()  # as Slurm and `timeout` do
        print("waiting for the run", flush=True)
        code = run.wait(LEAD_S + 60)
        psutil.wait_procs(known.values(), 60)
        took_s = time.monotonic() - started
        left = [name for name, process in known.items() if is_alive(process)]
        newest = latest_checkpoint(RUN)
        is_whole = newest is not None and check_checkpoint(newest).step is not None
        print(f"waiting is over: {took_s:.0f} s, {left} stay, whole: {is_whole}", flush=True)
        if left or took_s >= LEAD_S or not is_whole:
            return 9
        return code if code >= 0 else 128 - code
    finally:
        for process in known.values():
            if is_alive(process):
                process.kill()
        if run.poll() is None:
            run.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs or is stopped."""
    try:
        return bool(process.is_running() and process.status() != "zombie")
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
