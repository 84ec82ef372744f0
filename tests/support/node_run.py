"""A shipped configuration on the modelled node: eight real ranks over gloo, stand-in servers, real driver and guards.

A tiny model of the same family replaces the file's model; bytes on the modelled GPUs are scaled by the ratio of both. The
file's layout, transport, number of servers and their tensor-parallel size stay. Data, lengths and batch are small.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import load_file

from pacs_megatron.config import load_config
from pacs_megatron.models import load_spec, read_spec
from pacs_megatron.plan.known_models import KNOWN_MODELS
from pacs_megatron.plan.memory import num_parameters
from pacs_megatron.sglang.weights.checksums import ModelDims
from tests.support.node_of_eight import NUM_GPUS, GpuServer, Node, OutOfMemoryError, ipc_payload
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family
from tests.support.tiny_models import save_tokenizer
from tests.support.tiny_run import REWARD

RUNS = Path(__file__).parents[2] / "configs" / "runs"
SITE = Path(__file__).with_name("node_site")
GPU_BYTES = {"h100": 80 << 30, "h200": 141 << 30}
WORKING_BYTES = 16 << 30
"""Activations, logits and the caching allocator of a training step, which `_empty_caches` returns."""
NUM_PROMPTS, NUM_SAMPLES = 8, 4
Fault = tuple[int, str]
"""(a server's first GPU, path): the server is killed at its next call of this path"""


def shipped() -> list[str]:
    """Names of the configurations for nodes of eight GPUs."""
    return sorted(path.stem for path in RUNS.glob("*n8g*.yaml"))


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    state = hashlib.sha256()
    for name in sorted(weights):
        state.update(name.encode())
        state.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Host:
    """A process with the GPUs and the stand-in servers of one host; the servers' own processes only hold their place."""

    def __init__(self, socket_path: Path, gpu_bytes: int, scale: float, faults: frozenset[Fault]) -> None:
        self.path = socket_path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path))
        self._listener.listen(64)
        self.pid = os.fork()
        if self.pid == 0:
            _HostProcess(self._listener, Node(gpu_bytes), scale, set(faults)).run()
        self._listener.close()

    def call(self, **request: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.path))
            link.sendall(json.dumps(request).encode() + b"\n")
            with link.makefile("rb") as file:
                answer: dict[str, Any] = json.loads(file.readline())
        return answer

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class _HostProcess:
    def __init__(self, listener: socket.socket, node: Node, scale: float, faults: set[Fault]) -> None:
        self._listener = listener
        self._node = node
        self._scale = scale
        self._faults = faults
        self._servers: dict[int, GpuServer] = {}
        self._starts: list[int] = []
        self._ended: list[str] = []

    def run(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._handle, args=(link,), daemon=True).start()

    def _handle(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as file:
            request = json.loads(file.readline())
            answer = getattr(self, f"_{request.pop('op')}")(link, **request)
            link.sendall(json.dumps(answer).encode() + b"\n")

    def _memory(self, _link: socket.socket, gpu: int) -> dict[str, int]:
        return {"total": self._node.gpu_bytes, "free": self._node.free(gpu)}

    def _hold(self, _link: socket.socket, gpu: int, num_bytes: int) -> dict[str, str]:
        """A trainer rank's memory, in bytes of the tiny model, and its working memory if there is a step."""
        try:
            self._node.set(gpu, "trainer", num_bytes)
        except OutOfMemoryError as error:
            return {"error": str(error)}
        return {"error": ""}

    def _report(self, _link: socket.socket) -> dict[str, Any]:
        servers = [
            {
                "gpus": server.gpus,
                "version": server.weight_version,
                "paused": server.paused,
                "answered": server.answered,
                "held": digest_of(server.held),
                "calls": server.calls,
            }
            for _, server in sorted(self._servers.items())
        ]
        return {"servers": servers, "starts": self._starts, "ended": self._ended, "peak": self._node.peak}

    def _serve(self, link: socket.socket, args: list[str], visible: str, pid: int) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        for name in ("--model-path", "--host", "--port", "--tp-size", "--mem-fraction-static"):
            parser.add_argument(name)
        given, _ = parser.parse_known_args(args)
        assert len(visible.split(",")) == int(given.tp_size)
        spec = load_spec(given.model_path)
        dims = ModelDims(num_kv_heads=spec.num_kv_heads, num_experts=0 if spec.moe is None else spec.moe.num_experts)
        try:
            server = GpuServer(
                self._node,
                load_file(Path(given.model_path) / "model.safetensors"),
                visible,
                mem_fraction=float(given.mem_fraction_static),
                dims=dims,
                scale=self._scale,
                address=(given.host, int(given.port)),
            )
        except (ValueError, OutOfMemoryError) as error:
            return {"code": 1, "reason": str(error)}
        server.stops_early = True
        gpu = server.gpus[0]
        for fault in [fault for fault in self._faults if fault[0] == gpu]:
            server.before[fault[1]] = lambda fault=fault: self._kill(server, fault, pid)  # type: ignore[misc]
        self._servers[gpu] = server
        self._starts.append(gpu)
        link.settimeout(0.2)
        while not server.ended:
            try:
                if not link.recv(1):
                    server.ended = "its process was killed"
                    self._node.clear(server.owner)
                    server.close()
            except TimeoutError:
                continue
        self._ended.append(f"{server.owner}: {server.ended}")
        return {"code": 1, "reason": server.ended}

    def _kill(self, server: GpuServer, fault: Fault, pid: int) -> None:
        self._faults.discard(fault)
        os.kill(pid, signal.SIGKILL)
        server._end_scheduler(f"killed in {fault[1]}")


def tiny_model(folder: Path, hub_id: str) -> tuple[Path, float]:
    """A model of the same family, with the key-value heads and ties of the original, and the ratio of their parameters."""
    real = KNOWN_MODELS[hub_id]
    family = real["model_type"]
    shape = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": real["num_key_value_heads"],
        "tie_word_embeddings": real["tie_word_embeddings"],
        "vocab_size": 272,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        **({} if family == "qwen2" else {"head_dim": 8}),
        **({"num_experts": 16, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}),
    }
    make_family(folder, family, dtype="bfloat16", **shape)
    save_tokenizer(folder)
    return folder, num_parameters(read_spec(real)) / num_parameters(load_spec(folder))


@dataclass(slots=True)
class NodeRun:
    """A run of configuration `name`; `hosts` report what the servers saw."""

    name: str
    folder: Path
    steps: int = 2
    faults: frozenset[Fault] = frozenset()
    more: tuple[str, ...] = ()
    hosts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def config_path(self) -> Path:
        return RUNS / f"{self.name}.yaml"

    @property
    def num_servers(self) -> int:
        servers = load_config(self.config_path).config.rollout.managed_servers
        assert servers is not None
        return servers.count

    def exported(self) -> str:
        return digest_of(load_file(self.run_dir / "hf" / "model.safetensors"))

    def overrides(self, model: Path, python: list[str]) -> tuple[str, ...]:
        folder = self.folder
        rows = [{"problem": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(REWARD.format(delay_s=0))
        columns = {"problem": "problem", "answer": "answer"}
        data = {"path": str(folder / "train.jsonl"), "name": "sums", "columns": columns}
        values: dict[str, Any] = {
            "run.dir": str(folder / "runs"),
            "run.steps": self.steps,
            "model.path": str(model),
            "resources.nodes": 1,  # data-parallel replicas on one node of eight
            "batch.prompts_per_step": NUM_PROMPTS,
            "batch.samples_per_prompt": NUM_SAMPLES,
            "batch.tokens_per_microbatch": 256,
            "data.max_prompt_tokens": 128,
            "data.train": {**data, "preset": None},
            "evaluation.benchmarks": [{**data, "limit": 2}],
            "evaluation.samples_per_prompt": 4,
            "evaluation.k": [1, 4],
            "evaluation.sampling.max_response_tokens": 16,
            "reward": {"name": "custom", "function": f"{folder}/reward.py:reward", "workers": 2},
            "rollout.sampling.max_response_tokens": 24,
            "rollout.servers.python": python,
            "rollout.sync.bucket_mib": 1,
            "rollout.probe_interval_s": 0.3,
            "optimizer.lr": 1e-3,
            "checkpoint.every": 1,
            "mismatch.max_abs_mean": None,  # the stand-in servers' log-probs are invented
            "mismatch.max_kl": None,
            "logging.tensorboard": False,
        }
        if self.name.endswith("-fp8"):
            values["precision.fp8"] = None  # no FP8 without CUDA: tests/te emulates it
        return (*(f"{key}={_flow(value)}" for key, value in values.items()), *self.more)

    def run(self) -> None:
        """Raises RankError when a rank fails."""
        config = load_config(self.config_path).config
        assert config.resources.gpu is not None
        model, scale = tiny_model(self.folder / "model", config.model.path)
        sockets = [self.folder / f"host{i}" for i in range(1 + config.resources.rollout_nodes)]
        gpu_bytes = GPU_BYTES[config.resources.gpu]
        hosts = [Host(path, gpu_bytes, scale, self.faults) for path in sockets]
        environment = ["env", "-u", "PYTHONSAFEPATH", f"PYTHONPATH={SITE}"]
        serving: list[subprocess.Popen[bytes]] = []
        try:
            trainer, *rollout_hosts = hosts
            python = [*environment, f"PACS_TEST_NODE={trainer.path}", sys.executable]
            overrides = self.overrides(model, python)
            if rollout_hosts:
                serving = [self._serve(number, host, model) for number, host in enumerate(rollout_hosts)]
                urls = self._urls(len(rollout_hosts), serving)
                overrides += ("rollout.servers=null", f"rollout.urls=[{','.join(urls)}]")
            on_gpus = config.rollout.on_trainer_gpus
            codes = run_ranks(
                lambda rank, _world: _rank(rank, self.config_path, overrides, trainer if on_gpus else None, scale),
                NUM_GPUS,
                init_process_group=False,
            )
            assert codes == [0] * NUM_GPUS
        finally:
            for process in serving:
                process.send_signal(signal.SIGINT)
                process.wait(60)
            self.hosts = [host.call(op="report") for host in hosts]
            for host in hosts:
                host.close()

    def _serve(self, number: int, host: Host, model: Path) -> subprocess.Popen[bytes]:
        """The command of slurm/train.sbatch for one rollout node."""
        python = ["env", "-u", "PYTHONSAFEPATH", f"PYTHONPATH={SITE}", f"PACS_TEST_NODE={host.path}", sys.executable]
        command = [sys.executable, "-m", "pacs_megatron.launch.serve", str(self.folder / "servers")]
        with (self.folder / f"serve{number}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, str(self.config_path), *self.overrides(model, python)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "SLURMD_NODENAME": f"rollout{number}", "PACS_NODE_ADDR": f"127.0.0.{number + 2}"},
            )

    def _urls(self, num_hosts: int, serving: list[subprocess.Popen[bytes]]) -> list[str]:
        while len(files := sorted((self.folder / "servers").glob("*.urls"))) < num_hosts:
            logs = [path.read_text() for path in sorted(self.folder.glob("serve*.log"))]
            assert all(process.poll() is None for process in serving), logs
            time.sleep(0.1)
        return [url for file in files for url in file.read_text().split()]


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...").strip()


def _rank(rank: int, config_path: Path, overrides: tuple[str, ...], host: Host | None, scale: float) -> int:
    """One rank of the run. With `host`, its handles and its memory are those of GPU `rank` there."""
    from pacs_megatron.sglang.weights import transports
    from pacs_megatron.training import context as context_module
    from pacs_megatron.training import step as step_module
    from pacs_megatron.training import sync as sync_module
    from pacs_megatron.training.context import RunContext
    from pacs_megatron.training.main import run_rank

    context, step, sync = cast("Any", context_module), cast("Any", step_module), cast("Any", sync_module)
    if host is not None:
        # torch passes a GPU's UUID in a handle (torch/multiprocessing/reductions.py, patched by SGLang); a CPU has none.
        transports.shared_memory_payload = lambda tensors: ipc_payload(tensors, rank)
        empty_caches, release_memory = sync._empty_caches, step.release_memory

        def hold(run: RunContext, working: int) -> None:
            found = host.call(op="hold", gpu=rank, num_bytes=int(scale * live_bytes(run.policy)) + working)
            assert not found["error"], found["error"]

        def emptied(run: RunContext) -> None:
            hold(run, 0)
            empty_caches(run)
            run.channel.any_rank(False)  # the barrier of that function, which it has on CUDA only

        def released(run: RunContext) -> None:
            release_memory(run)
            run.channel.any_rank(False)
            hold(run, WORKING_BYTES)

        def built(*args: Any) -> RunContext:
            run: RunContext = build(*args)
            hold(run, 0)
            run.policy.offload.to_host()
            hold(run, 0)
            return run

        build, context.build = context.build, built
        sync._empty_caches, step.release_memory = emptied, released
    return int(run_rank(config_path, overrides))


def live_bytes(policy: Any) -> int:
    """Bytes of the storages of weights, gradients and optimizer state on the device."""
    storages: dict[int, int] = {}

    def add(tensor: Any) -> None:
        if torch.is_tensor(tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()

    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            for tensor in (parameter.data, parameter.grad, getattr(parameter, "main_grad", None)):
                add(tensor)
    for part in policy.optimizer.optimizers():
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                add(parameter.data)
        for state in part.optimizer.state.values():
            for tensor in state.values():
                add(tensor)
    return sum(storages.values())
