"""Runs of shipped configurations on the modelled node of eight GPUs."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import KERNEL_CACHES, ClusterConfig
from pacs_megatron.launch.serve import attach
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.runtime.cores import COLOCATED_PART, allowed_cores, divide, split
from pacs_megatron.runtime.environment import RankPlace
from pacs_megatron.runtime.run_folder import ATTEMPT_VARIABLE
from tests.support.node.host import (
    SITE,
    Fault,
    Host,
    digest_of,
    run_on_gpu,
    scale_of_trained,
    tiny_model,
)
from tests.support.node.servers import NUM_GPUS
from tests.support.ranks import run_ranks
from tests.support.tiny_run import REWARD

RUNS = Path(__file__).parents[3] / "configs" / "runs"
HYBRIDS = tuple(sorted(path.stem for path in RUNS.glob("*qwen3.5*n8g*.yaml")))
"""Shipped runs of models with gated delta nets"""
GPU_BYTES = {"h100": 80 << 30, "h200": 141 << 30}
NUM_PROMPTS = 8
NUM_SAMPLES = 4


@dataclass(slots=True)
class NodeRun:
    """A run of configuration `name`; `hosts` report what the servers saw."""

    name: str
    folder: Path
    steps: int = 2
    faults: frozenset[Fault] = frozenset()
    more: tuple[str, ...] = ()
    emulates_fp8: bool = False
    nodes: int = 1
    gpus: int = NUM_GPUS
    """ranks and colocated servers' GPUs of each node"""
    memory_factor: int = 1
    """larger GPUs, where the eight ranks have more of the model than the file's ranks"""
    hosts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def config_path(self) -> Path:
        return RUNS / f"{self.name}.yaml"

    @property
    def num_servers(self) -> int:
        servers = load_config(self.config_path, self.more).config.rollout.managed_servers
        assert servers is not None
        return servers.count

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a cluster's tasks that a server inherits."""
        cluster = ClusterConfig(name="node", scratch=str(self.folder / "scratch"))
        of_task = cluster.task_environment()
        return {name: of_task[name] for name in KERNEL_CACHES}

    def _python(self, host: Host) -> list[str]:
        """The stand-in servers' interpreter: an environment with `ninja` as SGLang's has it.

        It is in none of the folders of PATH. $HOME has no locks.
        """
        programs = self.folder / "environment" / "bin"
        if not programs.exists():
            programs.mkdir(parents=True)
            (programs / "python").symlink_to(os.path.realpath(sys.executable))
            (programs / "ninja").write_text("#!/bin/sh\n")
            (programs / "ninja").chmod(0o755)
        variables = [
            f"PYTHONPATH={SITE}",
            f"HOME={self.folder / 'home'}",
            f"PACS_TEST_NODE={host.path}",
        ]
        return ["env", "-u", "PYTHONSAFEPATH", *variables, str(programs / "python")]

    def exported(self) -> str:
        return digest_of(load_file(self.run_dir / "hf" / "model.safetensors"))

    def overrides(self, model: Path, python: list[str]) -> tuple[str, ...]:
        folder = self.folder
        rows = [
            {"problem": f"{a} + {b} = ?", "answer": str(a + b)}
            for a, b in itertools.product(range(4), repeat=2)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(REWARD.format(delay_s=0))
        # The tokenizer's tokens are bytes, and a system prompt is a paragraph.
        has_system_prompt = load_config(self.config_path).config.data.system_prompt is not None
        prompt_tokens = 512 if has_system_prompt else 128
        columns = {"problem": "problem", "answer": "answer"}
        data = {"path": str(folder / "train.jsonl"), "name": "sums", "columns": columns}
        values: dict[str, Any] = {
            "run.dir": str(folder / "runs"),
            "run.steps": self.steps,
            "model.path": str(model),
            "resources.nodes": self.nodes,  # data-parallel replicas on one node of eight
            "resources.gpus_per_node": self.gpus,
            "batch.prompts_per_step": NUM_PROMPTS,
            "batch.samples_per_prompt": NUM_SAMPLES,
            "batch.tokens_per_microbatch": 2 * prompt_tokens,
            "data.max_prompt_tokens": prompt_tokens,
            "data.train": {**data, "preset": None},
            "evaluation.benchmarks": [{**data, "limit": 2}],
            "evaluation.samples_per_prompt": 4,
            "evaluation.k": [1, 4],
            "evaluation.sampling.max_response_tokens": 16,
            "reward": {"name": "custom", "function": f"{folder}/reward.py:reward", "workers": 2},
            "rollout.sampling.max_response_tokens": 24,
            "rollout.servers.python": python,
            "rollout.servers.context_length": prompt_tokens + 24 + 2,  # as in the file
            "rollout.sync.bucket_mib": 1,
            "rollout.probe_interval_s": 0.3,
            "optimizer.lr": 1e-3,
            "checkpoint.every": 1,
            "mismatch.max_abs_mean": None,  # the stand-in servers' log-probs are invented
            "mismatch.max_kl": None,
            "logging.tensorboard": False,
        }
        if self.name.endswith("-fp8") and not self.emulates_fp8:
            values["precision.fp8"] = None
        return (*(f"{key}={_flow(value)}" for key, value in values.items()), *self.more)

    def run(self) -> None:
        """Raises RankError when a rank fails."""
        config = load_config(self.config_path, self.more).config
        assert config.resources.gpu is not None
        model, scale = tiny_model(
            self.folder / "model",
            config.model.path,
            head_dim=16 if self.emulates_fp8 else 8,
            num_layers=max(2, config.parallel.pp),
        )
        scales = (scale, scale_of_trained(config, config.model.path, model, scale))
        num_hosts = self.nodes + config.resources.rollout_nodes
        sockets = [self.folder / f"host{i}" for i in range(num_hosts)]
        gpu_bytes = GPU_BYTES[config.resources.gpu] * self.memory_factor
        hosts = [Host(path, gpu_bytes, scale, self.faults) for path in sockets]
        serving: list[subprocess.Popen[bytes]] = []
        try:
            trainers = hosts[: self.nodes]
            rollout_hosts = hosts[self.nodes :]
            python = self._python(trainers[0])
            overrides = self.overrides(model, python)
            if rollout_hosts:
                serving = [
                    self._serve(number, host, model) for number, host in enumerate(rollout_hosts)
                ]
                urls = self._urls(len(rollout_hosts), serving)
                overrides += ("rollout.servers=null", f"rollout.urls=[{','.join(urls)}]")
            on_gpus = config.rollout.on_trainer_gpus

            def run_rank(rank: int, world_size: int) -> int:
                node = rank // self.gpus
                host = trainers[node] if on_gpus else None
                words = overrides
                if self.nodes > 1:
                    words += self._attached(rank, world_size, model, trainers[node])
                gpu = rank % self.gpus
                return run_on_gpu(gpu, self.config_path, words, host, scales, self.environment)

            num_ranks = self.nodes * self.gpus
            codes = run_ranks(run_rank, num_ranks, init_process_group=False)
            assert codes == [0] * num_ranks
        finally:
            for process in serving:
                process.send_signal(signal.SIGINT)
                process.wait(60)
            self.hosts = [host.call(op="report") for host in hosts]
            (self.folder / "hosts.json").write_text(json.dumps(self.hosts))
            for host in hosts:
                host.close()

    def _serve(self, number: int, host: Host, model: Path) -> subprocess.Popen[bytes]:
        """The command of slurm/train.sbatch for one rollout node."""
        command = [sys.executable, "-m", "pacs_megatron.launch.serve", str(self.folder / "servers")]
        with (self.folder / f"serve{number}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, str(self.config_path), *self.overrides(model, self._python(host))],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    **self.environment,
                    "SLURMD_NODENAME": f"rollout{number}",
                    "PACS_NODE_ADDR": f"127.0.0.{number + 2}",
                },
            )

    def _attached(self, rank: int, world_size: int, model: Path, host: Host) -> tuple[str, ...]:
        """`slurm/train.sbatch` on several nodes: each starts the servers on its GPUs."""
        node, local_rank = divmod(rank, self.gpus)
        os.environ |= {
            **self.environment,
            ATTEMPT_VARIABLE: str(self.folder),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.gpus),
            "SLURMD_NODENAME": f"node{node}",
            "PACS_NODE_ADDR": f"127.0.0.{node + 2}",
        }
        words = self.overrides(model, self._python(host))
        place = RankPlace(rank, world_size, local_rank, self.gpus, "127.0.0.1", 1)
        config = load_config(self.config_path, words).config
        return tuple(attach(config, self.config_path, words, place))

    def _urls(self, num_hosts: int, serving: list[subprocess.Popen[bytes]]) -> list[str]:
        while len(files := sorted((self.folder / "servers").glob("*.urls"))) < num_hosts:
            logs = [path.read_text() for path in sorted(self.folder.glob("serve*.log"))]
            assert all(process.poll() is None for process in serving), logs
            time.sleep(0.1)
        return list(itertools.chain.from_iterable(file.read_text().split() for file in files))


def shipped_run(name: str, folder: Path, *, emulates_fp8: bool = False) -> NodeRun:
    """A shipped run on eight GPUs of trainers: those of one node, or four of each of two nodes
    where the file has colocated servers on several nodes. Of rollout nodes there is one.
    """
    run = NodeRun(name, folder, emulates_fp8=emulates_fp8)
    config = load_config(run.config_path).config
    servers = config.rollout.managed_servers
    assert servers is not None
    if config.resources.rollout_nodes:
        run.more = ("resources.rollout_nodes=1", f"rollout.servers.count={NUM_GPUS // servers.tp}")
    if not servers.colocated or config.resources.nodes == 1:
        return run

    run.nodes = 2
    run.gpus = NUM_GPUS // run.nodes
    run.more = (
        f"resources.nodes={run.nodes}",
        f"rollout.servers.count={NUM_GPUS // servers.tp}",
    )
    if config.parallel.pp > 1:
        # In the file, the ranks of a stage share the optimizer's state with another replica.
        run.more += (f"parallel.tp={NUM_GPUS // config.parallel.pp}",)
        run.memory_factor = 2
    return run


def _flow(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6)
        .strip()
        .removesuffix("\n...")
        .strip()
    )


def expected_cores(run: NodeRun, server: dict[str, Any]) -> list[int]:
    """Cores of a server of the node, whose GPUs have no NUMA nodes."""
    config = load_config(run.config_path, run.more).config
    part = COLOCATED_PART if config.rollout.on_trainer_gpus else Fraction(1)
    shares = divide(allowed_cores(), [None] * run.gpus)
    cores: set[int] = set()
    return sorted(cores.union(*(split(shares[gpu], part)[1] for gpu in server["gpus"])))


def check_run(run: NodeRun) -> None:
    """Runs it; every step, sample, checkpoint and server exists, and all servers have the exported
    weights.
    """
    run.run()
    rows = read_metrics(run.run_dir)
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    for row in rows[-2:]:
        assert row["admission/num_samples"] == NUM_PROMPTS * NUM_SAMPLES
        assert math.isfinite(row["optimizer/grad_norm"] or math.nan)
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} >= {
        "step_000001",
        "step_000002",
    }
    servers = list(itertools.chain.from_iterable(host["servers"] for host in run.hosts))
    ended = list(itertools.chain.from_iterable(host["ended"] for host in run.hosts))
    assert all(reason.endswith("its process was killed") for reason in ended), (
        ended
    )  # at the end of the run
    assert sum(len(host["starts"]) for host in run.hosts) == len(servers) == run.num_servers
    assert {server["held"] for server in servers} == {run.exported()}
    assert len({server["version"] for server in servers}) == 1 and not any(
        server["paused"] for server in servers
    )
    assert all(server["answered"] for server in servers)
    assert not any(server["late_compiles"] for server in servers)
    assert [server["cores"] for server in servers] == [expected_cores(run, s) for s in servers]
    assert 0 < run.hosts[0]["real_peak"] < 20 << 30
