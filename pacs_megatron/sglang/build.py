"""The SGLang engine of a run: attaches to external servers, or starts managed ones."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers
from pacs_megatron.config.schema import ModelOptions, RoutingKind
from pacs_megatron.errors import ConfigError, RolloutError
from pacs_megatron.models import language_config, load_config, load_spec
from pacs_megatron.runtime.cores import rollout_cores
from pacs_megatron.runtime.environment import check_secret, visible_gpus
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.decode import RoutesShape
from pacs_megatron.sglang.fleet import Server
from pacs_megatron.sglang.server import ManagedServer, ServerSpec, reap

POLL_S = 0.25


def api_key(options: SglangRollout) -> str | None:
    """The servers' key from the environment, or None if `api_key_env` is not set.

    Raises:
        ConfigError: the variable is not set, or no HTTP header can contain its value.
    """
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env)
    if not key:
        raise ConfigError(
            f"rollout.api_key_env={options.api_key_env}: this environment variable is not set"
        )
    check_secret(options.api_key_env, key="rollout.api_key_env")
    return key


def server_apis(options: SglangRollout, urls: tuple[str, ...]) -> tuple[SglangApi, ...]:
    """Clients of these servers' control endpoints, for the process that pushes weights."""
    key = api_key(options)
    timeout_s = options.sync.timeout_s
    return tuple(SglangApi(url=url, api_key=key, timeout_s=timeout_s) for url in urls)


def server_specs(
    options: SglangRollout, model: ModelOptions, folder: Path, routing: RoutingKind = "own"
) -> list[ServerSpec]:
    """One per managed server; logs and pid files go to `folder`.

    Raises:
        ConfigError: the interpreter does not exist, a key is not valid, GPUs are missing, or SGLang
            would read another hybrid from config.json.
    """
    servers = options.servers
    assert servers is not None
    _check_layers(Path(model.path))
    program, *arguments = servers.python
    if "/" in program:
        if not Path(program).exists():
            raise ConfigError(
                f"rollout.servers.python: {program} does not exist; `make install-gpu` (on CPU: "
                "`make install-sglang`) sets it up, or name the interpreter that has sglang"
            )
        program = str(Path(program).absolute())

    extra_args = servers.extra_args
    if routing != "own":
        extra_args = ("--enable-return-routed-experts", *extra_args)
    servers = servers.model_copy(
        update={"python": (program, *arguments), "extra_args": extra_args},
    )

    specs = []
    for index in range(servers.count):
        devices = None
        places = [index]
        if servers.device == "cuda":
            visible = visible_gpus(os.environ)
            devices = devices_of(servers, index, visible)
            places = _places_of(devices, visible)
        cores = rollout_cores(places)
        spec = ServerSpec(
            name=f"server{index}",
            folder=folder,
            options=options.model_copy(update={"servers": servers}),
            model=model,
            visible_devices=devices,
            cores=None if cores is None else frozenset(cores),
            api_key=api_key(options),
        )
        specs.append(spec)
    return specs


def _check_layers(folder: Path) -> None:
    """Raises ConfigError unless SGLang finds the layers of a hybrid.

    It reads `full_attention_interval`, which transformers does not write, and not `layer_types`
    (SGLang 0.5.23, configs/qwen3_next.py, `layers_block_type`).
    """
    if not (folder / "config.json").is_file():
        return
    delta = load_spec(folder).delta
    if delta is None:
        return
    numbers = range(1, len(delta.layers) + 1)
    given = language_config(load_config(folder)).get("full_attention_interval")
    for interval in numbers:
        if delta.layers == tuple(number % interval != 0 for number in numbers):
            if given == interval:
                return
            advice = f"set it to {interval}"
            break
    else:
        advice = "no value gives the attention of layer_types; use rollout.engine=embedded"
    raise ConfigError(
        f"{folder}/config.json: full_attention_interval={given!r}, from which alone SGLang reads "
        f"the layers of a hybrid; {advice}"
    )


def devices_of(servers: SglangServers, index: int, visible: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of one managed server.

    Args:
        servers: with `visible_devices`, its entry is used; else the server gets the next `tp` GPUs.
        index: number of the server.
        visible: the trainer's CUDA_VISIBLE_DEVICES; empty if it is not set.

    Raises:
        ConfigError: `visible` lists too few GPUs.
    """
    if servers.visible_devices:
        return servers.visible_devices[index]
    numbers = range(index * servers.tp, (index + 1) * servers.tp)
    if not visible:
        return ",".join(str(number) for number in numbers)
    if numbers.stop > len(visible):
        raise ConfigError(
            f"rollout.servers: server {index} with tp={servers.tp} needs GPUs {numbers.start} to "
            f"{numbers.stop - 1}, but CUDA_VISIBLE_DEVICES lists {len(visible)}; lower "
            "rollout.servers.count, or set visible_devices"
        )
    return ",".join(visible[number] for number in numbers)


def _places_of(devices: str, visible: Sequence[str]) -> list[int]:
    """Numbers of a server's GPUs as the trainer counts them, of the GPUs that it knows."""
    names = [name.strip() for name in devices.split(",")]
    if visible:
        return [visible.index(name) for name in names if name in visible]
    return [int(name) for name in names if name.isdecimal()]


def trainer_rank_of(devices: str | None, visible: Sequence[str]) -> int:
    """Trainer rank on a server's first GPU: only this rank can pass CUDA IPC handles to it.

    Args:
        devices: the server's CUDA_VISIBLE_DEVICES; None without GPUs (then the rank is 0).
        visible: the trainer's CUDA_VISIBLE_DEVICES; empty if it is not set.

    Raises:
        ConfigError: no rank uses the server's first GPU.
    """
    if devices is None:
        return 0
    first = devices.split(",")[0].strip()
    if first in visible:
        return visible.index(first)
    if not visible and first.isdecimal():
        return int(first)
    raise ConfigError(
        f"rollout.servers.visible_devices: the trainer does not use GPU {first} (it sees "
        f"{', '.join(visible) or 'all'}); rollout.sync.transport=ipc needs servers on the "
        "trainer's GPUs; correct it, or use broadcast"
    )


def start_servers(
    specs: list[ServerSpec], timeout_s: float, is_over: Callable[[], bool] = lambda: False
) -> list[ManagedServer]:
    """Starts all servers in parallel and returns when all are ready.

    First ends servers that an earlier, killed run left in the same folder.

    Raises:
        RolloutError: a server failed, or `is_over` became true. No server is left running.
    """
    for folder in {spec.folder for spec in specs}:
        reap(folder)
    servers = [ManagedServer(spec) for spec in specs]
    pool = ThreadPoolExecutor(len(servers))
    try:
        for server in servers:
            server.start()
        _await({pool.submit(server.wait_ready, timeout_s) for server in servers}, is_over)
    except BaseException:  # also after Ctrl-C, so that no server is left running
        for server in servers:
            server.close()
        raise
    finally:
        pool.shutdown()  # last, because it blocks until all `wait_ready` calls end
    return servers


def _await(waiting: set[Future[None]], is_over: Callable[[], bool]) -> None:
    """Waits for all futures.

    Raises the first error at once, and RolloutError when `is_over` becomes true.
    """
    while waiting:
        done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
        for future in done:
            future.result()
        if is_over():
            raise RolloutError("stop request while the rollout servers were starting")


def open_engine(
    options: SglangRollout,
    model: ModelOptions,
    folder: Path,
    routing: RoutingKind = "own",
    *,
    stops: Sequence[int] = (),
) -> SglangEngine:
    """The engine, with all servers running and STALE: push weights, then call `set_current`.

    Args:
        options: of the servers.
        model: that the servers load.
        folder: of the servers' logs and pid files.
        routing: `policy.routing`.
        stops: tokens that end a response (`data.stop_token_ids`).

    Raises:
        RolloutError: a server does not start.
        ConfigError: the API key is not valid, or no trainer rank uses the GPU of a server.
        ConversionError: the model folder is damaged.
    """
    spec = load_spec(model.path)
    routes = None
    if routing != "own":
        assert spec.moe is not None, "the configuration was checked"
        routes = RoutesShape(spec.num_layers, spec.moe.top_k, spec.moe.num_experts)

    if options.servers is None:
        servers = _external_servers(options)
    else:
        specs = server_specs(options, model, folder, routing)
        # Before the start: an error after it would leave the servers running.
        ranks = [
            _sending_rank(options, index, made.visible_devices) for index, made in enumerate(specs)
        ]
        managed = start_servers(specs, options.servers.start_timeout_s)
        servers = [
            Server(server.api, server, trainer_rank=rank)
            for server, rank in zip(managed, ranks, strict=True)
        ]
    try:
        return SglangEngine(
            servers, options, vocab_size=spec.vocab_size, routes=routes, stops=stops
        )
    except BaseException:
        for server in servers:
            if server.managed is not None:
                server.managed.close()
        raise


def _external_servers(options: SglangRollout) -> list[Server]:
    return [
        Server(api, trainer_rank=_sending_rank(options, index))
        for index, api in enumerate(server_apis(options, options.urls))
    ]


def _sending_rank(options: SglangRollout, index: int, devices: str | None = None) -> int:
    """Trainer rank that sends weights to server `index`, a managed one if it has `devices`.

    `broadcast` distributes servers over ranks, and so over the GPUs' network links;
    training/sync.py takes the number modulo the ranks that send.
    """
    if options.sync.transport == "broadcast":
        return index
    if options.sync.transport == "disk":
        return 0
    if options.url_ranks:
        return options.url_ranks[index]
    return trainer_rank_of(devices, visible_gpus(os.environ))
