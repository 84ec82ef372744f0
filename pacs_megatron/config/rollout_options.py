"""Options of the rollout engines, and the properties of an engine that other packages read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.text import (
    Devices,
    EnvironmentName,
    HostName,
    Line,
    PathText,
    ServerUrl,
    Word,
)
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.contracts.options import Options


class RolloutEngineOptions(Options):
    """Properties of a rollout engine that other packages read, so that they do not depend on its
    class.
    """

    @property
    def is_sampled(self) -> bool:
        """False: the responses come from the data set."""
        return not isinstance(self, DemonstrationRollout)

    @property
    def embedded(self) -> EmbeddedRollout | None:
        """These options, if the ranks sample."""
        return self if isinstance(self, EmbeddedRollout) else None

    @property
    def sglang(self) -> SglangRollout | None:
        """These options, if SGLang servers sample."""
        return self if isinstance(self, SglangRollout) else None

    @property
    def agents(self) -> AgentOptions | None:
        """Options of agents; None: a response is one turn."""
        return self.agent if isinstance(self, EmbeddedRollout | SglangRollout) else None

    @property
    def managed_servers(self) -> SglangServers | None:
        """The servers that the run starts; None for external servers and for engines without
        servers.
        """
        return self.servers if isinstance(self, SglangRollout) else None

    @property
    def starts_servers_on_trainer_gpus(self) -> bool:
        """Whether the driver starts servers that share the trainer's GPUs."""
        return self.managed_servers is not None and self.managed_servers.colocated

    @property
    def on_trainer_gpus(self) -> bool:
        """Whether servers release their GPU memory during the training step."""
        are_external = self.sglang is not None and self.sglang.shares_gpus
        return are_external or self.starts_servers_on_trainer_gpus

    @property
    def steps_ahead(self) -> int:
        """`max_staleness`; 0 if nothing is sampled."""
        return self.max_staleness if isinstance(self, EmbeddedRollout | SglangRollout) else 0


class EmbeddedRollout(RolloutEngineOptions):
    """Samples inside the training ranks with `transformers`."""

    engine: Literal["embedded"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations`
    not at all.
    """

    sampling: SamplingOptions
    """Sampling of training responses."""

    batch_sequences: PositiveInt = 64
    """Sequences decoded together.

    Ranks receive whole batches, so results do not depend on the number of ranks.
    """

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the sampler's weights."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum staleness, in steps.

    Only useful to study stale samples: this engine does not overlap with training.
    """

    agent: AgentOptions | None = None
    """Several turns with tools; null: a response is one turn."""


class DemonstrationRollout(RolloutEngineOptions):
    """Uses the data set's solutions as responses, for `sft`. Nothing is sampled."""

    engine: Literal["demonstrations"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations`
    not at all.
    """

    max_response_tokens: PositiveInt
    """Maximum response length, in tokens. Longer solutions are dropped."""

    @property
    def sampling(self) -> SamplingOptions:
        """The response limit, and the temperature at which log-probs are computed."""
        return SamplingOptions(max_response_tokens=self.max_response_tokens)


SET_ELSEWHERE = {
    "set rollout.api_key_env; other users can read command lines": ("--api-key", "--admin-api-key"),
    "a free port is chosen": ("--port", "--nccl-port"),
    "use model.path": ("--model", "--model-path"),
    "use model.trust_remote_code": ("--trust-remote-code",),
    "use rollout.dtype": ("--dtype",),
    "use rollout.servers.device": ("--device",),
    "use rollout.servers.tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "use rollout.servers.count": ("--dp", "--dp-size", "--data-parallel-size"),
    "use rollout.servers.mem_fraction": ("--mem-fraction-static",),
    "use rollout.servers.max_total_tokens": ("--max-total-tokens",),
    "use rollout.servers.context_length": ("--context-length",),
}
"""Advice -> the SGLang arguments that `extra_args` may not contain."""


class SglangServers(Options):
    """Managed servers: the run starts and stops them."""

    python: tuple[Word, ...] = Field(strict=False, min_length=1)
    """Interpreter with SGLang, as a list of words: `[.venv-sglang/bin/python]`, or a container
    command with its Python.
    """

    count: int = Field(default=1, ge=1, le=4096)
    """Number of servers."""

    device: Literal["cpu", "cuda"] = "cuda"
    """Device of the servers."""

    visible_devices: tuple[Devices, ...] = Field(default=(), strict=False)
    """CUDA_VISIBLE_DEVICES of each server, with `tp` GPUs each.

    If empty, they share the trainer's GPUs in order.
    """

    tp: PositiveInt = 1
    """Tensor-parallel size of a server: its number of GPUs."""

    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the GPU's total memory for weights and KV cache; null uses SGLang's default, a
    share of what is free.
    """

    max_total_tokens: PositiveInt | None = None
    """Size of the KV cache, in tokens; null uses the available memory. Set it on CPU.

    At least prompt and response plus 2.
    """

    context_length: PositiveInt | None = None
    """Context of a server, in tokens; null uses the model's.

    At least prompt and response plus 2: SGLang stops a response earlier.
    """

    colocated: bool = False
    """Run the servers on the trainer's GPUs; they release their memory during training.

    Each node starts its share.
    """

    start_timeout_s: float = Field(default=900.0, gt=0)
    """Timeout of a server's start, in seconds."""

    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of a server in a run. After that it stays DEAD."""

    extra_args: tuple[Line, ...] = Field(default=(), strict=False)
    """More arguments of `sglang.launch_server`."""

    @model_validator(mode="after")
    def _check_devices(self) -> SglangServers:
        gpus = [devices.split(",") for devices in self.visible_devices]
        num_gpus = [len(names) for names in gpus]
        if gpus and num_gpus != [self.tp] * self.count:
            raise ValueError(
                f"visible_devices={gpus}: expected {self.tp} GPUs (tp) for each of {self.count} "
                "servers (count)"
            )

        for argument in self.extra_args:
            # The messages do not repeat the value, which may be a secret.
            name, _, _ = argument.partition("=")
            for advice, names in SET_ELSEWHERE.items():
                if name.replace("_", "-") in names:
                    raise ValueError(f"extra_args contains {name}; remove it: {advice}")
        return self


class SglangSync(Options):
    """Transfer of updated weights to the servers."""

    transport: Literal["disk", "broadcast", "ipc"]
    """`disk`: a safetensors folder. `broadcast`: NCCL on GPU, gloo on CPU. `ipc`: shared memory or
    CUDA handles on one host.
    """

    quantize: Literal["none", "fp8_blockwise"] = "none"
    """`fp8_blockwise` sends linear weights as e4m3 with one scale per 128 x 128 block, to servers
    on GPUs that run the model in this format (managed servers do). `verify` then skips these
    weights.
    """

    host: HostName = "127.0.0.1"
    """Trainer address for `transport: broadcast`. Use loopback unless servers run on other hosts.
    """

    folder: PathText | None = None
    """Folder for `transport: disk`, on a file system that the servers can read; null uses the run
    folder.
    """

    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Requests in flight during a weight update.

    `abort` restarts them. `retract` keeps their tokens, `in_place` also their KV cache of the old
    weights; both produce samples with several weight versions.
    """

    bucket_mib: PositiveInt = 512
    """Size of one transfer, in MiB. A larger tensor is sent whole."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of each request of a weight update, in seconds."""

    verify: Literal["off", "sample", "full"] = "sample"
    """Compare the servers' checksums with the exported weights.

    `full`: all parameters in every update. `sample`: all parameters after a server's start,
    otherwise 8, different ones in each update.
    """


class SglangRollout(RolloutEngineOptions):
    """Samples on SGLang servers, managed or external."""

    engine: Literal["sglang"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations`
    not at all.
    """

    sampling: SamplingOptions
    """Sampling of training responses."""

    agent: AgentOptions | None = None
    """Several turns with tools; null: a response is one turn."""

    sync: SglangSync
    """Transfer of updated weights to the servers."""

    urls: tuple[ServerUrl, ...] = Field(default=(), strict=False)
    """URLs of external servers. Set exactly one of `urls` and `servers`."""

    servers: SglangServers | None = None
    """Servers that the run starts and stops."""

    shares_gpus: bool = False
    """Whether the external servers run on the trainer's GPUs and release their memory during the
    training step.
    """

    url_ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Trainer rank on the first GPU of each of `urls`, which sends its weights with `ipc`. Batch
    scripts set it for colocated servers on several nodes.
    """

    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of the servers' weights. The policy's weights are cast to it for the transfer."""

    api_key_env: EnvironmentName | None = None
    """Environment variable that contains the servers' API key."""

    max_in_flight: PositiveInt = 256
    """Maximum number of requests in flight per server; the client queues others.

    SGLang's CUDA graphs end at a batch of 256 for `servers.tp` below 4 and of 512 from 4 on (80 and
    141 GB GPUs).
    """

    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout of one generation request, in seconds."""

    retries: int = Field(default=3, ge=0)
    """Maximum number of retries of a request."""

    probe_interval_s: float = Field(default=2.0, gt=0)
    """Interval of the health probes, in seconds."""

    probe_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one health probe, in seconds."""

    dead_after_s: float = Field(default=60.0, gt=0)
    """Seconds without a successful probe after which a server is marked DEAD.

    Its requests are retried on other servers.
    """

    max_failures: PositiveInt = 5
    """Number of consecutive failed requests after which a server is marked DEAD, even if its probes
    succeed.
    """

    all_down_after_s: float = Field(default=900.0, gt=0)
    """Seconds without a usable server after which the run saves and stops."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum staleness, in steps; 0 is synchronous.

    With the weights after s steps, step t may be sampled if t <= s + 1 + max_staleness. See
    `sync.pause` and the importance correction of the objectives.
    """

    @model_validator(mode="after")
    def _check_servers(self) -> SglangRollout:
        if bool(self.urls) == (self.servers is not None):
            raise ValueError("rollout.engine=sglang requires exactly one of `urls` and `servers`")
        for url in self.urls:
            # A repeated server would get two concurrent weight updates.
            if self.urls.count(url) > 1:
                raise ValueError(f"rollout.urls: {url} is named twice; name each server once")
        if self.url_ranks and len(self.url_ranks) != len(self.urls):
            raise ValueError(
                f"url_ranks has {len(self.url_ranks)} ranks for {len(self.urls)} servers; give one "
                "for each of `urls`, or remove it"
            )
        if self.shares_gpus and self.servers is not None:
            raise ValueError(
                "shares_gpus applies to external servers (`urls`); use servers.colocated=true "
                "instead"
            )
        return self


RolloutOptions = Annotated[
    EmbeddedRollout | SglangRollout | DemonstrationRollout, Field(discriminator="engine")
]
