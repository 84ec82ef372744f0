"""Every option of a run: name, type, default and description. A default is written here and nowhere else.

Unknown keys are refused. Each strategy is a class of its own (a tagged union on `name` or `engine`), so an option that
the chosen strategy does not use is refused too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.objective_options import ObjectiveOptions, PacsOptions, SftOptions
from pacs_megatron.config.options import Options
from pacs_megatron.config.reward_options import RewardOptions


# -------------------------------------------------------------------------------------------------------------- model
class ModelOptions(Options):
    path: str
    """Hugging Face folder or hub id, or a converted Megatron checkpoint."""
    trust_remote_code: bool = False
    """Run the Python code shipped with the checkpoint's tokenizer. Set it only if you trust the author."""


class Fp8Options(Options):
    recipe: Literal["delayed", "tensorwise", "blockwise"]
    """Transformer Engine's scaling recipe."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 number format. `hybrid`: e4m3 forward, e5m2 backward. Use `e4m3` with `recipe: blockwise`."""
    first_last_layers_bf16: int = Field(default=0, ge=0)
    """Number of layers at each end of the model that stay in bf16."""


class PrecisionOptions(Options):
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of weights and activations. Master weights and optimizer state are always fp32."""
    fp8: Fp8Options | None = None
    """FP8 matrix products. Requires CUDA, Transformer Engine and `dtype: bf16`."""


class RecomputeOptions(Options):
    granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `selective` recomputes core attention, `full` whole layers."""
    num_layers: PositiveInt = 1
    """Layers recomputed together with `granularity: full` (Megatron's `uniform` method)."""


class ParallelOptions(Options):
    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    cp: PositiveInt = 1
    """Context-parallel size."""
    ep: PositiveInt = 1
    """Expert-parallel size."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages per rank (interleaved schedule)."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP along the sequence, over the tensor-parallel ranks."""
    distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks."""
    recompute: RecomputeOptions = RecomputeOptions()
    """Activation recomputation."""
    control_timeout_s: float = Field(default=7200.0, gt=0)
    """Timeout of one phase of the driver, such as a rollout, in seconds."""
    hang_timeout_s: float = Field(default=1500.0, gt=0)
    """Seconds without progress after which a rank writes all stacks and ends the job with exit code 70. Must be below
    NCCL's timeout (1,800 s) and above the longest update, checkpoint or embedded generation."""
    heartbeat_interval_s: float = Field(default=5.0, gt=0)
    """Interval of the heartbeat from rank 0 to the other ranks, in seconds."""


# -------------------------------------------------------------------------------------------------------------- rollout
class SamplingOptions(Options):
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of nucleus sampling; 1 disables it."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from; 0 disables it."""
    max_response_tokens: PositiveInt
    """Maximum response length, in tokens. A longer response is truncated."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a response."""


class EmbeddedRollout(Options):
    """Samples inside the training ranks with `transformers`."""

    engine: Literal["embedded"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations` not at all."""
    sampling: SamplingOptions
    """Sampling of training responses."""
    batch_sequences: PositiveInt = 64
    """Sequences decoded together. Ranks receive whole batches, so results do not depend on the number of ranks."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the sampler's weights."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum off-policy lag, in steps. Sampling and training do not overlap on the same ranks; use it to study the
    effect of stale samples."""


class DemonstrationRollout(Options):
    """Uses the data set's solutions as responses, for `sft`. Nothing is sampled."""

    engine: Literal["demonstrations"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations` not at all."""
    max_response_tokens: PositiveInt
    """Maximum response length, in tokens. Longer solutions are dropped."""


MAX_SGLANG_STOPS = 32
"""Maximum number of stop strings in a request to SGLang."""


SET_ELSEWHERE = {
    "--api-key": "set rollout.api_key_env; other users can read command lines",
    "--admin-api-key": "rollout.api_key_env protects all requests",
    "--port": "a free port is chosen",
    "--nccl-port": "a free port is chosen",
    "--model": "use model.path",
    "--model-path": "use model.path",
    "--device": "use rollout.servers.device",
    "--dtype": "use rollout.dtype",
    "--tp": "use rollout.servers.tp",
    "--tp-size": "use rollout.servers.tp",
    "--tensor-parallel-size": "use rollout.servers.tp",
    "--dp": "use rollout.servers.count",
    "--dp-size": "use rollout.servers.count",
    "--data-parallel-size": "use rollout.servers.count",
    "--mem-fraction-static": "use rollout.servers.mem_fraction",
    "--max-total-tokens": "use rollout.servers.max_total_tokens",
    "--context-length": "use rollout.servers.context_length",
    "--trust-remote-code": "use model.trust_remote_code",
}
"""SGLang arguments that `extra_args` may not contain -> what to use instead."""


class SglangServers(Options):
    """Managed servers: the run starts and stops them."""

    python: tuple[str, ...] = Field(strict=False, min_length=1)
    """Interpreter of an environment with SGLang, as a list of words: `[.venv-sglang/bin/python]`, or a container command
    followed by its Python."""
    count: PositiveInt = 1
    """Number of servers."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Device of the servers."""
    visible_devices: tuple[str, ...] = Field(default=(), strict=False)
    """CUDA_VISIBLE_DEVICES of each server; if empty, all servers inherit the trainer's."""
    tp: PositiveInt = 1
    """Tensor-parallel size of a server: its number of GPUs."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of GPU memory for weights and KV cache; null uses SGLang's default."""
    max_total_tokens: PositiveInt | None = None
    """Size of the KV cache, in tokens; null uses the available memory. Set it on CPU."""
    context_length: PositiveInt | None = None
    """Maximum length of prompt and response, in tokens; null uses the model's."""
    colocated: bool = False
    """Run the servers on the trainer's GPUs and release their memory during the training step. With several
    `resources.nodes`, each node starts an equal share of `count`."""
    deterministic: bool = False
    """Use batch-invariant kernels (GPU only). Without them a sample's seed has no effect."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Timeout of a server's start, in seconds."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of a server in a run. After that it stays DEAD."""
    extra_args: tuple[str, ...] = Field(default=(), strict=False)
    """More arguments of `sglang.launch_server`."""

    @model_validator(mode="after")
    def _check_devices(self) -> SglangServers:
        if self.visible_devices and len(self.visible_devices) != self.count:
            raise ValueError(
                f"visible_devices has {len(self.visible_devices)} entries, count={self.count}; use one entry per server"
            )
        if self.device == "cpu" and (self.deterministic or self.visible_devices):
            raise ValueError("device=cpu does not use deterministic or visible_devices; remove them")
        for arg in self.extra_args:
            key = SET_ELSEWHERE.get(arg.partition("=")[0].replace("_", "-"))
            if key is not None:
                # The error does not repeat the value, which may be a secret.
                raise ValueError(f"extra_args contains {arg.partition('=')[0]}; remove it: {key}")
        return self


class SglangSync(Options):
    """Transfer of updated weights to the servers."""

    transport: Literal["disk", "broadcast", "ipc"]
    """`disk`: a safetensors folder that all servers read. `broadcast`: NCCL on GPU, gloo on CPU. `ipc`: shared memory on
    one host (CUDA handles when colocated)."""
    quantize: Literal["none", "fp8_blockwise"] = "none"
    """`fp8_blockwise` sends linear weights as e4m3 with one scale per 128 x 128 block, for servers that run the model in
    this format (managed servers are started with it; GPU only). `verify` then skips these weights."""
    host: str = "127.0.0.1"
    """Trainer address for `transport: broadcast`. Use loopback unless servers run on other hosts."""
    folder: str | None = None
    """Folder for `transport: disk`, on a file system that the servers can read. The run creates a subfolder in it. null
    uses the run folder."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Handling of requests in flight during a weight update. `abort` restarts them; `retract` keeps their tokens and
    recomputes their KV cache; `in_place` keeps both, so cached prompts stay from the old weights. The last two produce
    samples with several weight versions."""
    bucket_mib: PositiveInt = 512
    """Size of one transfer, in MiB. The trainer needs memory for one bucket, or for the largest tensor if it is larger."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of each request of a weight update, in seconds."""
    verify: Literal["off", "sample", "full"] = "sample"
    """Compare the servers' checksums with the exported weights: `sample` compares 8 parameters, others at each update;
    `full` compares all."""


class SglangRollout(Options):
    """Samples on SGLang servers, managed or external."""

    engine: Literal["sglang"]
    """Rollout engine. `embedded` samples inside the ranks, `sglang` on servers, `demonstrations` not at all."""
    sampling: SamplingOptions
    """Sampling of training responses."""
    sync: SglangSync
    """Transfer of updated weights to the servers."""
    urls: tuple[str, ...] = Field(default=(), strict=False)
    """URLs of external servers. Set exactly one of `urls` and `servers`."""
    servers: SglangServers | None = None
    """Servers that the run starts and stops."""
    shares_gpus: bool = False
    """The external servers run on the trainer's GPUs and release their memory during the training step."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of the servers' weights. The policy's weights are cast to it for the transfer."""
    api_key_env: str | None = None
    """Environment variable that contains the servers' API key."""
    max_in_flight: PositiveInt = 512
    """Maximum number of requests in flight per server. Further requests are queued in the client."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout of one generation request, in seconds."""
    retries: int = Field(default=3, ge=0)
    """Maximum number of retries of a request."""
    probe_interval_s: float = Field(default=2.0, gt=0)
    """Interval of the health probes, in seconds."""
    probe_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one health probe, in seconds."""
    dead_after_s: float = Field(default=60.0, gt=0)
    """Seconds without a successful probe after which a server is marked DEAD. Its requests are retried on other servers."""
    max_failures: PositiveInt = 5
    """Number of consecutive failed requests after which a server is marked DEAD, even if its probes succeed."""
    all_down_after_s: float = Field(default=900.0, gt=0)
    """Seconds without a usable server after which the run saves and stops."""
    decode_workers: PositiveInt = 1
    """Number of processes that decode long responses."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum off-policy lag, in steps; 0 is synchronous. With the weights after s steps, step t may be sampled if
    t <= s + 1 + max_staleness. See `sync.pause` and the importance correction of the objectives."""

    @model_validator(mode="after")
    def _check_servers(self) -> SglangRollout:
        if bool(self.urls) == (self.servers is not None):
            raise ValueError("rollout.engine=sglang requires exactly one of `urls` and `servers`")
        if self.shares_gpus and self.servers is not None:
            raise ValueError("shares_gpus applies to external servers (`urls`); use servers.colocated=true instead")
        if self.sync.folder is not None and self.sync.transport != "disk":
            raise ValueError(f"sync.folder is not used by sync.transport={self.sync.transport}; remove it")
        if self.sync.host != "127.0.0.1" and self.sync.transport != "broadcast":
            raise ValueError(f"sync.host is not used by sync.transport={self.sync.transport}; remove it")
        if self.sync.quantize != "none" and self.servers is not None and self.servers.device == "cpu":
            raise ValueError(
                f"sync.quantize={self.sync.quantize} requires servers.device=cuda; SGLang has no FP8 on CPU"
            )
        return self


RolloutOptions = Annotated[EmbeddedRollout | SglangRollout | DemonstrationRollout, Field(discriminator="engine")]


class AdmissionOptions(Options):
    truncated: Literal["label0", "drop"] = "label0"
    """Handling of truncated responses: `label0` keeps them with label 0, `drop` removes them."""
    drop_one_class_groups: bool = False
    """Drop groups whose labels are all equal (dynamic sampling)."""
    oversample: float = Field(default=1.0, ge=1)
    """Factor of over-sampling, with `drop_one_class_groups`. A step requests `oversample * batch.prompts_per_step` prompts
    and trains on the first `batch.prompts_per_step` admitted groups. SGLang cancels the other requests; a later step
    samples their prompts first."""


# ----------------------------------------------------------------------------------------------------------------- data
class ColumnOptions(Options):
    """Column names of a data set."""

    problem: str
    """Column of the problem's text."""
    answer: str
    """Column of the reference answer."""
    solution: str | None = None
    """Column of a worked solution; `rollout.engine: demonstrations` trains on it."""


class DatasetOptions(Options):
    path: str
    """Hub id, or a .json, .jsonl or .parquet file."""
    name: str | None = None
    """Name in metrics and prompt ids; null uses the name of the preset or the file."""
    subset: str | None = None
    """Configuration name of a hub data set (`main` of openai/gsm8k)."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set. Pin it to keep the rows fixed."""
    split: str = "train"
    """Split of a hub data set or a folder; unused for a file."""
    preset: Literal["deepscaler", "gsm8k", "math500", "aime", "amc23", "beyondaime"] | None = None
    """Predefined column names of a known data set. Set exactly one of `preset` and `columns`."""
    columns: ColumnOptions | None = None
    """Column names. Set exactly one of `preset` and `columns`."""
    limit: PositiveInt | None = None
    """Number of rows to use, from the first; null uses all."""


class DataOptions(Options):
    train: DatasetOptions
    """Training data."""
    prompt_suffix: str = r"Please reason step by step, and put your final answer within \boxed{}."
    """Text appended to each problem after a space; the default is the paper's. Empty for none."""
    system_prompt: str | None = None
    """System message of the chat template; null for none."""
    chat_template_args: dict[str, str | bool | int] = Field(default_factory=dict)
    """More variables for the chat template (Qwen3: `enable_thinking: false`)."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum prompt length, in tokens. Longer prompts are dropped and counted."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, seeded by run.seed."""
    shuffle_labels: bool = False
    """Permute the labels of each step at random. A control experiment: the policy must not improve."""


class BatchOptions(Options):
    prompts_per_step: PositiveInt
    """Number of prompts per step (one rollout batch)."""
    samples_per_prompt: PositiveInt
    """Number of responses per prompt: the group size G."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates per step. Each uses an equal share of the groups."""
    tokens_per_microbatch: PositiveInt
    """Token budget of a micro-batch on one data-parallel rank. It must fit the longest sample."""


# ---------------------------------------------------------------------------------------------- optimizer, loop, output
class OptimizerOptions(Options):
    lr: float = Field(gt=0)
    """Peak learning rate of Adam."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    warmup_updates: int = Field(default=0, ge=0)
    """Number of updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from lr to min_lr after the warm-up, over the updates of the run."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay rate of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's decay rate of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""


class EvaluationOptions(Options):
    benchmarks: tuple[DatasetOptions, ...] = Field(default=(), strict=False)
    """Data sets to evaluate on."""
    every: PositiveInt | None = None
    """Evaluation interval, in steps. The start and the end are always evaluated; null evaluates only there."""
    samples_per_prompt: PositiveInt = 4
    """Number of responses per problem: n of the unbiased pass@k estimate."""
    k: tuple[int, ...] = Field(default=(1,), strict=False)
    """Values of k to report pass@k for."""
    sampling: SamplingOptions | None = None
    """Sampling of evaluation responses; required with `benchmarks`."""


class CheckpointOptions(Options):
    every: PositiveInt | None = None
    """Save interval, in steps. The end and a stop request always save; null saves only there."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""


class MismatchOptions(Options):
    """Difference of sampler and trainer log-probs for the same tokens and weights."""

    threshold: float = Field(default=0.1, gt=0)
    """Difference in nats above which a token counts in `mismatch/over_frac`."""
    max_abs_mean: float | None = Field(default=None, gt=0)
    """Maximum mean difference of a step, in nats per token. Above it the run saves and stops. About 0.01 is normal in bf16."""


class WandbOptions(Options):
    """Weights & Biases."""

    project: str
    """Project name."""
    entity: str | None = None
    """User or team; null uses the account's default."""


class LoggingOptions(Options):
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbOptions | None = None
    """Log to Weights & Biases. Requires the `wandb` package; the key comes from WANDB_API_KEY."""
    samples_in_report: int = Field(default=8, ge=0)
    """Number of samples in the report."""
    save_rollouts: bool = True
    """Write the samples of each step to rollouts/ as text."""
    save_tokens: bool = False
    """Also write token ids, log-probs and weight versions as arrays. A step can be repeated exactly from them. Eight bytes
    per token."""


class RunOptions(Options):
    name: str
    """Name of the run, its folder and its Slurm job."""
    dir: str = "runs"
    """Parent folder: the run folder is `<dir>/<name>`."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order and sampling."""
    steps: PositiveInt
    """Number of training steps (rollout batches)."""
    nproc: PositiveInt | None = None
    """Number of ranks that `train` starts on this host; null uses tp * pp * cp. Ignored under torchrun or srun."""


class ResourceOptions(Options):
    """Cluster resources of the run. Settings of a site (partition, account, modules) are in configs/clusters/."""

    nodes: PositiveInt = 1
    """Number of trainer nodes."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs per node, with one rank each; 0 runs run.nproc ranks on CPU."""
    gpu: Literal["a100", "h100", "h200", "b200"] | None = None
    """GPU model, for the memory and time estimates of `plan`; required if gpus_per_node > 0."""
    rollout_nodes: int = Field(default=0, ge=0)
    """Number of additional nodes for SGLang servers; 0 if servers run on the trainer nodes or elsewhere."""
    time_limit: str = Field(default="04:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """Time limit of one Slurm job, `[days-]hours:minutes:seconds`. The run resumes in the next job."""
    signal_lead_s: PositiveInt = 300
    """Seconds between the stop signal and the time limit. Must cover an update, a weight sync and a save."""
    max_attempts: PositiveInt = 5
    """Number of consecutive attempts without a new checkpoint after which the job is not requeued."""


class RunConfig(Options):
    """Configuration of a run."""

    run: RunOptions
    """Name, folder, seed and length of the run."""
    resources: ResourceOptions = ResourceOptions()
    """Cluster resources."""
    model: ModelOptions
    """Initial policy."""
    precision: PrecisionOptions = PrecisionOptions()
    """Number formats of training."""
    parallel: ParallelOptions = ParallelOptions()
    """Parallel layout and timeouts of the ranks."""
    objective: ObjectiveOptions
    """Loss function."""
    batch: BatchOptions
    """Batch sizes."""
    rollout: RolloutOptions
    """Rollout engine."""
    reward: RewardOptions | None = None
    """Verifier of responses; required unless `rollout.engine` is `demonstrations`."""
    admission: AdmissionOptions = AdmissionOptions()
    """Selection of samples for training."""
    data: DataOptions
    """Training data and prompts."""
    optimizer: OptimizerOptions
    """Adam and its schedule."""
    evaluation: EvaluationOptions = EvaluationOptions()
    """Benchmarks."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """Checkpoints."""
    mismatch: MismatchOptions = MismatchOptions()
    """Difference of sampler and trainer log-probs."""
    logging: LoggingOptions = LoggingOptions()
    """Outputs of the run."""

    @model_validator(mode="after")
    def _check_objective(self) -> RunConfig:
        if isinstance(self.objective, PacsOptions):
            self.objective.refuse_updates_per_step(self.batch.updates_per_step)
        # `score: naive` uses no siblings, but admission drops groups of one sample too.
        if not isinstance(self.objective, SftOptions) and self.batch.samples_per_prompt < 2:
            raise ValueError(
                f"batch.samples_per_prompt={self.batch.samples_per_prompt}: objective {self.objective.name} compares the "
                "samples of a prompt; use at least 2"
            )
        return self
