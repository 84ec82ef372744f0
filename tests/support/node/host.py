"""Hosts of the modelled node (servers.py) for real runs: a process per host has the stand-in
servers, and each rank reports its memory to it. Bytes on the modelled GPUs are those of a tiny
model, scaled to the real one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from safetensors.torch import load_file

from pacs_megatron.config import RunConfig
from pacs_megatron.models import load_spec, read_spec
from pacs_megatron.sglang.weights.checksums import ModelDims
from pacs_megatron.workbench.plan.known_models import KNOWN_MODELS
from pacs_megatron.workbench.plan.state import num_parameters, trained_elements
from tests.support.node.servers import GpuServer, Node, OutOfMemoryError, ipc_payload
from tests.support.tiny_families import HYBRIDS, make_family
from tests.support.tiny_models import save_tokenizer

SITE = Path(__file__).with_name("site")
WORKING_BYTES = 16 << 30
"""Activations, logits and the caching allocator of a training step, which `_empty_caches` returns.
"""
GRAPH_BYTES = 3 << 30
"""CUDA graphs of a server's prefill, to 8,192 tokens"""
Fault = tuple[int, str]
"""(a server's first GPU, path): the server is killed at its next call of this path"""


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    state = hashlib.sha256()
    for name in sorted(weights):
        state.update(name.encode())
        state.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Host:
    """A process with the GPUs and the stand-in servers of one host; the servers' own processes only
    hold their place.
    """

    def __init__(
        self, socket_path: Path, gpu_bytes: int, scale: float, faults: frozenset[Fault]
    ) -> None:
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
    def __init__(
        self, listener: socket.socket, node: Node, scale: float, faults: set[Fault]
    ) -> None:
        self._listener = listener
        self._node = node
        self._scale = scale
        self._faults = faults
        self._servers: dict[int, GpuServer] = {}
        self._starts: list[int] = []
        self._ended: list[str] = []
        self._real_peak = 0

    def run(self) -> None:
        threading.Thread(
            target=self._measure, args=(psutil.Process().parent(),), daemon=True
        ).start()
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._handle, args=(link,), daemon=True).start()

    def _handle(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as file:
            request = json.loads(file.readline())
            answer = getattr(self, f"_{request.pop('op')}")(link, **request)
            link.sendall(json.dumps(answer).encode() + b"\n")

    def _measure(self, test: psutil.Process) -> None:
        """The largest sum of the test's processes.

        A page that n of them share counts 1/n in each.
        """
        while True:
            total = 0
            for process in [test, *test.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    total += process.memory_full_info().pss
            self._real_peak = max(self._real_peak, total)
            time.sleep(0.5)

    def _memory(self, _link: socket.socket, gpu: int) -> dict[str, int]:
        return {"total": self._node.gpu_bytes, "free": self._node.free(gpu)}

    def _hold(self, _link: socket.socket, gpu: int, num_bytes: int) -> dict[str, str]:
        """A trainer rank's memory, in bytes of the tiny model, and its working memory if there is a
        step.
        """
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
                "late_compiles": server.late_compiles,
                "cores": server.cores,
                "held": digest_of(server.held),
            }
            for _, server in sorted(self._servers.items())
        ]
        peaks = {"peak": self._node.peak, "real_peak": self._real_peak}
        return {"servers": servers, "starts": self._starts, "ended": self._ended, **peaks}

    def _serve(
        self,
        link: socket.socket,
        args: list[str],
        visible: str,
        pid: int,
        environment: dict[str, Any],
        cores: Sequence[int] = (),
    ) -> dict[str, Any]:
        problem = environment_problem(**environment)
        if problem:
            return {"code": 1, "reason": problem}
        parser = argparse.ArgumentParser()
        for name in ("--model-path", "--host", "--port", "--tp-size", "--mem-fraction-static"):
            parser.add_argument(name)
        parser.add_argument("--context-length", type=int, default=0)
        parser.add_argument("--disable-prefill-cuda-graph", action="store_true")
        given, _ = parser.parse_known_args(args)
        assert len(visible.split(",")) == int(given.tp_size)
        spec = load_spec(given.model_path)
        if given.context_length > spec.max_positions:  # configs/model_config.py:1309
            return {"code": 1, "reason": "ValueError: User-specified context_length is greater"}
        dims = ModelDims.of(spec)
        try:
            server = GpuServer(
                self._node,
                load_file(Path(given.model_path) / "model.safetensors"),
                visible,
                mem_fraction=float(given.mem_fraction_static),
                dims=dims,
                scale=self._scale,
                address=(given.host, int(given.port)),
                graph_bytes=0 if given.disable_prefill_cuda_graph else GRAPH_BYTES,
            )
        except (ValueError, OutOfMemoryError, OSError) as error:  # OSError: its port was taken
            self._node.clear(f"server[{visible}]")
            return {"code": 1, "reason": str(error)}
        server.context = given.context_length or spec.max_positions
        server.stops_early = True
        server.cores = list(cores)
        gpu = server.gpus[0]
        for fault in [fault for fault in self._faults if fault[0] == gpu]:
            server.once_started[fault[1]] = lambda fault=fault: self._kill(server, fault, pid)  # type: ignore[misc]
        self._servers[gpu] = server
        self._starts.append(gpu)
        link.settimeout(0.2)
        while not server.ended:
            try:
                if not link.recv(1):
                    server.ended = server.ended or "its process was killed"
                    self._node.clear(server.owner)
                    server.close()
            except TimeoutError:
                continue
        self._ended.append(f"{server.owner}: {server.ended}")
        return {"code": 1, "reason": server.ended}

    def _kill(self, server: GpuServer, fault: Fault, pid: int) -> None:
        self._faults.discard(fault)
        server.ended = f"killed in {fault[1]}"  # before the kernel reports the end of the process
        os.kill(pid, signal.SIGKILL)
        server._end_scheduler(server.ended)


def scale_of_trained(config: RunConfig, hub_id: str, model: Path, scale: float) -> float:
    """Trained parameters of the original over those of the tiny model.

    Adapters have a rank of their own, so they do not shrink as the weights do, by `scale`.
    """
    if config.policy.lora is None:
        return scale
    real = trained_elements(config, read_spec(KNOWN_MODELS[hub_id]))
    return real / trained_elements(config, load_spec(model))


def environment_problem(python: str, home: str, ninja: str | None, caches: list[str]) -> str:
    """Why SGLang ends at its first forward on a GPU; "" if it does not.

    Args:
        python: the interpreter; `ninja` is installed beside it, as SGLang's requirement.
        home: $HOME, on a file system without locks.
        ninja: the program that PATH leads to.
        caches: folders of compiled kernels.
    """
    if ninja is None or Path(ninja).parent != Path(python).parent:
        return (
            "FileNotFoundError: [Errno 2] No such file or directory: 'ninja' "
            f"(kernels/jit/utils/compile/ninja.py:156; PATH leads to {ninja})"
        )
    for folder in caches:
        if Path(folder).is_relative_to(home):
            return f"OSError: [Errno 37] No locks available: '{folder}'"
    return ""


def tiny_model(
    folder: Path, hub_id: str, head_dim: int, *, num_layers: int = 2
) -> tuple[Path, float]:
    """A model of the same family, with the key-value heads and ties of the original, and the ratio
    of their parameters. FP8 needs a multiple of 16 as `head_dim`: every width is a multiple of it,
    on eight ranks too.
    """
    real = KNOWN_MODELS[hub_id]
    family = real["model_type"]
    shape = {
        "hidden_size": 8 * head_dim,
        "intermediate_size": 8 * head_dim,
        "num_attention_heads": 8,
        "num_key_value_heads": real["num_key_value_heads"],
        "tie_word_embeddings": real["tie_word_embeddings"],
        "vocab_size": 272,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 1024,
        **({} if family == "qwen2" else {"head_dim": head_dim}),
    }
    if family == "qwen3_moe":
        shape |= {
            "num_experts": 16,
            "num_experts_per_tok": 2,
            # Experts are nine tenths of the parameters, as in the original: expert parallelism
            # divides only these, and the optimizer's state of the others is small.
            "moe_intermediate_size": 16 * head_dim,
        }
    if family in HYBRIDS:
        shape |= _hybrid_shape(real, head_dim)
    case = family.removesuffix("_text")
    make_family(folder, case, dtype="bfloat16", **shape)
    if family in HYBRIDS:
        # transformers does not write the key from which SGLang reads the layers.
        file = folder / "config.json"
        interval = {"full_attention_interval": shape["full_attention_interval"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | interval))
    save_tokenizer(folder)
    return folder, num_parameters(read_spec(real)) / num_parameters(load_spec(folder))


def _hybrid_shape(real: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Of a delta net, one layer in two, with the original's value heads for each key head; and
    experts that are nine tenths of the parameters.
    """
    num_key_heads = 8
    per_key_head = real["linear_num_value_heads"] // real["linear_num_key_heads"]
    shape = {
        "full_attention_interval": 2,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * per_key_head,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": real["linear_conv_kernel_dim"],
    }
    if "num_experts" in real:
        shape |= {
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24 * head_dim,
            "shared_expert_intermediate_size": head_dim,
        }
    return shape


def run_on_gpu(
    rank: int,
    config_path: Path,
    overrides: tuple[str, ...],
    host: Host | None,
    scales: tuple[float, float],
    environment: Mapping[str, str],
) -> int:
    """One rank of the run, with the variables of a task on a cluster. With `host`, its handles and
    its memory are those of GPU `rank` there, scaled by `scales`: of the frozen weights, and of what
    is trained.
    """
    os.environ.update(environment)
    from pacs_megatron.sglang.weights import transports
    from pacs_megatron.training import context as context_module
    from pacs_megatron.training import step as step_module
    from pacs_megatron.training import sync as sync_module
    from pacs_megatron.training.context import RunContext
    from pacs_megatron.training.main import run_rank

    context = cast("Any", context_module)
    step = cast("Any", step_module)
    sync = cast("Any", sync_module)
    context._check_gpus = lambda config: None
    if host is not None:
        # torch passes a GPU's UUID in a handle (torch/multiprocessing/reductions.py, patched by
        # SGLang); a CPU has none.
        transports.shared_memory_payload = lambda tensors: ipc_payload(tensors, rank)
        empty_caches = sync._empty_caches
        release_memory = step.release_memory

        def hold(run: RunContext, working: int) -> None:
            num_bytes = 0.0
            for model in run.models:
                frozen = frozen_bytes(model)
                num_bytes += scales[0] * frozen + scales[1] * (live_bytes(model) - frozen)
            found = host.call(op="hold", gpu=rank, num_bytes=int(num_bytes) + working)
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
            for model in run.models:
                model.offload.to_host()
            hold(run, 0)
            return run

        build = context.build
        context.build = built
        sync._empty_caches = emptied
        step.release_memory = released
    return int(run_rank(config_path, overrides))


def frozen_bytes(policy: Any) -> int:
    """Bytes on the device of weights without a gradient."""
    parameters = itertools.chain.from_iterable(chunk.parameters() for chunk in policy.chunks)
    storages = [each.untyped_storage() for each in parameters if not each.requires_grad]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def live_bytes(policy: Any) -> int:
    """Bytes of the storages of weights, gradients and optimizer state on the device."""
    tensors = []
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            tensors += [parameter.data, parameter.grad, getattr(parameter, "main_grad", None)]
    for part in policy.optimizer.optimizers():
        for group in part.optimizer.param_groups:
            tensors += [parameter.data for parameter in group["params"]]
        for state in part.optimizer.state.values():
            tensors += state.values()
    storages = [tensor.untyped_storage() for tensor in tensors if torch.is_tensor(tensor)]
    num_bytes = {storage._cdata: storage.nbytes() for storage in storages}
    # Off-loaded tensors of the optimizer refer to the copy in host memory.
    num_bytes.pop(policy.offload.host.untyped_storage()._cdata, None)
    return sum(num_bytes.values())
