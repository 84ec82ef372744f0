"""Checks of combinations of keys. They import neither torch nor a model; each problem is one line.

`find_problems` uses the configuration alone, `layout_problems` also the world size. Checks against the model's shape
are in `models/shape.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from pacs_megatron.config.layout import draws_of, ranks_to_start
from pacs_megatron.config.reward_options import UNIT_REWARDS
from pacs_megatron.config.rollout_options import MAX_SGLANG_STOPS, SglangRollout, SglangServers
from pacs_megatron.config.schema import DatasetOptions, RunConfig
from pacs_megatron.contracts.options import Options
from pacs_megatron.objectives.dapo import DapoOptions
from pacs_megatron.objectives.registry import REGISTRY


def find_problems(config: RunConfig) -> list[str]:
    """Problems of the configuration alone, in the order of the schema."""
    return [problem for check in _CHECKS for problem in check(config)]


def max_sequence_tokens(config: RunConfig) -> int:
    """Maximum length of prompt and response in training, in tokens."""
    return config.data.max_prompt_tokens + max_response_tokens(config)


def max_response_tokens(config: RunConfig) -> int:
    """Maximum response length in training, in tokens."""
    return config.rollout.sampling.max_response_tokens


def layout_problems(config: RunConfig, world_size: int) -> list[str]:
    """Problems of the layout on `world_size` ranks."""
    return list(_layout(config, world_size))


def changed(options: Options) -> list[str]:
    """Options that differ from their default. Presence is no criterion: a resolved copy writes all defaults."""
    fields = type(options).model_fields
    return [name for name, field in fields.items() if getattr(options, name) != field.default]


def seconds_of(time_limit: str) -> int:
    """Seconds of a Slurm time, `[days-]hours:minutes:seconds`."""
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def divisors(number: int) -> list[int]:
    """Divisors up to 4,096, ascending: no parallel size is larger."""
    return [candidate for candidate in range(1, min(number, 4096) + 1) if number % candidate == 0]


def one_of(values: list[int]) -> str:
    """`use one of 1, 2, 4`."""
    return f"use one of {', '.join(str(value) for value in values)}" if len(values) > 1 else f"use {values[0]}"


# ------------------------------------------------------------------------------------------------------ the file alone
def _run(config: RunConfig) -> Iterator[str]:
    run, resources = config.run, config.resources
    if seconds_of(resources.time_limit) <= resources.signal_lead_s:
        yield (
            f"resources.time_limit={resources.time_limit} is not longer than resources.signal_lead_s="
            f"{resources.signal_lead_s}; the stop signal would arrive at the start; raise it"
        )
    if resources.gpus_per_node:
        if run.nproc is not None:
            yield ("run.nproc is not used with resources.gpus_per_node > 0, which starts one rank per GPU; remove it")
        if resources.gpu is None:
            yield ("`resources.gpu` is missing; set it to a100, h100, h200 or b200")
        yield from _layout(config, ranks_to_start(config), key="resources.nodes")
    elif resources.gpu is not None:
        yield ("resources.gpu is not used with resources.gpus_per_node=0; remove it")
    elif run.nproc is not None:
        yield from _layout(config, ranks_to_start(config), key="run.nproc")


def _offload(config: RunConfig) -> Iterator[str]:
    is_on_one_node = config.rollout.starts_servers_on_trainer_gpus and config.resources.nodes == 1
    if config.policy.offload != "none" and not is_on_one_node:
        yield (
            f"policy.offload={config.policy.offload} frees the trainer's GPUs for servers that the run starts on them after "
            "it; set rollout.servers.colocated=true and resources.nodes=1, or policy.offload=none"
        )


def _routing(config: RunConfig) -> Iterator[str]:
    if config.policy.routing != "own" and config.rollout.sglang is None:
        yield (
            f"policy.routing={config.policy.routing} needs rollout.engine=sglang, got {config.rollout.engine}, which returns no "
            "experts; set policy.routing=own"
        )


def _rollout_place(config: RunConfig) -> Iterator[str]:
    resources, rollout = config.resources, config.rollout.sglang
    if rollout is None:
        if resources.rollout_nodes:
            yield (
                f"resources.rollout_nodes={resources.rollout_nodes} needs rollout.engine=sglang, got "
                f"{config.rollout.engine}; set 0"
            )
        return
    if resources.rollout_nodes and rollout.sync.transport == "ipc":
        yield (
            f"rollout.sync.transport=ipc stays on one host, but resources.rollout_nodes={resources.rollout_nodes}; use broadcast "
            "or disk"
        )
    servers = rollout.servers
    yield from _ipc(config, rollout)
    if servers is None:
        return
    if resources.rollout_nodes and servers.colocated:
        yield (
            f"rollout.servers.colocated=true with resources.rollout_nodes={resources.rollout_nodes}: the servers "
            "run on separate nodes; set only one of them"
        )
    on_every_node = servers.colocated and resources.nodes > 1
    if on_every_node:
        yield from _colocated_on_nodes(rollout, servers, resources.nodes)
    if servers.device == "cpu":
        return
    wanted = servers.count * servers.tp
    if resources.rollout_nodes:
        offered, where = resources.rollout_nodes * resources.gpus_per_node, "resources.rollout_nodes * gpus_per_node"
    elif on_every_node:
        offered, where = resources.nodes * resources.gpus_per_node, "resources.nodes * gpus_per_node"
    else:
        offered, where = resources.gpus_per_node, "resources.gpus_per_node"
    if wanted > offered:
        fix = (
            f"use at most {offered // servers.tp} servers"
            if offered >= servers.tp
            else f"use rollout.servers.tp of at most {offered}"
        )
        yield (
            f"rollout.servers.count * tp = {servers.count} * {servers.tp} = {wanted} GPUs, but {where} offers {offered}; "
            f"{fix}"
        )
    elif resources.gpus_per_node and servers.tp > resources.gpus_per_node:
        yield (
            f"rollout.servers.tp={servers.tp}: a server runs on one node with resources.gpus_per_node="
            f"{resources.gpus_per_node}; use at most {resources.gpus_per_node}"
        )
    if resources.rollout_nodes and servers.count % resources.rollout_nodes:
        yield (
            f"rollout.servers.count={servers.count} does not divide over resources.rollout_nodes={resources.rollout_nodes}; "
            f"use a multiple of {resources.rollout_nodes}"
        )


def _ipc(config: RunConfig, rollout: SglangRollout) -> Iterator[str]:
    """A handle of GPU memory can be opened on the same GPU only: each rank sends weights to the servers on its own."""
    if rollout.sync.transport != "ipc":
        return
    servers, resources = rollout.servers, config.resources
    if servers is None and resources.nodes * resources.gpus_per_node > 1:
        yield (
            "rollout.sync.transport=ipc with rollout.urls on several GPUs: the GPU of a server is known for rollout.servers "
            "only; use broadcast or disk, or let the run start the servers"
        )
    if servers is not None and servers.device == "cuda" and not servers.colocated:
        yield (
            "rollout.sync.transport=ipc passes handles of GPU memory, which a server on another GPU cannot open; set "
            "rollout.servers.colocated=true, or use broadcast"
        )


def _colocated_on_nodes(rollout: SglangRollout, servers: SglangServers, nodes: int) -> Iterator[str]:
    """Each node starts its own servers. Rank 0 reaches servers on other nodes by network and files only."""
    if rollout.sync.transport != "disk":
        yield (
            f"rollout.sync.transport={rollout.sync.transport} with rollout.servers.colocated=true on "
            f"resources.nodes={nodes}: ipc works on one host only, and broadcast requires trainer and server on "
            "different GPUs; use disk"
        )
    if servers.count % nodes:
        yield (
            f"rollout.servers.count={servers.count} does not divide over resources.nodes={nodes} with colocated=true; use a "
            f"multiple of {nodes}"
        )
    if servers.visible_devices:
        yield (
            f"rollout.servers.visible_devices with resources.nodes={nodes}: each node assigns its GPUs to its servers; set it "
            "to []"
        )


def _ahead(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout.sglang
    if rollout is None or not rollout.max_staleness:
        return
    is_colocated = rollout.servers is not None and rollout.servers.colocated
    if is_colocated or rollout.shares_gpus:
        key = "servers.colocated" if is_colocated else "shares_gpus"
        yield (
            f"rollout.max_staleness={rollout.max_staleness} with rollout.{key}=true: these servers release their "
            "memory during the training step and cannot sample; set max_staleness=0, or use separate GPUs for the servers"
        )


def _oversample(config: RunConfig) -> Iterator[str]:
    admission = config.admission
    if admission.oversample > 1 and not admission.drop_one_class_groups:
        yield (
            f"admission.oversample={admission.oversample} without admission.drop_one_class_groups=true only biases "
            "training to short responses; set drop_one_class_groups=true or oversample=1"
        )
    if admission.refill_rounds and not (admission.drop_one_class_groups and config.rollout.is_sampled):
        yield (
            f"admission.refill_rounds={admission.refill_rounds} replaces groups that admission.drop_one_class_groups=true "
            "drops from sampled responses; set it with a rollout engine that samples, or refill_rounds=0"
        )


def _no_effect(config: RunConfig) -> Iterator[str]:
    """Settings with which nothing trains the policy, or with which an option has no effect."""
    reward, dapo, limit = config.reward, config.objective, max_response_tokens(config)
    if config.admission.drop_one_class_groups and config.batch.samples_per_prompt == 1:
        yield "admission.drop_one_class_groups=true drops every group of batch.samples_per_prompt=1 sample; set it to false"
    threshold = None if reward is None or reward.name not in UNIT_REWARDS else reward.label_threshold
    if threshold is not None and not 0 < threshold <= 1:
        yield f"reward.label_threshold={threshold:g} gives every reward of 0 or 1 the same label; remove it"
    if isinstance(dapo, DapoOptions) and (dapo.overlong_length or 0) - (dapo.overlong_buffer or 0) >= limit:
        yield (
            f"objective.overlong_length={dapo.overlong_length} - overlong_buffer={dapo.overlong_buffer} is not below "
            f"{response_key(config)}={limit}, so no response is punished; set overlong_length={limit}"
        )


def _precision(config: RunConfig) -> Iterator[str]:
    if config.precision.fp8 is not None and config.precision.dtype != "bf16":
        yield (
            f"precision.dtype={config.precision.dtype} with precision.fp8: FP8 requires bf16; set precision.dtype=bf16"
        )
    if config.precision.fp8 is not None and config.resources.gpu == "a100":
        yield (
            f"precision.fp8 ({config.precision.fp8.recipe}) with resources.gpu=a100, which has no FP8 support; remove "
            "precision.fp8, or use h100, h200 or b200"
        )
    if config.precision.fp8 is not None and not config.resources.gpus_per_node:
        yield ("precision.fp8 requires GPUs, got resources.gpus_per_node=0; set it or remove fp8")


def _parallel(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tp == 1:
        yield ("parallel.sequence_parallel=true requires parallel.tp > 1; disable it or raise parallel.tp")
    if parallel.vpp is not None and parallel.pp == 1:
        yield (f"parallel.vpp={parallel.vpp} requires parallel.pp > 1; remove it or raise parallel.pp")
    recompute = parallel.recompute
    if "num_layers" in changed(recompute) and recompute.granularity != "full":
        yield (
            f"parallel.recompute.num_layers is used by granularity=full only, got {recompute.granularity}; remove it"
        )
    if "modules" in changed(recompute) and recompute.granularity != "selective":
        yield (
            f"parallel.recompute.modules is used by granularity=selective only, got {recompute.granularity}; remove it"
        )


_NEEDS_GPU = ("moe_permute_fusion", "use_precision_aware_optimizer", "gradient_accumulation_fusion", "tp_comm_overlap")
_WITH = {
    "overlap_param_gather": "overlap_grad_reduce",
    "moe_flex_dispatcher_backend": "moe_token_dispatcher_type",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    "exp_avg_sq_dtype": "use_precision_aware_optimizer",
    "optimizer_cpu_offload": "use_precision_aware_optimizer",
    "optimizer_offload_fraction": "optimizer_cpu_offload",
}
_WITH_PARALLEL = {
    "overlap_param_gather": "distributed_optimizer",
    "use_precision_aware_optimizer": "distributed_optimizer",
    "tp_comm_overlap": "sequence_parallel",
}
"""Option of `parallel.megatron` -> the option without which Megatron ignores or rejects it."""


def _megatron(config: RunConfig) -> Iterator[str]:
    parallel, options = config.parallel, config.parallel.megatron
    given = {name: getattr(options, name) for name in changed(options) if getattr(options, name) not in (False, None)}
    for name, value in given.items():
        where = f"parallel.megatron.{name}={value}"
        other = _WITH.get(name)
        if other is not None and getattr(options, other) in (False, "alltoall"):
            yield f"{where} requires parallel.megatron.{other}; set it or remove {name}"
        if name in _NEEDS_GPU and not config.resources.gpus_per_node:
            yield f"{where} requires GPUs, got resources.gpus_per_node=0; remove it"
        other = _WITH_PARALLEL.get(name)
        if other is not None and not getattr(parallel, other):
            yield f"{where} requires parallel.{other}=true; set it or remove {name}"
        if name in _NEEDS_GPU and config.precision.dtype == "fp32":
            yield f"{where} requires precision.dtype=bf16, got fp32; remove it"
    if options.moe_token_dispatcher_type == "flex" and parallel.tp * parallel.ep == 1:  # noqa: S105
        yield "parallel.megatron.moe_token_dispatcher_type=flex requires parallel.ep or parallel.tp > 1; remove it"
    fp8 = config.precision.fp8
    if options.tp_comm_overlap and fp8 is not None and fp8.recipe == "blockwise":
        yield "parallel.megatron.tp_comm_overlap does not combine with precision.fp8.recipe=blockwise; use tensorwise"
    if options.optimizer_cpu_offload and "bf16" in (options.exp_avg_dtype, options.exp_avg_sq_dtype):
        yield "parallel.megatron.optimizer_cpu_offload keeps fp32 moments; remove exp_avg_dtype and exp_avg_sq_dtype"
    if options.optimizer_cpu_offload and config.policy.offload != "none":
        yield (
            f"parallel.megatron.optimizer_cpu_offload does not combine with policy.offload={config.policy.offload}, which "
            "moves the same state; use one of them"
        )


def _batch(config: RunConfig) -> Iterator[str]:
    batch = config.batch
    if batch.updates_per_step > batch.prompts_per_step:
        yield (
            f"batch.updates_per_step={batch.updates_per_step} is more than batch.prompts_per_step="
            f"{batch.prompts_per_step}: an update requires at least one group; use at most {batch.prompts_per_step}"
        )
    longest = max_sequence_tokens(config)
    if batch.tokens_per_microbatch < longest:
        yield (
            f"batch.tokens_per_microbatch={batch.tokens_per_microbatch} is smaller than the longest sample: "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + {response_key(config)}="
            f"{max_response_tokens(config)}; use at least {longest}"
        )
    if "groups" in changed(batch) and REGISTRY[config.objective.name].coupling != "group":
        users = [name for name, objective in REGISTRY.items() if objective.coupling == "group"]
        yield (
            f"batch.groups={batch.groups} is used by objective.name={' | '.join(sorted(users))} only, got "
            f"{config.objective.name}; remove it"
        )
    elif batch.groups == "together" and batch.tokens_per_microbatch < batch.samples_per_prompt * longest:
        yield (
            f"batch.groups=together needs batch.tokens_per_microbatch >= batch.samples_per_prompt * (data."
            f"max_prompt_tokens + {response_key(config)}) = {batch.samples_per_prompt * longest}, got "
            f"{batch.tokens_per_microbatch}; raise it, or use batch.groups=auto"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.rollout.is_sampled and config.rollout.sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0 is greedy: all responses of a group are equal, and log-probs are divided by it; "
            "use a temperature above 0, such as 1.0 (0 is for evaluation.sampling)"
        )


def _strategy(config: RunConfig) -> Iterator[str]:
    name, is_demo = config.objective.name, not config.rollout.is_sampled
    if config.objective.trains_on_demonstrations and not is_demo:
        yield (
            f"rollout.engine={config.rollout.engine} with objective.name={name}: {name} trains on the data's solutions; "
            "set rollout.engine=demonstrations"
        )
    if is_demo and not config.objective.trains_on_demonstrations:
        yield (
            f"rollout.engine=demonstrations with objective.name={name}: it requires sampled responses; set "
            "rollout.engine=embedded or objective.name=sft"
        )
    if is_demo:
        yield from _demonstrations(config)
    elif config.reward is None:
        yield ("`reward` is missing; sampled responses require a verifier: add reward.name, such as math")


def _demonstrations(config: RunConfig) -> Iterator[str]:
    columns = config.data.train.columns
    if columns is not None and columns.solution is None:
        yield ("`data.train.columns.solution` is missing; rollout.engine=demonstrations trains on it: name the column")
    if config.reward is not None and not config.evaluation.benchmarks:
        yield ("`reward` is not used by rollout.engine=demonstrations without benchmarks; remove it")
    if config.data.shuffle_labels:
        yield ("data.shuffle_labels=true: rollout.engine=demonstrations has no labels to shuffle; remove it")
    for name in changed(config.admission):
        yield (f"`admission.{name}` is not used by rollout.engine=demonstrations: nothing is sampled; remove it")


def _datasets(config: RunConfig) -> Iterator[str]:
    yield from _dataset("data.train", config.data.train)
    names: dict[str, int] = {}
    for index, dataset in enumerate(config.evaluation.benchmarks):
        key = f"evaluation.benchmarks.{index}"
        yield from _dataset(key, dataset)
        name = dataset.name or dataset.preset or Path(dataset.path).stem
        if names.setdefault(name, index) != index:
            yield (f"{key}.name={name} is also the name of benchmark {names[name]}; rename it")


def _dataset(key: str, dataset: DatasetOptions) -> Iterator[str]:
    if (dataset.preset is None) == (dataset.columns is None):
        got = "neither" if dataset.preset is None else "both"
        yield (f"{key}: exactly one of `preset` and `columns` must be set, got {got}; set one")


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield (f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}; lower it")
    if optimizer.schedule == "constant" and optimizer.min_lr > 0:
        yield ("optimizer.min_lr is not used by optimizer.schedule=constant; remove it or set a schedule")
    updates = config.run.steps * config.batch.num_updates
    if optimizer.schedule != "constant" and optimizer.warmup_updates >= updates:
        yield (
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves no update for the decay: the run has {updates} "
            f"(run.steps * batch.updates_per_step * batch.epochs); use less than {updates}"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.benchmarks:
        if evaluation.sampling is None:
            yield ("`evaluation.sampling` is missing; benchmarks require it: add max_response_tokens")
        if config.reward is None:
            yield ("`reward` is missing; benchmarks require a verifier: add reward.name, such as math")
        bad: dict[tuple[int, int], str] = {}
        for index, benchmark in enumerate(evaluation.benchmarks):
            num_samples, ks = draws_of(evaluation, benchmark)
            of_k = "" if benchmark.k is None else f"benchmarks.{index}."
            of_n = "" if benchmark.samples_per_prompt is None else f"benchmarks.{index}."
            for k in ks:
                if not 1 <= k <= num_samples:
                    bad[k, num_samples] = (
                        f"evaluation.{of_k}k={k}: pass@k requires 1 <= k <= evaluation.{of_n}samples_per_prompt="
                        f"{num_samples}; lower k or raise evaluation.{of_n}samples_per_prompt"
                    )
        yield from bad.values()
        return
    for name in changed(evaluation):
        yield (f"`evaluation.{name}` is not used without evaluation.benchmarks; add a benchmark or remove the key")


def _stop_strings(config: RunConfig) -> Iterator[str]:
    if config.rollout.sglang is None:
        return
    places = {"rollout.sampling": config.rollout.sampling, "evaluation.sampling": config.evaluation.sampling}
    for place, sampling in places.items():
        if sampling is not None and len(sampling.stop) > MAX_SGLANG_STOPS:
            yield (
                f"{place}.stop has {len(sampling.stop)} strings, but SGLang allows at most {MAX_SGLANG_STOPS}; shorten it"
            )


def response_key(config: RunConfig) -> str:
    """Dotted key of the response limit."""
    return "rollout.sampling.max_response_tokens" if config.rollout.is_sampled else "rollout.max_response_tokens"


_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _run,
    _precision,
    _parallel,
    _megatron,
    _strategy,
    _sampling,
    _rollout_place,
    _offload,
    _routing,
    _ahead,
    _oversample,
    _no_effect,
    _batch,
    _datasets,
    _optimizer,
    _evaluation,
    _stop_strings,
)


# ------------------------------------------------------------------------------------------------------------ with ranks
def _layout(config: RunConfig, world_size: int, key: str = "parallel.tp") -> Iterator[str]:
    parallel = config.parallel
    replica = parallel.tp * parallel.pp * parallel.cp
    product = f"parallel.tp*pp*cp={parallel.tp}*{parallel.pp}*{parallel.cp}={replica}"
    if world_size % replica:
        fix = (
            f"start a multiple of {replica} ranks, or make tp*pp*cp {one_of(divisors(world_size)).removeprefix('use ')}"
        )
        prefix = "" if key.startswith("parallel.") else f"{key}: "
        yield (f"{prefix}{world_size} ranks are not a multiple of {product}; {fix}")
        return
    # With ep > 1 experts are not sharded by tensor parallelism: they are distributed over all ranks of a stage.
    stage_ranks = world_size // parallel.pp
    if stage_ranks % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} does not divide the {stage_ranks} ranks of a pipeline stage ({world_size} ranks, "
            f"pp={parallel.pp}); {one_of(divisors(stage_ranks))}"
        )
    dp = world_size // replica
    groups = config.batch.prompts_per_step // config.batch.updates_per_step
    samples = groups * config.batch.samples_per_prompt
    if samples < dp:
        yield (
            f"an update has {samples} samples (batch.prompts_per_step / updates_per_step * samples_per_prompt) for "
            f"{dp} data-parallel ranks; raise batch.prompts_per_step or use fewer ranks"
        )
