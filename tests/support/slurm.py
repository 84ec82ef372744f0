"""A real Slurm on this host for a test session: munged, slurmctld and two slurmd on loopback,
everything in one folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.ranks import free_port

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_CLAIMS = range(19000, 19119)
"""A job's MASTER_PORT is 20000 + its id % 12000, so clusters of one host need different ids, a
hundred each.
"""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "squeue", "scancel")


def slurm_missing() -> str | None:
    """The reason why Slurm cannot be started here, or None."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} (make install-slurm)"
    return None if os.geteuid() == 0 else "root, which slurmctld and slurmd need here"


@dataclass(slots=True)
class Slurm:
    """A running cluster of two nodes with four virtual CPUs each."""

    folder: Path
    env: dict[str, str]
    claim: socket.socket
    """bound to one of _CLAIMS as long as the cluster runs; its first job id follows from the port
    """
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self,
        *command: str,
        check: bool = True,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        """stdout of a Slurm command."""
        done = subprocess.run(
            command,
            env=self.env | (env or {}),
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """`sbatch`; the job's id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def wait(self, job_id: str, timeout_s: float = 800.0) -> dict[str, str]:
        """The job's fields after it has ended without a requeue.

        Raises AssertionError after `timeout_s`, the job cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            fields = self.job(job_id)
            if fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return fields
            time.sleep(0.2)
        self.run("scancel", "--signal=KILL", job_id, check=False)
        raise AssertionError(f"job {job_id} is {fields['JobState']} after {timeout_s:.0f} s")

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        for name in ("munge", "state", "spool", "log", "run"):
            (self.folder / name).mkdir(parents=True)
        os.chmod(self.folder / "munge", 0o755)  # noqa: S103  munged wants its socket's folder open
        (self.folder / "munge" / "key").write_bytes(os.urandom(128))
        os.chmod(self.folder / "munge" / "key", 0o400)  # munged wants an open folder of its socket
        (self.folder / "slurm.conf").write_text(
            _conf(self.folder, 100 * _CLAIMS.index(self.claim.getsockname()[1]) + 1)
        )
        munge = self.folder / "munge"
        self._spawn(
            "munged",
            "-F",
            "--force",
            f"--socket={munge / 'sock'}",
            f"--key-file={munge / 'key'}",
            f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
        )
        _wait(lambda: (munge / "sock").exists(), "munged")
        self._spawn("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for name in ("n1", "n2"):
            (self.folder / "spool" / name).mkdir()
            self._spawn("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))
        _wait(
            lambda: self.run("sinfo", "-h", "-o", "%t", check=False) == "idle",
            "slurmctld and slurmd",
        )

    def stop(self) -> None:
        """Cancel every job, then end the daemons."""
        self.run("scancel", "--user=root", check=False)
        deadline = time.monotonic() + 40  # KillWait, and what jobs need to end
        while self.run("squeue", "-h", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(600)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.claim.close()
        for process in self._left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _left(self) -> list[psutil.Process]:
        """Processes of this cluster's jobs: an interrupted session may end before its jobs have
        saved.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.pid != os.getpid()
                    and process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
                ):
                    found.append(process)
        return found

    def _spawn(self, *command: str) -> None:
        log = (self.folder / "log" / f"{len(self._daemons)}-{command[0]}.out").open("wb")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )


def start_slurm(folder: Path) -> Slurm:
    """A cluster in `folder`; the caller stops it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "PACS_"))
    }
    slurm = Slurm(
        folder, kept | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}, _claim()
    )
    try:
        slurm.start()
    except BaseException:
        slurm.stop()
        raise
    return slurm


def _wait(is_ready: object, what: str, timeout_s: float = 300.0) -> None:
    assert callable(is_ready)
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not start within {timeout_s:.0f} s")
        time.sleep(0.1)


def _claim() -> socket.socket:
    for port in _CLAIMS:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError(f"no port of {_CLAIMS} is free")


def _conf(folder: Path, first_job: int) -> str:
    host = socket.gethostname().split(".")[0]
    ports = [free_port() for _ in range(3)]
    return f"""
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge/sock
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=60
InactiveLimit=0
KillWait=15
MinJobAge=600
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] \\
    CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
