"""A rank for the tests of `launch.train`:
`python -m tests.unit.launch.rank_probe <folder> <mode>`.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path, mode: str) -> int:
    rank = os.environ["RANK"]
    stopped = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stopped.append(1))
    (folder / f"started_{rank}").write_text(
        f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['MASTER_ADDR']} "
        f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('PACS_COMMAND_START')}"
    )
    if mode == "listen":
        import psutil
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        listening = []
        for process in (psutil.Process(), psutil.Process().parent()):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listening.append(connection.laddr.ip)
        (folder / f"listening_{rank}").write_text("\n".join(listening))
        torch.distributed.barrier()
    while mode.endswith("_on_1") and not (folder / "started_0").exists():
        time.sleep(0.05)  # torchrun would end the other rank before it starts
    if mode == "fail_on_1" and rank == "1":
        return 2
    if mode == "die_on_1" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "deaf":
        time.sleep(600)
    if mode in ("wait", "fail_on_1", "die_on_1"):
        deadline = time.monotonic() + 600
        while not stopped and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # a save takes time and must not be interrupted
        (folder / f"saved_{rank}").write_text("")
        if mode == "wait":
            if rank == "0":
                (folder / "exit_code").write_text("75\n")
            return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
