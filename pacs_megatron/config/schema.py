"""Every option of a run: name, type, default and description. No other file defines a default.

Unknown keys are rejected, and so are options that the chosen strategy, a class of a tagged union,
does not use.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.config.rollout_options import RolloutOptions
from pacs_megatron.config.text import Line, PathText, RunName, TimeLimit
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.contracts.options import Options
from pacs_megatron.objectives.registry import ObjectiveOptions

_MAX_SAMPLES_PER_PROMPT = 2**14


class ModelOptions(Options):
    path: PathText
    """Hugging Face folder or hub id, or a converted Megatron checkpoint."""

    trust_remote_code: bool = False
    """Run the Python code shipped with the checkpoint's tokenizer.

    Set it only if you trust the author.
    """


class Fp8Options(Options):
    recipe: Literal["delayed", "tensorwise", "blockwise"]
    """Transformer Engine's scaling recipe."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 number format.

    `hybrid`: e4m3 forward, e5m2 backward. Use `e4m3` with `recipe: blockwise`.
    """

    first_last_layers_bf16: int = Field(default=0, ge=0)
    """Number of layers at each end of the model that stay in bf16."""


class PrecisionOptions(Options):
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of weights and activations. Master weights and optimizer state are always fp32."""

    fp8: Fp8Options | None = None
    """FP8 matrix products. Requires CUDA, Transformer Engine and `dtype: bf16`."""

    head: Literal["bf16", "fp32"] = "bf16"
    """With `dtype: bf16`, precision of the final norm's output and of the logits.

    `fp32` removes most of the noise of a log-prob (docs/numerics.md).
    """


class RecomputeOptions(Options):
    granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `selective` recomputes `modules`, `full` each layer."""

    modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe_act", "moe"], ...] = Field(
        default=("core_attn",), strict=False, min_length=1
    )
    """Parts of a layer that `granularity: selective` recomputes (Megatron's `recompute_modules`).
    """


RECOMPUTED_WITH_TRANSFORMER_ENGINE = {"layernorm", "moe_act"}
"""Megatron-Core recomputes these modules with CheckpointWithoutOutput, which calls Transformer
Engine.
"""


class MegatronOptions(Options):
    """Options of Megatron-Core under Megatron's names.

    An option that is incompatible with the run is an error.
    """

    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks during the last backward pass. null: on with
    CUDA.
    """

    overlap_param_gather: bool | None = None
    """Gather the distributed optimizer's weights during the next forward pass. null: same as
    overlap_grad_reduce.
    """

    gradient_accumulation_fusion: bool | None = None
    """Fuse the addition of a weight's gradient to the fp32 buffer into the GEMM. null: on with
    Transformer Engine's or Apex's kernel.
    """

    moe_permute_fusion: bool | None = None
    """Transformer Engine's fused permutation of tokens. Without it a GPU adds the experts' outputs
    of a token in any order, so two equal passes differ. null: on with Transformer Engine.
    """

    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"  # noqa: S105  (no password)
    """Exchange of tokens between expert-parallel ranks; `flex` requires the package of its backend.
    """

    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = "deepep"
    """Kernels of `moe_token_dispatcher_type: flex`."""

    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with GEMMs.

    Pads micro-batches to `batch.tokens_per_microbatch`.
    """

    use_precision_aware_optimizer: bool = False
    """Keep the fp32 weights in the optimizer, whose moments may be bf16."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of Adam's first moment in GPU memory; checkpoints have fp32."""

    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of Adam's second moment in GPU memory; checkpoints have fp32."""

    optimizer_cpu_offload: bool = False
    """Keep fp32 weights and moments in host memory, and compute their update on the CPU."""

    optimizer_offload_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the weights with `optimizer_cpu_offload`."""

    @model_validator(mode="before")
    @classmethod
    def _reject_incompatible(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, reason in _INCOMPATIBLE_MEGATRON_OPTIONS.items():
                if name in values:
                    raise ValueError(
                        f"{name} does not combine with this project: {reason}; remove it"
                    )
        return values


_INCOMPATIBLE_MEGATRON_OPTIONS = {
    "cuda_graph_impl": "Megatron's graphed attention takes no packed sequences "
    "(transformer_layer.py, _te_cuda_graph_replay)",
    "fp8_param": "weight sync, the frozen reference and checkpoints read the weights in bf16",
    "moe_router_fusion": "the fused top-k ignores routing replay, so passes of a step could use "
    "other experts",
}
"""Option of Megatron-Core -> the reason why the schema does not have it."""


OffloadKind = Literal["none", "optimizer", "all"]
RoutingKind = Literal["own", "replay_sampler"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraOptions(Options):
    """Low-rank adapters: y = W x + alpha / rank * B A x, where only A and B are trained."""

    rank: int = Field(ge=1, le=4096)
    """Rows of A and columns of B."""

    alpha: float = Field(gt=0)
    """Factor of the adapters' term, over the rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before A. Only 0 is supported."""

    targets: tuple[LoraTarget, ...] = Field(default=LORA_TARGETS, strict=False, min_length=1)
    """Hugging Face's names of the modules with adapters. Experts have none."""

    path: PathText | None = None
    """Folder of PEFT (`adapter_model.safetensors`) with the first values of the adapters.

    null: as PEFT, A is random and B is 0.
    """

    @field_validator("targets")
    @classmethod
    def _in_order(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError(f"expected each module once, got {', '.join(targets)}; correct it")
        return tuple(target for target in LORA_TARGETS if target in targets)


class PolicyOptions(Options):
    lora: LoraOptions | None = None
    """Train low-rank adapters in place of all weights; null trains all weights."""

    offload: OffloadKind = "none"
    """State of the trainer that moves to pinned host memory while colocated servers sample.
    `optimizer`: fp32 weights and moments; the gradients are freed. `all`: also the weights.
    """

    routing: RoutingKind = "own"
    """Experts of a sample's tokens in training.

    `own`: the policy's experts at the step's start. `replay_sampler`: SGLang's experts; its servers
    need `--enable-return-routed-experts`.
    """


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
    """Shard activations outside attention and MLP along the sequence, over the tensor-parallel
    ranks.
    """

    distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks."""

    recompute: RecomputeOptions = RecomputeOptions()
    """Activation recomputation."""

    megatron: MegatronOptions = MegatronOptions()
    """Options of Megatron-Core under Megatron's names."""

    control_timeout_s: float = Field(default=7200.0, gt=0)
    """Timeout of one phase of the driver, such as a rollout, in seconds."""

    hang_timeout_s: float = Field(default=1500.0, gt=0)
    """Seconds without progress after which a rank writes all stacks and ends the job with exit code
    70. Must be less than NCCL's timeout (1,800 s) and more than the longest update, checkpoint or
    embedded generation.
    """


Truncated = Literal["label0", "judge", "drop"]


class ResampleOptions(Options):
    """Further samples of difficult prompts within a step (DARS, arXiv:2508.13755).

    After the samples of a step are judged, a prompt with fewer than half of them correct gets
    further ones, which join its group.
    """

    schedule: Literal["equal", "hardness"]
    """Number of further samples.

    `equal`: every prompt with an accuracy below 1/2 has the same summed advantages; `hardness`: a
    more difficult one has more, up to twice.
    """
    max_samples: PositiveInt = Field(
        default_factory=lambda options: 32 if options["schedule"] == "equal" else 64
    )
    """Largest number of samples of a prompt; default 32, with `hardness` 64."""
    by_std: bool = False
    """Count advantages that are divided by the group's standard deviation."""


class AdmissionOptions(Options):
    truncated: Truncated = "label0"
    """Handling of truncated responses.

    `label0` keeps them with label 0. `judge` keeps them with the verifier's label, as the authors'
    code does. `drop` removes them. Evaluation counts them as wrong, unless `judge` is set.
    """

    drop_one_class_groups: bool = False
    """Drop groups whose labels are all equal (dynamic sampling)."""

    oversample: float = Field(default=1.0, ge=1)
    """Factor of over-sampling, with `drop_one_class_groups`.

    A step requests `oversample * batch.prompts_per_step` prompts, trains on the first admitted
    groups and cancels the other requests; a later step samples their prompts first.
    """

    refill_rounds: int = Field(default=0, ge=0)
    """Maximum number of refill rounds of a step, with `drop_one_class_groups` (DAPO's dynamic
    sampling). While groups are missing, a round requests `oversample` times as many new prompts.
    """

    resample: ResampleOptions | None = None
    """Further samples of difficult prompts (DARS); null: none."""

    max_idle_steps: PositiveInt | None = 10
    """Number of steps from the start of the run that may train nothing, because all groups are
    dropped or all gradients are 0. Then the run stops; null: it does not.
    """


class ColumnOptions(Options):
    """Column names of a data set."""

    problem: Line
    """Column of the problem: a text, or a conversation of one user's turn.

    A name with dots is a place inside a column, such as `reward_model.ground_truth` or
    `messages.0.content`; also in `answer`, `solution`, `extra_columns` and `where`.
    """

    answer: Line
    """Column of the reference answer."""

    solution: Line | None = None
    """Column of a worked solution; `rollout.engine: demonstrations` trains on it."""


Preset = Literal[
    "deepscaler",
    "gsm8k",
    "math500",
    "aime",
    "amc23",
    "beyondaime",
    "gpqa",
    "apps",
    "livecodebench",
]


_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class RowCondition(Options):
    """The values of a column that rows to use have: `min`, `max` or both, or `one_of`."""

    min: int | float | str | None = None
    """Least value: a number, or a day as `2024-07-01`."""

    max: int | float | str | None = None
    """Greatest value, which rows may have: a number, or a day."""

    one_of: tuple[str | int | bool, ...] | None = Field(default=None, strict=False, min_length=1)
    """The values, in place of `min` and `max`."""

    @field_validator("min", "max")
    @classmethod
    def _check_day(cls, bound: int | float | str | None) -> int | float | str | None:
        if isinstance(bound, str):
            try:
                is_day = bool(_DAY.fullmatch(bound) and date.fromisoformat(bound))
            except ValueError:
                is_day = False
            if not is_day:
                raise ValueError(
                    f"expected a number or a day, such as 2024-07-01, got {bound!r}; correct it"
                )
        return bound

    @model_validator(mode="after")
    def _check_bounds(self) -> RowCondition:
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        if bool(bounds) == (self.one_of is not None):
            raise ValueError("expected `min`, `max` or both, or `one_of` alone; correct it")
        if len(bounds) == 2:
            if isinstance(self.min, str) != isinstance(self.max, str):
                raise ValueError(
                    f"min={self.min!r} and max={self.max!r} are a number and a day; correct one"
                )
            if self.min > self.max:  # type: ignore[operator]
                raise ValueError(f"min={self.min} is above max={self.max}; swap them")
        return self


class DatasetOptions(Options):
    path: PathText
    """Hub id, a .json, .jsonl or .parquet file, or such a file of the hub:
    `hf://datasets/OWNER/NAME/FILE`.
    """

    more_paths: tuple[PathText, ...] = Field(default=(), strict=False)
    """Further files with the same columns, read after the file `path`."""

    name: RunName | None = None
    """Name in metrics and prompt ids; null uses the name of the preset or the file."""

    subset: Line | None = None
    """Configuration name of a hub data set (`main` of openai/gsm8k)."""

    revision: Line | None = None
    """Commit, tag or branch of a hub data set. Pin it to keep the rows fixed."""

    split: Line = "train"
    """Split of a hub data set or a folder; unused for a file."""

    preset: Preset | None = None
    """Column names of a known data set; `apps` and `livecodebench` need `reward.name: code`."""

    columns: ColumnOptions | None = None
    """Column names, in place of `preset`."""

    extra_columns: tuple[Line, ...] = Field(default=(), strict=False)
    """Further columns for the reward function (`sample.extra`) and the rollout files."""

    where: dict[Line, RowCondition] = Field(default_factory=dict)
    """Column -> its values in the rows to use, such as `contest_date: {min: 2024-07-01}`. A row is
    used if all columns match; the others are counted. Empty uses all rows.
    """

    limit: PositiveInt | None = None
    """Number of rows to use, from the first that match `where`; null uses all."""

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` and `more_paths`."""
        return (self.path, *self.more_paths)


class TrainOptions(DatasetOptions):
    """A data set to train on."""

    weight: float = Field(default=1.0, gt=0, le=1e9)
    """With `data.mix`: the share of this data set in the prompts is its weight / sum of the
    weights.
    """


PAPER_SUFFIX = r"Please reason step by step, and put your final answer within \boxed{}."
MATHEMATICS = ("deepscaler", "gsm8k", "math500", "aime", "amc23", "beyondaime")
"""Presets whose problems end in an answer to box"""


class DataOptions(Options):
    train: TrainOptions
    """Training data."""

    mix: tuple[TrainOptions, ...] = Field(default=(), strict=False)
    """Further training sets, mixed with `train`: every step has each set's share of the prompts, as
    exactly as whole prompts allow. Each set has its own epochs.
    """

    prompt_suffix: str | None = None
    """Text appended to each problem after a space, also of the benchmarks; empty for none.

    null: the paper's (`Please reason step by step, and put your final answer within \\boxed{}.`) if
    all training sets have the preset of a set of mathematics, none for other data.
    """

    system_prompt: str | None = None
    """System message of the chat template; null for none."""

    chat_template_args: dict[str, str | bool | int] = Field(default_factory=dict)
    """More variables for the chat template (Qwen3: `enable_thinking: false`)."""

    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a training prompt, in tokens. Longer ones are dropped and counted.

    Benchmarks have all problems that fit into the model's context.
    """

    max_dropped_frac: float = Field(default=0.1, ge=0, le=1)
    """Maximum share of a data set's rows that are dropped because a prompt or a demonstration is
    too long. More is an error.
    """

    shuffle: bool = True
    """Shuffle the prompts in each epoch, seeded by run.seed."""

    shuffle_labels: bool = False
    """Permute the labels of each step at random, with their rewards: a control, in which the policy
    must not improve.
    """

    @model_validator(mode="before")
    @classmethod
    def _set_suffix(cls, values: Any) -> Any:
        """Writes the suffix that null stands for, so that the run's file has it."""
        if not isinstance(values, dict) or values.get("prompt_suffix") is not None:
            return values
        mix = values.get("mix")
        sets = [values.get("train"), *(mix if isinstance(mix, list | tuple) else ())]
        are_mathematics = all(_preset(each) in MATHEMATICS for each in sets)
        return values | {"prompt_suffix": PAPER_SUFFIX if are_mathematics else ""}

    @property
    def train_sets(self) -> tuple[TrainOptions, ...]:
        """`train` and `mix`."""
        return (self.train, *self.mix)

    @field_validator("chat_template_args")
    @classmethod
    def _reject_reserved(
        cls, arguments: dict[str, str | bool | int]
    ) -> dict[str, str | bool | int]:
        reserved = sorted(_RESERVED_TEMPLATE_ARGUMENTS & arguments.keys())
        if reserved:
            raise ValueError(f"{reserved[0]} is set by this program; remove it")
        return arguments


def _preset(dataset: Any) -> str | None:
    """The preset of a data set that is not validated yet."""
    preset = (
        dataset.get("preset") if isinstance(dataset, dict) else getattr(dataset, "preset", None)
    )
    return preset if isinstance(preset, str) else None


_RESERVED_TEMPLATE_ARGUMENTS = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "strftime_now",
}
"""Arguments of transformers' `apply_chat_template`, and variables of the template that it sets."""


class BatchOptions(Options):
    prompts_per_step: PositiveInt
    """Number of prompts per step (one rollout batch)."""

    samples_per_prompt: int = Field(gt=0, le=_MAX_SAMPLES_PER_PROMPT)
    """Number of responses per prompt: the group size G."""

    updates_per_step: PositiveInt = 1
    """Optimizer updates per step and epoch. Each uses an equal share of the groups."""

    epochs: PositiveInt = 1
    """Number of passes over the samples of a step, in the same order.

    Each has `updates_per_step` updates.
    """

    tokens_per_microbatch: PositiveInt
    """Token budget of a micro-batch on one data-parallel rank. It must fit the longest sample."""

    groups: Literal["together", "apart", "auto"] = "auto"
    """PACS and REAL need the scores of a whole group before the backward pass.

    `together`: each group is in one micro-batch, whose forward computes them. `apart`: a score
    pass. `auto`: `together` if budget and balance permit.
    """

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step."""
        return self.updates_per_step * self.epochs

    def updates_of(self, minibatch: int) -> range:
        """The updates of a step that use this mini-batch, one per epoch."""
        return range(minibatch, self.num_updates, self.updates_per_step)


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
    """Decoupled weight decay of matrices; norms and biases have none."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay rate of the first moment."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's decay rate of the second moment."""

    adam_eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""


class BenchmarkOptions(DatasetOptions):
    """A data set to evaluate on."""

    samples_per_prompt: int | None = Field(default=None, gt=0, le=_MAX_SAMPLES_PER_PROMPT)
    """Number of responses per problem of this benchmark; null uses evaluation.samples_per_prompt.
    """

    k: tuple[int, ...] | None = Field(default=None, strict=False, min_length=1)
    """Values of k of this benchmark; null uses evaluation.k."""

    choice_orders: int = Field(default=1, ge=1, le=64)
    """With `preset: gpqa`: number of random orders of the choices in which each problem occurs.

    `eval` counts their responses as one problem's. An evaluation inside a run counts each order as
    a problem, which has the same pass@1.
    """

    @model_validator(mode="after")
    def _check_choices(self) -> BenchmarkOptions:
        if self.choice_orders > 1 and self.preset != "gpqa":
            raise ValueError(
                f"choice_orders={self.choice_orders} is for preset: gpqa, which has choices; "
                "remove it"
            )
        return self


class EvaluationOptions(Options):
    benchmarks: tuple[BenchmarkOptions, ...] = Field(default=(), strict=False)
    """Data sets to evaluate on."""

    every: PositiveInt | None = None
    """Evaluation interval, in steps.

    The start and the end are always evaluated; null evaluates only there.
    """

    samples_per_prompt: int = Field(default=4, gt=0, le=_MAX_SAMPLES_PER_PROMPT)
    """Number of responses per problem: n of the unbiased pass@k estimate."""

    k: tuple[int, ...] = Field(default=(1,), strict=False, min_length=1)
    """Values of k to report pass@k for."""

    sampling: SamplingOptions | None = None
    """Sampling of evaluation responses; required with `benchmarks`."""


class CheckpointOptions(Options):
    every: PositiveInt | None = None
    """Save interval, in steps; null saves only at the end and at a stop request."""

    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    async_save: bool | None = None
    """Write the files while the next step runs, from a copy in host memory; null: on with CUDA."""


class MismatchOptions(Options):
    """Limits of log-prob differences for the same tokens and weights, above which the run stops
    (docs/metrics.md).
    """

    threshold: float = Field(default=0.1, gt=0)
    """Difference in nats above which a token counts in `mismatch/over_frac`."""

    max_abs_mean: float | None = Field(default=None, gt=0)
    """Maximum mean |difference| of sampler and trainer in a step, in nats per token.

    About 0.01 is normal in bf16.
    """

    max_kl: float | None = Field(default=None, gt=0)
    """Maximum `mismatch/kl` of a step, in nats per token."""

    max_over_frac: float | None = Field(default=None, gt=0, lt=1)
    """Maximum share of a step's tokens above `threshold`."""

    score_noise_every: PositiveInt | None = None
    """Steps between measurements of `pacs/score_noise`, in which four groups are scored in two
    packings; null disables them.
    """

    max_score_noise: float | None = Field(default=None, gt=0)
    """Maximum `pacs/score_noise`, in units of psi."""

    min_score_snr: float | None = Field(default=None, gt=0)
    """Minimum `pacs/score_snr`."""


class WandbOptions(Options):
    """Weights & Biases. WANDB_API_KEY and WANDB_ENTITY in the environment set the key and the
    team.
    """

    project: Line
    """Project name."""


class LoggingOptions(Options):
    tensorboard: bool = True
    """Write TensorBoard event files."""

    wandb: WandbOptions | None = None
    """Log to Weights & Biases. Requires the `wandb` package, and WANDB_API_KEY."""

    step_start_entropy: bool = False
    """Report `policy/entropy_step_start`, the entropy over all admitted responses with the weights
    at the start of the step. Costs a forward pass over each mini-batch that needs no log-prob pass.
    """

    save_tokens: bool = False
    """Write token ids, log-probs and weight versions as arrays, to repeat a step exactly: eight
    bytes per token.
    """


class ProfileOptions(Options):
    """A profile of some steps, written to `profile/` of the run folder."""

    steps: tuple[PositiveInt, ...] = Field(strict=False, min_length=1)
    """Steps to profile, each in its own file."""

    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), strict=False, min_length=1)
    """Ranks to profile."""

    kind: Literal["torch", "nsys", "memory"] = "torch"
    """`torch`: a trace of torch.profiler for Perfetto or TensorBoard. `nsys`: NVTX ranges and a
    capture range for a run under `nsys profile`. `memory`: a snapshot of CUDA's allocator.
    """

    servers: bool = False
    """Also profile the SGLang servers while they sample these steps."""

    server_forwards: PositiveInt = 100
    """Number of forward passes after which the profile of a server ends, which limits its file."""


class ObservabilityOptions(Options):
    profile: ProfileOptions | None = None
    """Profile of some steps; null: none."""

    step_times: bool | None = None
    """Log a line a step (shares of the phases, MFU, tokens/s of a GPU) and record the seconds of
    every rank, for the report. null: on with `profile`.
    """


class RunOptions(Options):
    name: RunName
    """Name of the run, its folder and its Slurm job."""

    dir: PathText = "runs"
    """Parent folder: the run folder is `<dir>/<name>`."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of data order and sampling."""

    steps: int = Field(gt=0, le=10**9)
    """Number of training steps (rollout batches)."""

    nproc: PositiveInt | None = None
    """Number of ranks that `train` starts on this host; null uses tp * pp * cp.

    Ignored under torchrun or srun.
    """


class ResourceOptions(Options):
    """Cluster resources of the run.

    Settings of a site (partition, account, modules) are in configs/clusters/.
    """

    nodes: PositiveInt = 1
    """Number of trainer nodes."""

    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs per node, with one rank each; 0 runs run.nproc ranks on CPU."""

    gpu: Literal["a100", "h100", "h200", "b200"] | None = None
    """GPU model, for the memory and time estimates of `plan`; required if gpus_per_node > 0."""

    rollout_nodes: int = Field(default=0, ge=0)
    """Number of additional nodes for SGLang servers; 0 if servers run on the trainer nodes or
    elsewhere.
    """

    time_limit: TimeLimit = "04:00:00"
    """Time limit of one Slurm job, `[days-]hours:minutes:seconds`. The run resumes in the next job.
    """

    signal_lead_s: PositiveInt = 300
    """Seconds between the stop signal and the time limit.

    Must cover an update, a weight sync and a save.
    """

    max_attempts: PositiveInt = 5
    """Number of consecutive attempts without a new checkpoint after which the job is not requeued.
    """


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

    policy: PolicyOptions = PolicyOptions()
    """Memory of the trained model."""

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

    observability: ObservabilityOptions = ObservabilityOptions()
    """Where the time of a step goes."""

    @model_validator(mode="after")
    def _check_objective(self) -> RunConfig:
        self.objective.check_updates_per_step(self.batch.num_updates)
        resample = self.admission.resample
        if resample is not None and resample.max_samples <= self.batch.samples_per_prompt:
            raise ValueError(
                f"admission.resample.max_samples={resample.max_samples} leaves no further samples "
                f"beside batch.samples_per_prompt={self.batch.samples_per_prompt}; raise it"
            )
        if self.objective.compares_siblings and self.batch.samples_per_prompt < 2:
            raise ValueError(
                f"batch.samples_per_prompt={self.batch.samples_per_prompt}: objective "
                f"{self.objective.name} compares the samples of a prompt; use at least 2"
            )
        return self
