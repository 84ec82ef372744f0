"""Checks of combinations of keys, without torch and without a model (`models/shape.py`); each
problem is one line.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.config.layout import draws_of, ranks_to_start
from pacs_megatron.config.reward_options import UNIT_REWARDS
from pacs_megatron.config.schema import (
    AdmissionOptions,
    DatasetOptions,
    RunConfig,
    TrainOptions,
)
from pacs_megatron.contracts.options import Options
from pacs_megatron.objectives.dapo import DapoOptions
from pacs_megatron.objectives.registry import REGISTRY

_MAX_SGLANG_STOPS = 32
"""Maximum number of stop strings of a request, a limit of SGLang"""


def find_problems(config: RunConfig) -> list[str]:
    """Problems of the configuration alone."""
    problems: list[str] = []
    for check in _CHECKS:
        problems += check(config)
    return problems


def layout_problems(config: RunConfig, world_size: int) -> list[str]:
    """Problems of the layout on `world_size` ranks."""
    return list(_rank_problems(config, world_size))


def _agent_problems(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward is not None and reward.name == "agent" and config.rollout.agents is None:
        yield (
            "reward.name=agent needs rollout.agent, whose function returns the reward; add it, or "
            "use another reward"
        )
    if config.rollout.agents is not None and config.policy.routing != "own":
        yield (
            f"policy.routing={config.policy.routing} needs rollout.agent null: the sampler's "
            "experts of several turns are not recorded"
        )


def max_sequence_tokens(config: RunConfig) -> int:
    """Maximum length of prompt and response in training, in tokens."""
    return config.data.max_prompt_tokens + max_response_tokens(config)


def longest_request(config: RunConfig) -> tuple[int, int]:
    """(prompt, response) limits of the longest request to a server, training or evaluation."""
    prompt_tokens = config.data.max_prompt_tokens
    response_tokens = max_response_tokens(config)
    if config.evaluation.sampling is not None:
        response_tokens = max(response_tokens, config.evaluation.sampling.max_response_tokens)
    return prompt_tokens, response_tokens


def min_server_context(config: RunConfig) -> int:
    """Smallest context length, and KV cache, with which SGLang completes the longest request.

    SGLang 0.5.23 rejects a prompt of max_req_len - 5 or more tokens, and clips a response to
    max_req_len - prompt - 1, where max_req_len is one less than the context and the KV cache
    (managers/utils.py:272, managers/scheduler.py:2714, managers/tp_worker.py:568).
    """
    prompt_tokens, response_tokens = longest_request(config)
    return prompt_tokens + max(response_tokens + 2, 7)


def max_response_tokens(config: RunConfig) -> int:
    """Maximum response length in training, in tokens."""
    return config.rollout.sampling.max_response_tokens


def response_key(config: RunConfig) -> str:
    """Dotted key of the response limit."""
    if config.rollout.is_sampled:
        return "rollout.sampling.max_response_tokens"
    return "rollout.max_response_tokens"


def changed(options: Options) -> list[str]:
    """Options that differ from their default.

    A resolved copy lists all defaults, so presence is not a criterion.
    """
    fields = type(options).model_fields
    return [name for name, field in fields.items() if getattr(options, name) != field.default]


def seconds_of(time_limit: str) -> int:
    """Seconds of a Slurm time, `[days-]hours:minutes:seconds`."""
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def divisors(number: int) -> list[int]:
    """Divisors up to 4,096, the largest parallel size, ascending."""
    return [candidate for candidate in range(1, min(number, 4096) + 1) if number % candidate == 0]


def one_of(values: list[int]) -> str:
    """`use one of 1, 2, 4`."""
    if len(values) == 1:
        return f"use {values[0]}"
    return f"use one of {', '.join(map(str, values))}"


Allowed = int | tuple[str | int | None, ...]
"""Allowed values of an option: a tuple, or a number that the value must exceed."""
Requirement = tuple[str, str, Allowed]
"""(option, option that it requires if it differs from its default, allowed values of that option).
None as an allowed value: the section is absent, or its default is set later.
"""


def _all_require(options: Iterable[str], required: str, allowed: Allowed) -> list[Requirement]:
    return [(option, required, allowed) for option in options]


_SAMPLED = ("embedded", "sglang")
_GROUP_OBJECTIVES = tuple(
    sorted(name for name, objective in REGISTRY.items() if objective.coupling == "group")
)
_ADMISSION = [f"admission.{name}" for name in AdmissionOptions.model_fields]
_MEGATRON = "parallel.megatron"
_FUSED = [
    f"{_MEGATRON}.moe_permute_fusion",
    f"{_MEGATRON}.use_precision_aware_optimizer",
    f"{_MEGATRON}.gradient_accumulation_fusion",
    f"{_MEGATRON}.tp_comm_overlap",
]
_ADAM_OPTIONS = [
    f"{_MEGATRON}.exp_avg_dtype",
    f"{_MEGATRON}.exp_avg_sq_dtype",
    f"{_MEGATRON}.optimizer_cpu_offload",
]
_REQUIREMENTS: list[Requirement] = [
    ("run.nproc", "resources.gpus_per_node", (0,)),
    ("resources.gpu", "resources.gpus_per_node", 0),
    ("precision.fp8", "precision.dtype", ("bf16",)),
    ("precision.fp8", "resources.gpus_per_node", 0),
    ("precision.fp8", "resources.gpu", ("h100", "h200", "b200")),
    ("parallel.sequence_parallel", "parallel.tp", 1),
    ("parallel.vpp", "parallel.pp", 1),
    ("parallel.recompute.modules", "parallel.recompute.granularity", ("selective",)),
    *_all_require(_FUSED, "resources.gpus_per_node", 0),
    *_all_require(_FUSED, "precision.dtype", ("bf16",)),
    (f"{_MEGATRON}.overlap_param_gather", f"{_MEGATRON}.overlap_grad_reduce", (True, None)),
    (f"{_MEGATRON}.overlap_param_gather", "parallel.distributed_optimizer", (True,)),
    (
        f"{_MEGATRON}.moe_flex_dispatcher_backend",
        f"{_MEGATRON}.moe_token_dispatcher_type",
        ("flex",),
    ),
    (f"{_MEGATRON}.tp_comm_overlap", "parallel.sequence_parallel", (True,)),
    (f"{_MEGATRON}.tp_comm_overlap", "precision.fp8.recipe", ("tensorwise", "delayed", None)),
    (f"{_MEGATRON}.use_precision_aware_optimizer", "parallel.distributed_optimizer", (True,)),
    *_all_require(_ADAM_OPTIONS, f"{_MEGATRON}.use_precision_aware_optimizer", (True,)),
    (f"{_MEGATRON}.optimizer_offload_fraction", f"{_MEGATRON}.optimizer_cpu_offload", (True,)),
    (f"{_MEGATRON}.optimizer_cpu_offload", f"{_MEGATRON}.exp_avg_dtype", ("fp32",)),
    (f"{_MEGATRON}.optimizer_cpu_offload", f"{_MEGATRON}.exp_avg_sq_dtype", ("fp32",)),
    (f"{_MEGATRON}.optimizer_cpu_offload", "policy.offload", ("none",)),
    ("policy.routing", "rollout.engine", ("sglang",)),
    ("resources.rollout_nodes", "rollout.engine", ("sglang",)),
    ("resources.rollout_nodes", "rollout.servers.colocated", (False, None)),
    ("rollout.max_staleness", "rollout.servers.colocated", (False, None)),
    ("rollout.max_staleness", "rollout.shares_gpus", (False, None)),
    ("rollout.sync.folder", "rollout.sync.transport", ("disk",)),
    ("rollout.sync.host", "rollout.sync.transport", ("broadcast",)),
    ("rollout.sync.quantize", "rollout.servers.device", ("cuda", None)),
    ("rollout.servers.visible_devices", "rollout.servers.device", ("cuda",)),
    ("batch.groups", "objective.name", _GROUP_OBJECTIVES),
    *_all_require(_ADMISSION, "rollout.engine", _SAMPLED),
    ("admission.oversample", "admission.drop_one_class_groups", (True,)),
    ("admission.refill_rounds", "admission.drop_one_class_groups", (True,)),
    ("admission.resample", "admission.oversample", (1,)),
    ("data.shuffle_labels", "rollout.engine", _SAMPLED),
    ("optimizer.min_lr", "optimizer.schedule", ("linear", "cosine")),
    ("mismatch.score_noise_every", "objective.name", ("pacs",)),
    ("mismatch.max_score_noise", "mismatch.score_noise_every", 0),
    ("mismatch.min_score_snr", "mismatch.score_noise_every", 0),
    ("observability.profile.kind", "resources.gpus_per_node", 0),
    ("observability.profile.servers", "rollout.engine", ("sglang",)),
    ("observability.profile.server_forwards", "observability.profile.servers", (True,)),
]


def _requirement_problems(config: RunConfig) -> Iterator[str]:
    for key, required, allowed in _REQUIREMENTS:
        parent, _, name = key.rpartition(".")
        section = _value_at(config, parent)
        value = getattr(section, name, None)
        if not value or value == type(section).model_fields[name].default:
            continue

        required_value = _value_at(config, required)
        if isinstance(allowed, int):
            is_met = (required_value or 0) > allowed
            expected = f" > {allowed}"
        else:
            is_met = required_value in allowed
            expected = "=" + " | ".join(_text(option) for option in allowed if option is not None)
        if not is_met:
            text = "" if isinstance(value, Options) else f"={_text(value)}"
            yield (
                f"{key}{text} requires {required}{expected}, got {_text(required_value)}; change "
                f"{required}, or remove {key}"
            )


def _value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None where its section is absent."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run_problems(config: RunConfig) -> Iterator[str]:
    run = config.run
    resources = config.resources
    if seconds_of(resources.time_limit) <= resources.signal_lead_s:
        yield (
            f"resources.time_limit={resources.time_limit} is not longer than "
            f"resources.signal_lead_s={resources.signal_lead_s}; the stop signal would arrive at "
            "the start; raise it"
        )
    if resources.gpus_per_node and resources.gpu is None:
        yield "`resources.gpu` is missing; set it to a100, h100, h200 or b200"
    if resources.gpus_per_node or run.nproc is not None:
        key = "resources.nodes" if resources.gpus_per_node else "run.nproc"
        yield from _rank_problems(config, ranks_to_start(config), key)


def _rank_problems(config: RunConfig, world_size: int, key: str = "parallel.tp") -> Iterator[str]:
    """Problems of the layout on `world_size` ranks, a number that comes from `key`."""
    parallel = config.parallel
    replica = parallel.tp * parallel.pp * parallel.cp
    product = f"parallel.tp*pp*cp={parallel.tp}*{parallel.pp}*{parallel.cp}={replica}"
    if world_size % replica:
        sizes = one_of(divisors(world_size)).removeprefix("use ")
        prefix = "" if key.startswith("parallel.") else f"{key}: "
        yield (
            f"{prefix}{world_size} ranks are not a multiple of {product}; start a multiple of "
            f"{replica} ranks, or make tp*pp*cp {sizes}"
        )
        return

    # With ep > 1 experts are not sharded by tensor parallelism: they are distributed over all ranks
    # of a stage.
    stage_ranks = world_size // parallel.pp
    if stage_ranks % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} does not divide the {stage_ranks} ranks of a pipeline "
            f"stage ({world_size} ranks, pp={parallel.pp}); {one_of(divisors(stage_ranks))}"
        )

    dp = world_size // replica
    groups = config.batch.prompts_per_step // config.batch.updates_per_step
    samples = groups * config.batch.samples_per_prompt
    if samples < dp:
        yield (
            f"an update has {samples} samples (batch.prompts_per_step / updates_per_step * "
            f"samples_per_prompt) for {dp} data-parallel ranks; raise batch.prompts_per_step or "
            "use fewer ranks"
        )


def _ipc_problems(config: RunConfig) -> Iterator[str]:
    """Servers that cannot open the trainer's memory."""
    resources = config.resources
    rollout = config.rollout.sglang
    if rollout is None or rollout.sync.transport != "ipc":
        return

    servers = rollout.servers
    are_on_other_gpus = servers is not None and servers.device == "cuda" and not servers.colocated
    # Which of several GPUs an external server uses is not known here.
    num_gpus = resources.nodes * resources.gpus_per_node
    may_be_elsewhere = servers is None and num_gpus > 1 and not rollout.url_ranks
    if resources.rollout_nodes or are_on_other_gpus or may_be_elsewhere:
        can_colocate = are_on_other_gpus and not resources.rollout_nodes
        fix = "set rollout.servers.colocated=true, or " if can_colocate else ""
        yield (
            "rollout.sync.transport=ipc passes handles of one host's memory, which a server on "
            f"another GPU or node cannot open; {fix}use broadcast or disk"
        )


def _offload_problems(config: RunConfig) -> Iterator[str]:
    offload = config.policy.offload
    if offload != "none" and not config.rollout.on_trainer_gpus:
        yield (
            f"policy.offload={offload} requires rollout.servers.colocated=true, got "
            f"{_text(_value_at(config, 'rollout.servers.colocated'))}; change "
            "rollout.servers.colocated, or remove policy.offload"
        )


def _lora_problems(config: RunConfig) -> Iterator[str]:
    """Options that adapters do not combine with."""
    adapters = config.policy.lora
    if adapters is None:
        return
    if adapters.dropout > 0:
        yield (
            f"policy.lora.dropout={adapters.dropout:g} is not supported: the passes of a step "
            "would use other networks, so the scores of unchanged weights would differ from 0; "
            "remove it"
        )
    if config.precision.fp8 is not None:
        yield (
            "policy.lora with precision.fp8 is not supported: a product of FP8 weights and one of "
            "bf16 adapters are not proven to add up; remove one of them"
        )
    second_models = {"ppo": "critic", "distill": "teacher"}
    name = config.objective.name
    if name in second_models:
        yield (
            f"policy.lora with objective.name={name} is not supported: its {second_models[name]} "
            "would be a whole second model, which adapters save; use another objective, or remove "
            "policy.lora"
        )
    if config.parallel.megatron.tp_comm_overlap:
        yield (
            "policy.lora with parallel.megatron.tp_comm_overlap=true is not supported: frozen "
            "layers were never run with it; remove one of them"
        )


def _server_problems(config: RunConfig) -> Iterator[str]:
    """Nodes and GPUs of managed servers."""
    resources = config.resources
    rollout = config.rollout.sglang
    if rollout is None or rollout.servers is None:
        return

    servers = rollout.servers
    key = "resources.rollout_nodes"
    nodes = resources.rollout_nodes
    if not nodes:
        key = "resources.nodes"
        nodes = resources.nodes if servers.colocated else 1
    if servers.count % nodes:
        yield (
            f"rollout.servers.count={servers.count} does not divide over {key}={nodes}; use a "
            f"multiple of {nodes}"
        )

    if servers.colocated and nodes > 1 and rollout.sync.transport == "broadcast":
        yield (
            f"rollout.sync.transport=broadcast with rollout.servers.colocated=true on {key}="
            f"{nodes}: it requires trainer and server on different GPUs; use ipc or disk"
        )
    if servers.colocated and nodes > 1 and servers.visible_devices:
        yield (
            f"rollout.servers.visible_devices with {key}={nodes}: each node assigns its GPUs to "
            "its servers; remove it"
        )

    needed_tokens = min_server_context(config)
    for name in ("context_length", "max_total_tokens"):
        tokens = getattr(servers, name)
        if tokens is not None and tokens < needed_tokens:
            prompt_tokens, response_tokens = longest_request(config)
            yield (
                f"rollout.servers.{name}={tokens}: SGLang shortens a response of "
                f"{response_tokens} tokens to a prompt of data.max_prompt_tokens={prompt_tokens}; "
                f"use at least {needed_tokens}"
            )

    needed_gpus = servers.count * servers.tp
    offered_gpus = nodes * resources.gpus_per_node
    if servers.device == "cuda" and servers.tp > resources.gpus_per_node:
        yield (
            f"rollout.servers.tp={servers.tp}: a server runs on one node with "
            f"resources.gpus_per_node={resources.gpus_per_node}; change one of them"
        )
    elif servers.device == "cuda" and needed_gpus > offered_gpus:
        yield (
            f"rollout.servers.count * tp = {servers.count} * {servers.tp} = {needed_gpus} GPUs, "
            f"but {key} * gpus_per_node = {nodes} * {resources.gpus_per_node} offers "
            f"{offered_gpus}; use at most {offered_gpus // servers.tp} servers"
        )


def _ineffective_options(config: RunConfig) -> Iterator[str]:
    """Settings that prevent training of the policy, or that make another option ineffective."""
    if config.admission.drop_one_class_groups and config.batch.samples_per_prompt == 1:
        yield (
            "admission.drop_one_class_groups=true drops every group of batch.samples_per_prompt=1 "
            "sample; set it to false"
        )

    reward = config.reward
    threshold = None
    if reward is not None and reward.name in UNIT_REWARDS:
        threshold = reward.label_threshold
    if threshold is not None and not 0 < threshold <= 1:
        yield (
            f"reward.label_threshold={threshold:g} gives every reward of 0 or 1 the same label; "
            "remove it"
        )

    if isinstance(config.objective, DapoOptions):
        dapo = config.objective
        limit = max_response_tokens(config)
        unpunished_tokens = (dapo.overlong_length or 0) - (dapo.overlong_buffer or 0)
        if unpunished_tokens >= limit:
            yield (
                f"objective.overlong_length={dapo.overlong_length} - "
                f"overlong_buffer={dapo.overlong_buffer} is not below "
                f"{response_key(config)}={limit}, so no response is punished; set "
                f"overlong_length={limit}"
            )

    parallel = config.parallel
    is_flex = parallel.megatron.moe_token_dispatcher_type == "flex"  # noqa: S105  (no password)
    if is_flex and parallel.tp * parallel.ep == 1:
        yield (
            "parallel.megatron.moe_token_dispatcher_type=flex requires parallel.ep or parallel.tp "
            "> 1; remove it"
        )


def _batch_problems(config: RunConfig) -> Iterator[str]:
    batch = config.batch
    if batch.updates_per_step > batch.prompts_per_step:
        yield (
            f"batch.updates_per_step={batch.updates_per_step} is more than batch.prompts_per_step="
            f"{batch.prompts_per_step}: an update requires at least one group; use at most "
            f"{batch.prompts_per_step}"
        )

    longest = max_sequence_tokens(config)
    if batch.tokens_per_microbatch < longest:
        yield (
            f"batch.tokens_per_microbatch={batch.tokens_per_microbatch} is smaller than the "
            f"longest sample: data.max_prompt_tokens={config.data.max_prompt_tokens} + "
            f"{response_key(config)}={max_response_tokens(config)}; use at least {longest}"
        )

    longest_group = batch.samples_per_prompt * longest
    if batch.groups == "together" and batch.tokens_per_microbatch < longest_group:
        yield (
            "batch.groups=together needs batch.tokens_per_microbatch >= batch.samples_per_prompt "
            f"* (data.max_prompt_tokens + {response_key(config)}) = {longest_group}, got "
            f"{batch.tokens_per_microbatch}; raise it, or use batch.groups=auto"
        )


def _engine_problems(config: RunConfig) -> Iterator[str]:
    """A rollout engine that does not fit the objective, the reward or the data."""
    objective = config.objective
    rollout = config.rollout
    uses_demonstrations = not rollout.is_sampled
    if uses_demonstrations != objective.trains_on_demonstrations:
        fix = "rollout.engine=demonstrations"
        if uses_demonstrations:
            fix = "rollout.engine=embedded or objective.name=sft"
        yield (
            f"rollout.engine={rollout.engine} with objective.name={objective.name}: sft trains on "
            f"the data's solutions, the other objectives on sampled responses; set {fix}"
        )

    if rollout.is_sampled and rollout.sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0 is greedy: all responses of a group are equal, and "
            "log-probs are divided by it; use a temperature above 0, such as 1.0 (0 is for "
            "evaluation.sampling)"
        )
    if rollout.is_sampled and config.reward is None:
        yield (
            "`reward` is missing; sampled responses require a verifier: add reward.name, such as "
            "math"
        )

    for key, dataset in _train_sets(config).items():
        columns = dataset.columns
        if uses_demonstrations and columns is not None and columns.solution is None:
            yield (
                f"`{key}.columns.solution` is missing; rollout.engine=demonstrations trains on it: "
                "name the column"
            )
    has_benchmarks = bool(config.evaluation.benchmarks)
    if uses_demonstrations and config.reward is not None and not has_benchmarks:
        yield "`reward` is not used by rollout.engine=demonstrations without benchmarks; remove it"


def _train_sets(config: RunConfig) -> dict[str, TrainOptions]:
    """Key -> training set."""
    mixed = {f"data.mix.{index}": dataset for index, dataset in enumerate(config.data.mix)}
    return {"data.train": config.data.train, **mixed}


def _dataset_problems(config: RunConfig) -> Iterator[str]:
    train_sets = _train_sets(config)
    benchmarks: dict[str, DatasetOptions] = {}
    for index, benchmark in enumerate(config.evaluation.benchmarks):
        benchmarks[f"evaluation.benchmarks.{index}"] = benchmark

    for key, dataset in {**train_sets, **benchmarks}.items():
        if (dataset.preset is None) == (dataset.columns is None):
            got = "neither" if dataset.preset is None else "both"
            yield f"{key}: exactly one of `preset` and `columns` must be set, got {got}; set one"

    if not config.data.mix and config.data.train.weight != 1:
        yield (
            f"data.train.weight={config.data.train.weight:g} has no effect on the only training "
            "set; add data.mix, or remove the weight"
        )
    # A benchmark may have the name of a training set.
    yield from _name_problems(train_sets)
    yield from _name_problems(benchmarks)


def _name_problems(datasets: Mapping[str, DatasetOptions]) -> Iterator[str]:
    """A name that two of the data sets have."""
    key_of_name: dict[str, str] = {}
    for key, dataset in datasets.items():
        name = dataset.name or dataset.preset or Path(dataset.path).stem
        first_key = key_of_name.setdefault(name, key)
        if first_key != key:
            yield f"{key}.name={name} is also the name of {first_key}; set another name"


def _optimizer_problems(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}; lower it"

    updates = config.run.steps * config.batch.num_updates
    if optimizer.schedule != "constant" and optimizer.warmup_updates >= updates:
        yield (
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves no update for the decay: "
            f"the run has {updates} (run.steps * batch.updates_per_step * batch.epochs); use less "
            f"than {updates}"
        )


def _filter_problems(config: RunConfig) -> Iterator[str]:
    """An importance weight of samples from a filtered distribution.

    The weight is the ratio to the sampler's log-probs, which are those before the filters. The
    samples' own probabilities are higher, and 0 for the tokens that were excluded.
    """
    sampling = config.rollout.sampling
    correction = None
    if getattr(config.objective, "importance", "none") != "none":
        correction = f"objective.importance={_value_at(config, 'objective.importance')}"
    elif getattr(config.objective, "importance_cap", None) is not None:
        correction = f"objective.importance_cap={_value_at(config, 'objective.importance_cap')}"
    if correction is None or not config.rollout.is_sampled or not sampling.has_filter:
        return

    filters = []
    if sampling.top_k > 0:
        filters.append(f"rollout.sampling.top_k={sampling.top_k}")
    if sampling.top_p < 1:
        filters.append(f"rollout.sampling.top_p={sampling.top_p}")
    yield (
        f"{' and '.join(filters)} with {correction}: the importance weight is the ratio to the "
        "sampler's log-probs, which are those before the filter, so it would be wrong by the "
        "filter's probability mass; set top_k=0 and top_p=1, or remove the correction"
    )


def _stop_problems(config: RunConfig) -> Iterator[str]:
    """More stop strings than SGLang takes."""
    if config.rollout.sglang is None:
        return
    samplings = {
        "rollout.sampling": config.rollout.sampling,
        "evaluation.sampling": config.evaluation.sampling,
    }
    for key, sampling in samplings.items():
        if sampling is not None and len(sampling.stop) > _MAX_SGLANG_STOPS:
            yield (
                f"{key}.stop has {len(sampling.stop)} strings, but SGLang allows at most "
                f"{_MAX_SGLANG_STOPS}; shorten it"
            )


def _profile_problems(config: RunConfig) -> Iterator[str]:
    """Steps and ranks to profile that the run does not have."""
    profile = config.observability.profile
    if profile is None:
        return
    last = config.run.steps
    missing = [step for step in profile.steps if step > last]
    if missing:
        yield (
            f"observability.profile.steps contains {missing[0]}, but run.steps={last}; use steps "
            f"from 1 to {last}"
        )

    world_size = ranks_to_start(config)
    is_known = config.resources.gpus_per_node or config.run.nproc is not None
    missing = [rank for rank in profile.ranks if rank >= world_size]
    if is_known and missing:
        yield (
            f"observability.profile.ranks contains {missing[0]}, but the run has {world_size} "
            f"ranks; use ranks from 0 to {world_size - 1}"
        )


def _evaluation_problems(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if not evaluation.benchmarks:
        if "benchmarks" in evaluation.model_fields_set:
            return  # `evaluation.benchmarks=[]` switches off the evaluation of a file
        for name in changed(evaluation):
            yield (
                f"`evaluation.{name}` is not used without evaluation.benchmarks; add a benchmark "
                "or remove the key"
            )
        return

    if evaluation.sampling is None:
        yield "`evaluation.sampling` is missing; benchmarks require it: add max_response_tokens"
    if config.reward is None:
        yield "`reward` is missing; benchmarks require a verifier: add reward.name, such as math"

    for index, benchmark in enumerate(evaluation.benchmarks):
        num_samples, ks = draws_of(evaluation, benchmark)
        section = f"evaluation.benchmarks.{index}"
        k_key = f"{'evaluation' if benchmark.k is None else section}.k"
        is_default = benchmark.samples_per_prompt is None
        samples_key = f"{'evaluation' if is_default else section}.samples_per_prompt"
        for k in ks:
            if not 1 <= k <= num_samples:
                yield (
                    f"{k_key}={k}: pass@k requires 1 <= k <= {samples_key}={num_samples}; lower k "
                    f"or raise {samples_key}"
                )


_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _run_problems,
    _agent_problems,
    _engine_problems,
    _requirement_problems,
    _ipc_problems,
    _offload_problems,
    _lora_problems,
    _server_problems,
    _ineffective_options,
    _batch_problems,
    _dataset_problems,
    _optimizer_problems,
    _filter_problems,
    _stop_problems,
    _profile_problems,
    _evaluation_problems,
)
"""In the order of their messages: the command line shows the first problem."""
