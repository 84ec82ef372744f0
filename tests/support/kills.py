"""A campaign of `kill -9`: `python -m tests.support.kills LOG [--layouts one tp2] [--kills 20]`.

Runs of eight steps are killed at seeded moments and continued by the same command. LOG receives one
line of JSON for each kill when its run has ended and was compared with an undisturbed one; runs in
LOG are skipped, so that the command resumes. The exit code is 1 if a run ended with other bits, or
did not end. `--table` prints the table of LOG.

The ranks are forks of this process, which has imported everything, with torchrun's variables;
driver, reward workers and server are processes of their own. launcher and torchrun are in
tests/inputs/process.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LAYOUTS = {
    "one": ("parallel.tp=1",),
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
    "cp2": ("parallel.tp=1", "parallel.cp=2"),
    "dp2-distopt": ("parallel.tp=1", "parallel.distributed_optimizer=true"),
}
ENGINES = ("embedded", "sglang")
PHASES = ("start", "rollout", "logprobs", "update", "sync", "evaluation", "checkpoint", "export")
VICTIMS = ("all ranks", "one rank", "driver", "reward worker", "server")
END_S = 900.0
"""for a run to end after a kill, on any host"""
COMMON = (
    *("run.steps=8", "checkpoint.every=1", "logging.save_tokens=true", "precision.dtype=bf16"),
    *("objective.reference=frozen", "objective.reset_every=3"),
)


@dataclass
class Process:
    """A fork of this process that runs `work`."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll() is not None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(work: Callable[[], Any], log: Path) -> Process:
    """Starts `work` in a session of its own, whose output goes to `log`.

    It ends with this process.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Process(pid)
    code = 1
    try:
        from pacs_megatron.runtime.processes import die_with_parent

        os.setsid()
        die_with_parent(signal.SIGKILL, parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(target, number)
        code = int(work() or 0)
    except BaseException:  # noqa: BLE001  as the interpreter does
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Attempt:
    """The ranks of one attempt. `phase` and `entered` are rank 0's."""

    def __init__(self, arguments: list[str], world_size: int, log: Path) -> None:
        from tests.support.ranks import free_port

        self._shared = mmap.mmap(-1, 1 + len(PHASES))
        port = free_port()

        def rank(number: int) -> int:
            from pacs_megatron.observability.spans import Timer
            from pacs_megatron.rollout import driver_client
            from pacs_megatron.training import main
            from tests.support.train_prefork import _Subprocess

            driver_client.subprocess = _Subprocess()  # type: ignore[assignment, attr-defined]
            variables = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
            }
            os.environ |= {name: str(value) for name, value in variables.items()}
            os.environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            if number == 0:
                notify = Timer._notify

                def report(timer: Timer) -> None:
                    name = timer.phase[0] if timer.phase else ""
                    index = PHASES.index(name) if name in PHASES else 255
                    self._shared[0] = index
                    if index < 255 and len(timer.phase) == 1:
                        self._shared[1 + index] = min(255, self._shared[1 + index] + 1)
                    notify(timer)

                Timer._notify = report  # type: ignore[method-assign,assignment]
            return main.main(arguments)

        self.ranks = [fork(lambda number=number: rank(number), log) for number in range(world_size)]  # type: ignore[misc]

    @property
    def phase(self) -> str:
        index = self._shared[0]
        return PHASES[index] if index < len(PHASES) else "between phases"

    def entered(self, phase: str) -> int:
        return self._shared[1 + PHASES.index(phase)]

    @property
    def is_over(self) -> bool:
        """Whether any rank has ended."""
        return any(rank.poll() is not None for rank in self.ranks)

    def victims(self, who: str, rng: random.Random) -> list[int]:
        if who == "all ranks":
            return [rank.pid for rank in self.ranks]
        if who == "one rank":
            return [rng.choice(self.ranks).pid]
        try:
            [driver, *_] = psutil.Process(self.ranks[0].pid).children()
            workers = [
                child.pid
                for child in driver.children()
                if any("rewards" in word for word in child.cmdline())
            ]
        except (ValueError, psutil.Error):
            return []
        return [driver.pid] if who == "driver" else workers[:1]

    def end(self) -> list[int | None]:
        """Waits for every rank, and kills those that wait for a killed one for a minute, as
        torchrun does. Exit codes.
        """
        limit = time.monotonic() + END_S
        while not all(rank.wait(0.02) for rank in self.ranks) and time.monotonic() < limit:
            if any(rank.poll() not in (None, 0) for rank in self.ranks):
                limit = min(limit, time.monotonic() + 60)
        codes = [rank.poll() for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.wait(60)
        return codes


class Server:
    """The server of recorded samples, in a process of its own; its owner starts it again at the
    same port.
    """

    def __init__(self, recorded: Path, log: Path) -> None:
        from tests.support.ranks import free_port

        self._recorded = recorded
        self._log = log
        self.port = free_port()
        self.start()

    def start(self) -> None:
        def serve() -> None:
            from tests.support.servers.recorded_sglang import SynchronousSglang

            # Seeded by the request: responses of one step arrive over a quarter of a second.
            SynchronousSglang(
                self._recorded,
                address=("127.0.0.1", self.port),
                latency_s=lambda body: random.Random(body["rid"]).uniform(0, 0.25),
            )
            while True:
                time.sleep(3600)

        self.process = fork(serve, self._log)

    def restart(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.start()


class Campaign:
    """`folder` contains the model, the undisturbed runs and the run in progress."""

    def __init__(self, folder: Path, log: Path) -> None:
        from tests.support.tiny_models import make_tiny_qwen3

        self.folder = folder
        self.log = log
        self.model = make_tiny_qwen3(
            folder / "model", tied=True, vocab_size=262, num_hidden_layers=2
        )
        self._undisturbed: dict[tuple[str, str], Path] = {}
        lines = log.read_text().splitlines() if log.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def attempt(self, folder: Path, layout: str, server: Server | None, delay_s: float) -> Attempt:
        from tests.support.tiny_run import write_tiny_run

        config = write_tiny_run(folder, self.model, delay_s=delay_s)
        benchmark = (
            f"{{path: {folder}/train.jsonl, name: test, columns: {{problem: problem, answer: "
            f"answer}}}}"
        )
        evaluation = (
            f"evaluation={{benchmarks: [{benchmark}], every: 3, samples_per_prompt: 2, k: [1], "
            "sampling: "
        )
        values = [*COMMON, *LAYOUTS[layout], evaluation + "{max_response_tokens: 8}}"]
        if server is not None:
            stop = ", ".join(
                f"'{letter}'" for letter in "abcdefghijklmnopqrstuvwxyz012345"
            )  # SGLang allows 32
            values.append(
                f"rollout={{engine: sglang, urls: ['http://127.0.0.1:{server.port}'], dtype: "
                "bf16, "
                "probe_interval_s: 0.3, dead_after_s: 3, all_down_after_s: 600, sync: "
                "{transport: disk, verify: 'off', pause: in_place}, sampling: "
                f"{{max_response_tokens: 12, stop: [{stop}]}}}}"
            )
        return Attempt([str(config), *values], 1 if layout == "one" else 2, folder / "output.log")

    def undisturbed(self, layout: str, engine: str) -> Path:
        if (layout, engine) not in self._undisturbed:
            folder = self.folder / f"undisturbed-{layout}-{engine}"
            folder.mkdir()
            server = None
            if engine == "sglang":
                server = Server(self.undisturbed(layout, "embedded"), folder / "server.log")
            codes = self.attempt(folder, layout, server, 0.0).end()
            if server is not None:
                server.process.kill()
            assert set(codes) == {0}, (folder / "output.log").read_text()[-4000:]
            self._undisturbed[layout, engine] = folder / "runs" / "tiny"
        return self._undisturbed[layout, engine]

    def run(self, layout: str, engine: str, seed: int) -> None:
        """One run with its kills; appends their lines to the log."""
        undisturbed = self.undisturbed(layout, engine)
        rng = random.Random(f"{layout} {engine} {seed}")
        name = f"{layout}-{engine}-{seed}"
        folder = self.folder / name
        folder.mkdir()
        server = (
            Server(self.undisturbed(layout, "embedded"), folder / "server.log")
            if engine == "sglang"
            else None
        )
        kills, codes, difference = self._kill_and_continue(folder, layout, server, rng)
        if server is not None:
            server.process.kill()
        if set(codes) != {0}:
            difference = f"ended with {codes}: {last_line(folder / 'output.log')}"
        else:
            difference = difference or difference_of(folder / "runs" / "tiny", undisturbed)
        with self.log.open("a") as log:
            for line in kills:
                line = {"run": name, "layout": layout, "engine": engine} | line
                line |= {"same_bits": difference is None, "difference": difference}
                self.lines.append(line)
                log.write(json.dumps(line) + "\n")
        print(f"{name}: {len(kills)} kills, {difference or 'same bits'}", flush=True)

    def _kill_and_continue(
        self, folder: Path, layout: str, server: Server | None, rng: random.Random
    ) -> tuple[list[dict[str, Any]], list[int | None], str | None]:
        kills: list[dict[str, Any]] = []
        run_dir = folder / "runs" / "tiny"
        begin = time.monotonic()
        attempt = self.attempt(folder, layout, server, 0.02)
        victims = list(VICTIMS if server is not None else VICTIMS[:-1])  # each once
        rng.shuffle(victims)
        while len(kills) < len(victims):
            phase = rng.choice(PHASES)
            who = victims[len(kills)]
            if phase == "export" and len(kills) < len(victims) - 1:
                phase = "update"  # the export is the last phase of a run
            delay_s = (
                rng.uniform(0, 3.0)
                if phase == "start"
                else rng.choice((0.0, 0.003, 0.02, 0.1)) * rng.random()
            )
            wanted = attempt.entered(phase) + rng.randint(1, 2) if phase != "export" else 1
            while not attempt.is_over and phase != "start" and attempt.entered(phase) < wanted:
                time.sleep(0.001)
            time.sleep(delay_s)
            pids = [] if attempt.is_over else attempt.victims(who, rng)
            if who == "server" and server is not None and not attempt.is_over:
                pids = [server.process.pid]
            if pids:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                found = attempt.phase
                kills.append({"wanted": phase, "phase": found, "victim": who} | state(run_dir))
                if who == "server" and server is not None:
                    server.restart()
                    kills[-1]["ended"] = "run continued"
                elif who == "reward worker":
                    kills[-1]["ended"] = "run continued"
                else:
                    start = time.monotonic()
                    codes = attempt.end()
                    kills[-1] |= {
                        "ended": codes,
                        "ended_after_s": round(time.monotonic() - start, 1),
                    }
                    kills[-1]["last_line"] = last_line(folder / "output.log")
            if attempt.is_over:
                codes = attempt.end()
                if set(codes) == {0} and not pids:
                    return kills, codes, None
                if not pids:
                    kills and kills[-1].update(
                        later=f"ended with {codes}: {last_line(folder / 'output.log')}"
                    )
                attempt = self.attempt(folder, layout, server, 0.02)
            if time.monotonic() - begin > 4 * END_S:
                return kills, attempt.end(), "no end"
        codes = attempt.end()
        if set(codes) != {0}:  # a late consequence of the last kill; the same command continues
            kills[-1]["later"] = f"ended with {codes}: {last_line(folder / 'output.log')}"
            codes = self.attempt(folder, layout, server, 0.0).end()
        return kills, codes, None


def state(run_dir: Path) -> dict[str, Any]:
    """Of the run's folder at the kill."""
    metrics = run_dir / "metrics.jsonl"
    checkpoints = run_dir / "checkpoints"
    return {
        "rows": metrics.read_bytes().count(b"\n") if metrics.is_file() else 0,
        "checkpoints": sorted(path.name for path in checkpoints.iterdir())
        if checkpoints.is_dir()
        else [],
    }


def difference_of(run_dir: Path, expected: Path) -> str | None:
    """The first difference of two runs: weights, metrics without times, files of the rollouts;
    None: the same bits.
    """
    from pacs_megatron.observability.metrics import read_metrics
    from tests.support.metrics import strip_times

    if (run_dir / "hf/model.safetensors").read_bytes() != (
        expected / "hf/model.safetensors"
    ).read_bytes():
        return "weights"
    mine, theirs = (
        [strip_times(row) for row in read_metrics(folder)] for folder in (run_dir, expected)
    )
    if len(mine) != len(theirs):
        return f"{len(mine)} rows of metrics for {len(theirs)}"
    for got, row in zip(mine, theirs, strict=True):
        for name in sorted({*got, *row}):
            if got.get(name) != row.get(name):
                return (
                    f"metrics of step {row['step']}: {name} is {got.get(name)} for {row.get(name)}"
                )
    names, others = (
        {path.name for path in (folder / "rollouts").iterdir()} for folder in (run_dir, expected)
    )
    for name in sorted(names & others):
        if (run_dir / "rollouts" / name).read_bytes() != (
            expected / "rollouts" / name
        ).read_bytes():
            return f"rollouts/{name}"
    if names != others:
        return f"equal weights, metrics and samples, but without the files {sorted(names ^ others)}"
    return None


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: kills by layout and engine, by victim, by phase; and runs that ended with
    other bits.
    """
    rows = [
        f"{len(lines)} kills, {sum(not line['same_bits'] for line in lines)} in runs with other "
        "bits",
        "",
    ]
    for key in ("victim", "phase"):
        names = sorted({line[key] for line in lines})
        counts = Counter((line["layout"], line["engine"], line[key]) for line in lines)
        rows += [
            f"| layout | engine | {' | '.join(names)} | all |",
            "|---" * (len(names) + 3) + "|",
        ]
        for layout in LAYOUTS:
            for engine in ENGINES:
                mine = [counts[layout, engine, name] for name in names]
                rows.append(f"| {layout} | {engine} | {' | '.join(map(str, mine))} | {sum(mine)} |")
        rows.append("")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=tuple(LAYOUTS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--kills", type=int, default=10, help="of each layout and engine")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.log.read_text().splitlines()]))
        return 0
    import torch

    from pacs_megatron.rollout import driver  # noqa: F401
    from pacs_megatron.training import loop, watchdog  # noqa: F401

    torch.set_num_threads(1)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        campaign = Campaign(Path(name), options.log.absolute())
        seed = 0
        while not stops and seed < 100:
            for layout in options.layouts:
                for engine in options.engines:
                    mine = [
                        line
                        for line in campaign.lines
                        if (line["layout"], line["engine"]) == (layout, engine)
                    ]
                    is_done = any(line["run"] == f"{layout}-{engine}-{seed}" for line in mine)
                    if not stops and not is_done and len(mine) < options.kills:
                        campaign.run(layout, engine, seed)
            seed += 1
    wrong = sorted({line["run"] for line in campaign.lines if not line["same_bits"]})
    print(f"{len(campaign.lines)} kills; runs with other bits: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
