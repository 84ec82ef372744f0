"""Every option of a run, once: name, type, default, meaning. A default lives here and nowhere else.

Unknown keys are refused; an option that the chosen strategy does not use is refused too, because each strategy is its
own class (a tagged union on `name` or `engine`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.objective_options import ObjectiveOptions, PacsOptions, SftOptions
from pacs_megatron.config.options import Options


# -------------------------------------------------------------------------------------------------------------- model
class ModelOptions(Options):
    path: str
    """Hugging Face folder or hub id, or a converted Megatron checkpoint."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint's tokenizer. Off unless you trust its author."""


class Fp8Options(Options):
    recipe: Literal["delayed", "tensorwise", "blockwise"]
    """Transformer Engine's scaling recipe."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: e4m3 forward, e5m2 backward. `blockwise` uses `e4m3`."""
    first_last_layers_bf16: int = Field(default=0, ge=0)
    """This many layers at the start and at the end stay in bf16."""


class PrecisionOptions(Options):
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of weights and activations. Master weights and optimizer state are fp32 always."""
    fp8: Fp8Options | None = None
    """Matrix products in FP8 (needs CUDA and Transformer Engine); needs dtype bf16."""


class RecomputeOptions(Options):
    granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `selective` redoes core attention, `full` whole layers."""
    num_layers: PositiveInt = 1
    """With `full`: layers recomputed together (Megatron's `uniform` method)."""


class ParallelOptions(Options):
    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    cp: PositiveInt = 1
    """Context parallel size."""
    ep: PositiveInt = 1
    """Expert parallel size."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages a rank (interleaved schedule)."""
    sequence_parallel: bool = False
    """Split activations outside attention and MLP along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    recompute: RecomputeOptions = RecomputeOptions()
    control_timeout_s: float = Field(default=7200.0, gt=0)
    """How long ranks wait for one phase of the driver before they give up."""
    hang_timeout_s: float = Field(default=1500.0, gt=0)
    """A rank without any progress for so long ends the job with exit code 70 and every rank's stack. Below NCCL's own
    time-out (1,800 s), above the longest update, checkpoint or embedded generation."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """Interval of the heartbeat from rank 0 to the waiting ranks."""


# ----------------------------------------------------------------------------------------------------- rollout, rewards
class SamplingOptions(Options):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_response_tokens: PositiveInt
    stop: tuple[str, ...] = Field(default=(), strict=False)


class EmbeddedRollout(Options):
    engine: Literal["embedded"]
    sampling: SamplingOptions
    batch_sequences: PositiveInt = 64
    """Sequences decoded together; also the unit that is dealt to ranks, so results do not depend on their number."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    max_staleness: int = Field(default=0, ge=0)
    """Steps sampled ahead, from the weights there are then. Nothing overlaps on the same ranks: it shows in advance
    what stale samples do to a run."""


class DemonstrationRollout(Options):
    """No sampling: the data set's own solutions are the responses (for `sft`)."""

    engine: Literal["demonstrations"]
    max_response_tokens: PositiveInt


MAX_SGLANG_STOPS = 32
"""SGLang refuses requests with more stop strings."""


SET_ELSEWHERE = {
    "--api-key": "name the key's environment variable by rollout.api_key_env, a command line can be read by everybody",
    "--admin-api-key": "no call would bear it; rollout.api_key_env protects all of them",
    "--port": "a free one is chosen",
    "--nccl-port": "a free one is chosen",
    "--model": "say model.path",
    "--model-path": "say model.path",
    "--device": "say rollout.servers.device",
    "--dtype": "say rollout.dtype",
    "--tp": "say rollout.servers.tp",
    "--tp-size": "say rollout.servers.tp",
    "--tensor-parallel-size": "say rollout.servers.tp",
    "--dp": "start more servers by rollout.servers.count",
    "--dp-size": "start more servers by rollout.servers.count",
    "--data-parallel-size": "start more servers by rollout.servers.count",
    "--mem-fraction-static": "say rollout.servers.mem_fraction",
    "--max-total-tokens": "say rollout.servers.max_total_tokens",
    "--context-length": "say rollout.servers.context_length",
    "--trust-remote-code": "say model.trust_remote_code",
}
"""Arguments of SGLang's that are not for `extra_args`, and what to do instead."""


class SglangServers(Options):
    """Servers that the run starts, owns and ends."""

    python: tuple[str, ...] = Field(strict=False, min_length=1)
    """Interpreter that has sglang, as a list: `[.venv-sglang/bin/python]`, or a container command and its python."""
    count: PositiveInt = 1
    device: Literal["cpu", "cuda"] = "cuda"
    visible_devices: tuple[str, ...] = Field(default=(), strict=False)
    """CUDA_VISIBLE_DEVICES of each server; empty: all inherit the trainer's."""
    tp: PositiveInt = 1
    """GPUs a server."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of GPU memory for weights and KV cache; None: SGLang's choice."""
    max_total_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens; None: what memory allows. Set it on CPU."""
    context_length: PositiveInt | None = None
    """Longest prompt + response; None: the model's."""
    colocated: bool = False
    """On the trainer's GPUs: memory is released while the trainer steps. With several `resources.nodes` every node starts
    its share of `count`."""
    deterministic: bool = False
    """Batch-invariant kernels (GPU only); a sample's seed has an effect only with it."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one server in a run; then it stays dead."""
    extra_args: tuple[str, ...] = Field(default=(), strict=False)
    """Passed on to `sglang.launch_server`."""

    @model_validator(mode="after")
    def _check_devices(self) -> SglangServers:
        if self.visible_devices and len(self.visible_devices) != self.count:
            raise ValueError(
                f"visible_devices names {len(self.visible_devices)} servers, count={self.count}; one entry a server"
            )
        if self.device == "cpu" and (self.deterministic or self.visible_devices):
            raise ValueError("device=cpu has no use for deterministic and visible_devices; remove them")
        for arg in self.extra_args:
            key = SET_ELSEWHERE.get(arg.partition("=")[0].replace("_", "-"))
            if key is not None:
                # The argument itself is not repeated: it may be a secret.
                raise ValueError(f"extra_args has {arg.partition('=')[0]}; remove it: {key}")
        return self


class SglangSync(Options):
    """How new weights reach the servers."""

    transport: Literal["disk", "broadcast", "ipc"]
    """`disk`: a safetensors folder that all servers can read. `broadcast`: NCCL on GPU, gloo on CPU. `ipc`: shared
    memory of this host (CUDA handles when colocated)."""
    quantize: Literal["none", "fp8_blockwise"] = "none"
    """`fp8_blockwise`: linear weights as e4m3 with a scale a 128 x 128 block, for servers that run the model so (own
    servers are started so; GPU only). `verify` then looks at the other weights only."""
    host: str = "127.0.0.1"
    """With `transport: broadcast`: the trainer's address that servers connect to; loopback unless they are on other hosts."""
    folder: str | None = None
    """With `transport: disk`: a folder on a file system that servers share, in which the run makes one of its own; None: in the
    run's folder."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Requests in flight during an update: `abort` ends them and samples them anew; `retract` keeps their tokens and
    recomputes their KV cache; `in_place` keeps both, and with them the cached prompts of the old weights. The last two
    give samples of several versions."""
    bucket_mib: PositiveInt = 512
    """Weights sent at a time, MiB; the trainer holds one bucket (or the largest tensor) more than its model."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of each call of an update."""
    verify: Literal["off", "sample", "full"] = "sample"
    """Compare the servers' own checksums with what was exported: of 8 parameters that change from update to update,
    or of all."""


class SglangRollout(Options):
    engine: Literal["sglang"]
    sampling: SamplingOptions
    sync: SglangSync
    urls: tuple[str, ...] = Field(default=(), strict=False)
    """Running servers to attach to; exactly one of `urls` and `servers`."""
    servers: SglangServers | None = None
    shares_gpus: bool = False
    """The servers at `urls` sit on the trainer's GPUs: they release memory while the trainer steps."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the servers' weights; the policy's are cast to it on the way."""
    api_key_env: str | None = None
    """Environment variable with the servers' API key."""
    max_in_flight: PositiveInt = 512
    """Requests a server works on at a time; more wait here."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    retries: int = Field(default=3, ge=0)
    """Further tries of one request after a failed one."""
    probe_s: float = Field(default=2.0, gt=0)
    """Interval of the health probes."""
    probe_timeout_s: float = Field(default=10.0, gt=0)
    dead_after_s: float = Field(default=60.0, gt=0)
    """A server that answers no probe for so long is dead: its requests go elsewhere."""
    max_failures: PositiveInt = 5
    """Failures in a row, with a good probe but no good answer in between, after which a server counts as dead."""
    all_down_after_s: float = Field(default=900.0, gt=0)
    """The run saves and stops when no server has been usable for so long."""
    decode_workers: PositiveInt = 1
    """Processes that decode long answers."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that servers may be ahead of training: 0 is synchronous, 1 one step off, k. With the weights after s steps,
    step t may be sampled when t <= s + 1 + max_staleness. See `sync.pause` and the objectives' importance correction."""

    @model_validator(mode="after")
    def _check_servers(self) -> SglangRollout:
        if bool(self.urls) == (self.servers is not None):
            raise ValueError("rollout.engine=sglang needs exactly one of `urls` and `servers`")
        if self.shares_gpus and self.servers is not None:
            raise ValueError("shares_gpus is for servers at `urls`; for own ones say servers.colocated=true")
        if self.sync.folder is not None and self.sync.transport != "disk":
            raise ValueError(f"sync.folder is not used by sync.transport={self.sync.transport}; remove it")
        if self.sync.host != "127.0.0.1" and self.sync.transport != "broadcast":
            raise ValueError(f"sync.host is not used by sync.transport={self.sync.transport}; remove it")
        if self.sync.quantize != "none" and self.servers is not None and self.servers.device == "cpu":
            raise ValueError(f"sync.quantize={self.sync.quantize} needs servers.device=cuda; SGLang has no FP8 on CPU")
        return self


RolloutOptions = Annotated[EmbeddedRollout | SglangRollout | DemonstrationRollout, Field(discriminator="engine")]


class RewardWorkerOptions(Options):
    workers: PositiveInt = 1
    """Worker processes."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for one answer; the worker is killed and replaced."""
    memory_limit_gib: float = Field(default=4.0, gt=0)
    """Data one worker may allocate; an answer that needs more is not judged."""
    label_threshold: float | None = None
    """`label = 1 if reward >= label_threshold`; without it a reward outside {0, 1} is an error."""
    max_failure_frac: float = Field(default=0.05, ge=0, le=1)
    """Share of a step's samples that may be unjudged before the run stops."""


class MathReward(RewardWorkerOptions):
    name: Literal["math"]


class ArithmeticReward(RewardWorkerOptions):
    name: Literal["arithmetic"]


class FormatReward(RewardWorkerOptions):
    name: Literal["format"]
    pattern: str
    """Regular expression that the whole response must match (re.DOTALL)."""


class CustomReward(RewardWorkerOptions):
    name: Literal["custom"]
    function: str
    """`module:function` or `path/to/file.py:function`; called as f(prompt, response) -> float."""


RewardOptions = Annotated[MathReward | ArithmeticReward | FormatReward | CustomReward, Field(discriminator="name")]


class AdmissionOptions(Options):
    truncated: Literal["label0", "drop"] = "label0"
    """What a response cut at the token limit counts as."""
    drop_one_class_groups: bool = False
    """Dynamic sampling: drop groups whose labels are all equal."""
    oversample: float = Field(default=1.0, ge=1)
    """With `drop_one_class_groups`: a step asks for so many times its prompts and trains the first `batch.
    prompts_per_step` groups that are admitted. SGLang stops sampling the others then; their prompts come again later."""


# ----------------------------------------------------------------------------------------------------------------- data
class ColumnOptions(Options):
    problem: str
    answer: str
    solution: str | None = None


class DatasetOptions(Options):
    path: str
    """Hub id, or a .json / .jsonl / .parquet file."""
    name: str | None = None
    """Name in metrics and ids; default: the preset's or the file's name."""
    subset: str | None = None
    """Hub id only: the data set's configuration name (`main` of openai/gsm8k)."""
    revision: str | None = None
    """Hub id only: commit, tag or branch, so that the rows cannot change under a run."""
    split: str = "train"
    """Hub id or folder; a file has no splits."""
    preset: Literal["deepscaler", "gsm8k", "math500", "aime", "amc23", "beyondaime"] | None = None
    columns: ColumnOptions | None = None
    """Column names; exactly one of `preset` and `columns`."""
    limit: PositiveInt | None = None
    """Use only the first so many rows."""


class DataOptions(Options):
    train: DatasetOptions
    prompt_suffix: str = r"Please reason step by step, and put your final answer within \boxed{}."
    """Appended to the problem after a space (the paper's suffix); empty for none."""
    system_prompt: str | None = None
    chat_template_args: dict[str, str | bool | int] = Field(default_factory=dict)
    """Extra variables of the chat template (Qwen3: `enable_thinking: false`)."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are dropped and counted."""
    shuffle: bool = True
    """Order from run.seed, a new one each epoch."""
    shuffle_labels: bool = False
    """Control experiment: permute the labels of a step at random. Learning must stop."""


class BatchOptions(Options):
    prompts_per_step: PositiveInt
    """Prompts in one step (one rollout batch)."""
    samples_per_prompt: PositiveInt
    """Responses a prompt: the size of a group (G)."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates a step; each takes an equal share of the groups."""
    tokens_per_microbatch: PositiveInt
    """Token budget of one forward pass on one data-parallel rank; a longer single sample is an error."""


# ---------------------------------------------------------------------------------------------- optimizer, loop, output
class OptimizerOptions(Options):
    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_updates: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from lr to min_lr over the run's updates, after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)


class EvaluationOptions(Options):
    benchmarks: tuple[DatasetOptions, ...] = Field(default=(), strict=False)
    every: PositiveInt | None = None
    """Evaluate every so many steps, besides the start and the end; None: only start and end."""
    samples_per_prompt: PositiveInt = 4
    """Draws a problem (n of the unbiased pass@k)."""
    k: tuple[int, ...] = Field(default=(1,), strict=False)
    sampling: SamplingOptions | None = None
    """Required when benchmarks are named."""


class CheckpointOptions(Options):
    every: PositiveInt | None = None
    """Save every so many steps, besides the end; None: only at the end and on a signal."""
    keep_last: PositiveInt = 2


class MismatchOptions(Options):
    """How far the sampler's log-probs may be from the trainer's for the same tokens and weights."""

    threshold: float = Field(default=0.1, gt=0)
    """Nats; the share of tokens beyond it is `mismatch/over_frac`."""
    max_abs_mean: float | None = Field(default=None, gt=0)
    """Nats a token; the run saves and stops when the step's mean is larger. About 0.01 is healthy for bf16."""


class WandbOptions(Options):
    project: str
    entity: str | None = None


class LoggingOptions(Options):
    tensorboard: bool = True
    wandb: WandbOptions | None = None
    """Weights & Biases, when installed and asked for (the key comes from WANDB_API_KEY)."""
    samples_in_report: int = Field(default=8, ge=0)
    save_rollouts: bool = True
    """Write every step's samples to rollouts/ as text."""
    save_tokens: bool = False
    """Write them as arrays too: token ids, log-probs and the weights they came from, exactly, so that a step can be
    trained again from them. Eight bytes a token."""


class RunOptions(Options):
    name: str
    dir: str = "runs"
    """The run's folder is `<dir>/<name>`."""
    seed: int = Field(default=0, ge=0)
    steps: PositiveInt
    """Training steps (rollout batches)."""
    nproc: PositiveInt | None = None
    """Ranks that `train` starts on this host; default: tp * pp * cp. Ignored under torchrun or srun."""


class ResourceOptions(Options):
    """What the run asks of a cluster; the site's own words (partition, account, modules) are in configs/clusters/."""

    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a node, one rank each; 0: CPU, with run.nproc ranks."""
    gpu: Literal["a100", "h100", "h200", "b200"] | None = None
    """For `plan`: memory and speed of the GPU; required with gpus_per_node > 0."""
    rollout_nodes: int = Field(default=0, ge=0)
    """More nodes for SGLang servers; 0: the servers share the trainer's GPUs, or there are none."""
    time_limit: str = Field(default="04:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """Of one job, as Slurm writes it; the run goes on in the next one."""
    signal_lead_s: PositiveInt = 300
    """The signal to save and stop comes this long before the time limit: longer than an update, a weight sync and a save."""
    max_attempts: PositiveInt = 5
    """A job that ended so often in a row without a new checkpoint is not requeued."""


class RunConfig(Options):
    """The whole file."""

    run: RunOptions
    resources: ResourceOptions = ResourceOptions()
    model: ModelOptions
    precision: PrecisionOptions = PrecisionOptions()
    parallel: ParallelOptions = ParallelOptions()
    objective: ObjectiveOptions
    batch: BatchOptions
    rollout: RolloutOptions
    reward: RewardOptions | None = None
    """Required unless rollout.engine is `demonstrations`."""
    admission: AdmissionOptions = AdmissionOptions()
    data: DataOptions
    optimizer: OptimizerOptions
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    mismatch: MismatchOptions = MismatchOptions()
    logging: LoggingOptions = LoggingOptions()

    @model_validator(mode="after")
    def _check_objective(self) -> RunConfig:
        if isinstance(self.objective, PacsOptions):
            self.objective.refuse_updates_per_step(self.batch.updates_per_step)
        # `score: naive` looks at no sibling, but admission drops groups of one all the same.
        if not isinstance(self.objective, SftOptions) and self.batch.samples_per_prompt < 2:
            raise ValueError(
                f"batch.samples_per_prompt={self.batch.samples_per_prompt} gives objective {self.objective.name} no "
                "siblings to compare; use at least 2"
            )
        return self
