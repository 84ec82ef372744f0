"""`preflight`: checks a run before it is queued; each result line is ok, warn or fail, with key and
fix.

On a login node it checks the configuration, the files and the software. Inside a job (`srun
pacs-megatron preflight`) all ranks take part, and it also checks equality and connections between
nodes.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint.hf_folder import HfFolder, check_names
from pacs_megatron.checkpoint.manifest import check_files, read_manifest
from pacs_megatron.checkpoint.names import CHECKPOINTS_FOLDER, MANIFEST_NAME, whole_checkpoints
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.config.schema import DatasetOptions, TrainOptions, WandbOptions
from pacs_megatron.config.text import local_path
from pacs_megatron.contracts.samples import Prompt
from pacs_megatron.data import PromptSet, end_tokens, load_prompts, load_tokenizer
from pacs_megatron.data.notices import check_dropped, notices, shared_notices
from pacs_megatron.data.tokenizer import EndTokens
from pacs_megatron.errors import PacsError
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.writers import check_wandb
from pacs_megatron.rollout.requests import max_benchmark_prompt
from pacs_megatron.rollout.run_prompts import first_time
from pacs_megatron.rollout.train_data import load_train
from pacs_megatron.runtime.files import GIB, read_rows
from pacs_megatron.runtime.run_folder import METRICS_FILE, changed_since, run_folder
from pacs_megatron.runtime.waiting import quiet
from pacs_megatron.workbench.evaluation.preview import Unverified, check_gold
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.known_models import find_spec
from pacs_megatron.workbench.plan.plan import Plan, make_plan
from pacs_megatron.workbench.preflight.agents import check_agents
from pacs_megatron.workbench.preflight.check import Check, Level, attempt, judged
from pacs_megatron.workbench.preflight.host import (
    check_cluster,
    check_folders,
    check_free_space,
    check_gpus,
    check_memory,
    check_network_settings,
    check_ports,
    check_software,
)
from pacs_megatron.workbench.preflight.servers import check_servers

NUM_GOLD = 32
"""Number of gold answers that the reward must verify."""
_FULL_FRAC = 0.95
"""Share of the GPU's memory above which a plan gets a warning"""
_SIGNAL_MARGIN = 1.5
"""Seconds before the time limit over the needed ones, below which the signal gets a warning"""

local_model = partial(model_folder, local_files_only=True)


def run_preflight(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cluster: Path | None = None,
    start_servers: bool = True,
) -> list[Check]:
    """Runs all checks in order and returns their results.

    Args:
        path: of the configuration.
        overrides: `key=value` each.
        cluster: a cluster file, if it is to be checked too.
        start_servers: whether to start a server, or to send a request to each url.

    Returns:
        A single result if the configuration does not load.
    """
    try:
        loaded = load_config(path, overrides)
    except PacsError as error:
        return [Check("fail", "configuration", str(error))]
    checks = [Check("ok", "configuration", f"{path} loads")]
    try:
        plan = _find_plan(loaded)
    except PacsError as error:
        return [*checks, Check("fail", "parallel", str(error))]

    checks += _plan(plan)
    checks += check_software(loaded)
    checks += check_gpus(loaded)
    if loaded.config.logging.wandb is not None:
        checks.append(attempt("logging.wandb", partial(_can_log, loaded.config.logging.wandb)))
    with offline():
        checks += _model_and_data(loaded)
    checks += check_folders(loaded)
    checks += check_ports(loaded)
    checks += check_network_settings(loaded)
    if cluster is not None:
        checks += check_cluster(cluster)
    checks += _resume(loaded)
    if plan is not None:
        checks += check_free_space(loaded, plan)
        checks += check_memory(loaded, plan)
        checks += _signal(loaded, plan)

    # Last, because it takes the longest; no server is started if another check failed.
    failed = any(check.level == "fail" for check in checks)
    model_dir = None if failed else local_model(loaded.config.model.path)
    checks += check_servers(loaded, model_dir, start=start_servers)
    return checks


def render(checks: Sequence[Check], *, as_json: bool) -> str:
    """One line per check and the counts, or JSON."""
    if as_json:
        return json.dumps([asdict(check) for check in checks], indent=2)
    levels = [check.level for check in checks]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "fail"))
    return "\n".join([*(str(check) for check in checks), counts])


@contextmanager
def stdout_for_the_report() -> Iterator[None]:
    """Redirects output of plug-ins and their processes to stderr: stdout is for the report, which
    may be JSON.
    """
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


@contextmanager
def offline() -> Iterator[None]:
    """Makes the Hugging Face libraries read their caches without network access, as in the jobs."""
    import datasets
    from huggingface_hub import constants as hub

    hub_before = hub.HF_HUB_OFFLINE
    datasets_before = datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = hub_before
        datasets.config.HF_HUB_OFFLINE = datasets_before


# ---------------------------------------------------------------------------------------- the plan
def _find_plan(loaded: LoadedConfig) -> Plan | None:
    """The plan; None for a model that `plan` does not know or cannot read.

    Raises ConfigError for an invalid layout.
    """
    spec = None
    with suppress(PacsError, OSError):  # `_read_model` reports the reason
        spec = find_spec(loaded.config.model.path)
    return None if spec is None else make_plan(loaded)


def _plan(plan: Plan | None) -> Iterator[Check]:
    """Whether the run fits on its GPUs."""
    if plan is None or plan.gpu is None:
        return
    peak_bytes = plan.peak.total
    share = peak_bytes / plan.gpu.memory_bytes
    message = (
        f"{peak_bytes / GIB:.1f} GiB of {plan.gpu.memory_gib} GiB on a {plan.gpu.name} "
        f"({share:.0%}), planned"
    )
    if plan.may_fit:
        is_safe = plan.fits and share <= _FULL_FRAC
        yield judged("resources.gpu", is_safe, message, otherwise="warn")
    else:
        fix = "`pacs-megatron plan` lists what to change"
        yield Check("fail", "resources.gpu", f"does not fit: {message}", fix)


def _can_log(wandb: WandbOptions) -> str:
    check_wandb(wandb)
    return f"project {wandb.project}"


# ---------------------------------------------------------------------------------- model and data
def _model_and_data(loaded: LoadedConfig) -> list[Check]:
    """Model, tokenizer, data sets and reward."""
    model = loaded.config.model
    checks = [attempt("model.path", partial(_read_model, model.path))]
    if checks[0].level == "fail":
        message = "not checked: they need the model's tokenizer"
        return [*checks, Check("warn", "data, reward", message)]
    checks += _tokenizer(loaded)
    for key, path in loaded.config.objective.other_models.items():
        checks.append(attempt(key, partial(_read_model, path)))
    checks += _data(loaded)
    checks += _reward(loaded)
    # A tokenizer that cannot be read has its own line.
    if checks[1].level == "ok":
        checks += check_agents(loaded, local_model(model.path))
    return checks


def _read_model(path: str) -> str:
    """The result for a Megatron checkpoint or a Hugging Face folder with all tensors.

    Raises PacsError if files or tensors are missing.
    """
    checkpoint = local_path(path)
    if (checkpoint / MANIFEST_NAME).is_file():
        check_files(checkpoint, read_manifest(checkpoint), digests=False)
        return f"{path}: a Megatron checkpoint, {load_spec(local_model(path)).family}"
    folder = HfFolder(local_model(path))
    table = weight_table(load_spec(folder.path))
    check_names(folder, table)
    return f"{folder.path}: {len(folder.names)} tensors, {table.num_parameters:,} parameters"


def _tokenizer(loaded: LoadedConfig) -> Iterator[Check]:
    """Whether the tokenizer fits the model, and its chat template the stop tokens."""
    key = "model.path (tokenizer)"
    model = loaded.config.model
    ends: EndTokens | None = None
    text_of: Callable[[int], object] = str

    def read() -> str:
        nonlocal ends, text_of
        folder = local_model(model.path)
        tokenizer = load_tokenizer(str(folder), model.trust_remote_code)
        if not tokenizer.chat_template:
            raise PacsError(f"{folder} has no chat template; use the one of an instruct model")
        ends = end_tokens(tokenizer, str(folder))
        text_of = tokenizer.convert_ids_to_tokens
        _check_vocabulary(folder, tokenizer, ends.stops)
        return f"chat template, stops at {', '.join(map(str, ends.stops))}"

    yield attempt(key, read)
    if ends is None:
        return
    end = f"{text_of(ends.end)!r} ({ends.end})"
    if ends.template is None:
        yield Check(
            "warn",
            "model.path (stop tokens)",
            f"the chat template closes an answer with no token; demonstrations end with {end}",
            "correct chat_template.jinja if the model was trained with another end",
        )
    elif ends.template not in ends.listed:
        yield Check(
            "warn",
            "model.path (stop tokens)",
            f"the chat template closes a turn with {end}, which is no end token in "
            "tokenizer_config.json, config.json and generation_config.json; a run stops on it too",
            "for other programs, add it to eos_token_id of generation_config.json, as exports do",
        )


def _check_vocabulary(folder: Path, tokenizer: Any, stops: Sequence[int]) -> None:
    """Raises PacsError for a token id that the model does not have."""
    # Some models' padding token has no row in the embedding; it is never looked up.
    token_ids = {id for id in tokenizer.get_vocab().values() if id != tokenizer.pad_token_id}
    largest = max(token_ids | set(stops))
    vocab_size = load_spec(folder).vocab_size
    if largest >= vocab_size:
        raise PacsError(
            f"{folder}: the tokenizer or an end token has id {largest}, but "
            f"config.json has vocab_size={vocab_size}; use the model's own tokenizer"
        )


def _data(loaded: LoadedConfig) -> Iterator[Check]:
    """The training set and the benchmarks."""
    config = loaded.config
    datasets: dict[str, DatasetOptions] = {"data.train": config.data.train}
    for index, mixed in enumerate(config.data.mix):
        datasets[f"data.mix.{index}"] = mixed
    for index, benchmark in enumerate(config.evaluation.benchmarks):
        datasets[f"evaluation.benchmarks.{index}"] = benchmark

    prompt_sets: dict[str, PromptSet] = {}
    for key, dataset in datasets.items():
        fix = ""
        if not _is_local(dataset.path):
            fix = "`pacs-megatron fetch` on a machine with network fills the cache (HF_HOME)"

        def read(key: str = key, dataset: DatasetOptions = dataset) -> str:
            prompt_sets[key] = _load(loaded, dataset)
            return _read_dataset(loaded, dataset, prompt_sets[key])

        yield attempt(f"{key}.path", read, fix)

    train: list[PromptSet] = []
    for key, prompt_set in prompt_sets.items():
        is_train = isinstance(datasets[key], TrainOptions)
        now = first_time(run_folder(loaded))
        lines = notices(prompt_set, now, train=() if is_train else train)
        if is_train:
            lines += shared_notices(prompt_set, train)
            train.append(prompt_set)
        for line in lines:
            yield Check("warn", f"{key}.path (rows)", line)


def _is_local(path: str) -> bool:
    """Whether the path names a file or a folder, and not a data set of a hub."""
    if "://" in path:
        return False
    return bool(Path(path).suffix) or os.path.exists(local_path(path))


def _prompts(loaded: LoadedConfig, dataset: DatasetOptions) -> Sequence[Prompt]:
    model = loaded.config.model
    tokenizer = load_tokenizer(str(local_model(model.path)), model.trust_remote_code)
    return load_prompts(dataset, loaded.config.data, tokenizer).prompts


def _load(loaded: LoadedConfig, dataset: DatasetOptions) -> PromptSet:
    """The prompts of a data set, as a run loads them. Raises PacsError."""
    config = loaded.config
    folder = local_model(config.model.path)
    tokenizer = load_tokenizer(str(folder), config.model.trust_remote_code)
    now = first_time(run_folder(loaded))
    if isinstance(dataset, TrainOptions):
        return load_train(config, dataset, folder, tokenizer, now)
    max_tokens = max_benchmark_prompt(config, load_spec(folder).max_context)
    return load_prompts(dataset, config.data, tokenizer, now=now, max_tokens=max_tokens)


def _read_dataset(loaded: LoadedConfig, dataset: DatasetOptions, prompt_set: PromptSet) -> str:
    data = loaded.config.data
    check_dropped(prompt_set, data)
    count = len(prompt_set.prompts)
    prompts_per_step = loaded.config.batch.prompts_per_step
    if isinstance(dataset, TrainOptions):
        share = dataset.weight / sum(each.weight for each in data.train_sets)
        needed = math.floor(share * prompts_per_step)
        if count < needed:
            part = f", of which its share is {needed}" if data.mix else ""
            raise PacsError(
                f"{dataset.path}: {count} prompts for batch.prompts_per_step={prompts_per_step}"
                f"{part}; lower it"
            )
    return f"{dataset.path}: {count} prompts"


# -------------------------------------------------------------------------------------- the reward
def _reward(loaded: LoadedConfig) -> Iterator[Check]:
    """Whether the reward verifies gold answers of the training set."""
    reward = loaded.config.reward
    if reward is None or reward.name == "agent":
        return
    warning = ""

    def judge_gold() -> str:
        nonlocal warning
        prompts: list[Prompt] = []
        for dataset in loaded.config.data.train_sets:
            prompts += _prompts(loaded, dataset.model_copy(update={"limit": NUM_GOLD}))
        # The report has one line for all warnings.
        with quiet("pacs_megatron.rewards", logging.CRITICAL):
            unverified = check_gold(prompts, reward)
        _check_unverified(reward, unverified, len(prompts))

        num_verified = len(prompts) - len(unverified)
        if reward.name == "code":
            return f"{num_verified} of {len(prompts)} rows have tests; sandbox: {reward.sandbox}"
        warning = _doubtful(reward, unverified, len(prompts))
        return f"{reward.name} accepts {num_verified} of {len(prompts)} gold answers"

    check = attempt("reward", judge_gold)
    if check.level == "ok" and reward.name == "code" and reward.sandbox == "none":
        fix = (
            "programs of the policy can read your files, use the network and end your processes; "
            "set reward.sandbox"
        )
        check = Check("warn", check.key, check.message, fix)
    if warning:
        check = Check("warn", check.key, check.message, warning)
    yield check


def _doubtful(reward: AnyReward, unverified: Sequence[Unverified], num_prompts: int) -> str:
    """The fix if too few gold answers verify; else empty.

    An answer of `math` or `arithmetic` always verifies if its row is right.
    """
    share = 1 - reward.max_failure_frac if reward.name in ("math", "arithmetic") else 0.5
    if num_prompts - len(unverified) >= share * num_prompts:
        return ""
    first = unverified[0]
    return (
        f"not verified: {first.answer!r} ({first.reason}); check with `pacs-megatron data preview` "
        "that this is intended"
    )


def _check_unverified(
    reward: AnyReward, unverified: Sequence[Unverified], num_prompts: int
) -> None:
    """Raises PacsError if a verifier accepts no gold answer, or leaves more of them without a
    verdict than `reward.max_failure_frac`; another reward has to give every verdict.
    """
    if reward.name in ("math", "arithmetic"):
        problems = [answer for answer in unverified if answer.failed]
        fix = "or remove these rows"
        if len(problems) <= reward.max_failure_frac * num_prompts:
            problems = list(unverified) if len(unverified) == num_prompts else []
            fix = "data.train.preset or columns"
    else:
        problems = [answer for answer in unverified if answer.failed]
        fix = "it: such samples are not counted"

    if problems:
        first = problems[0]
        raise PacsError(
            f"reward.name={reward.name} fails on {len(problems)} of {num_prompts} gold answers, "
            f"such as {first.answer!r} ({first.reason}); correct {fix}"
        )


# --------------------------------------------------------------------------- resuming and stopping
def _resume(loaded: LoadedConfig) -> Iterator[Check]:
    """Whether the run resumes, and from which checkpoint."""
    folder = run_folder(loaded)
    if folder.exists():
        yield attempt("run.name", partial(_is_the_same_run, loaded, folder))

    checkpoints_folder = folder / CHECKPOINTS_FOLDER
    if checkpoints_folder.is_file():
        yield Check("fail", "checkpoint", f"{checkpoints_folder} is a file", "move it away")
        return
    checkpoints = whole_checkpoints(folder)
    if checkpoints:
        position, newest = checkpoints[-1]
        fix = f"move {newest} away to resume from the one before"
        yield attempt("checkpoint", partial(_read_checkpoint, newest, str(position)), fix)
    else:
        message = f"{folder} has no complete checkpoint: the run starts from the model"
        yield Check("ok", "checkpoint", message)


def _is_the_same_run(loaded: LoadedConfig, folder: Path) -> str:
    changed = changed_since(loaded, folder)
    text = f"{folder} resumes"
    return f"{text} with changed {', '.join(changed)}" if changed else text


def _read_checkpoint(folder: Path, position: str) -> str:
    check_files(folder, read_manifest(folder), digests=False)
    return f"resumes from {folder.name}: {position}"


def _signal(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Checks that the signal leaves time to finish an update and to save, by measured or else
    planned times.
    """
    metrics_file = run_folder(loaded) / METRICS_FILE
    needed_s = _measured_ending_s(metrics_file, loaded.config.batch.num_updates)
    source = "measured in this run"
    if needed_s is None:
        if not plan.phases:
            return
        needed_s = planned_ending_s(plan)
        source = "planned"

    lead_s = loaded.config.resources.signal_lead_s
    message = (
        f"{lead_s} s before the time limit; an update, a weight sync and a save take "
        f"{needed_s:.0f} s ({source})"
    )
    is_enough = lead_s >= _SIGNAL_MARGIN * needed_s
    level: Level = "fail" if lead_s < needed_s else "warn"
    fix = f"use at least {2 * needed_s:.0f}"
    yield judged("resources.signal_lead_s", is_enough, message, fix, level)


def planned_ending_s(plan: Plan) -> float:
    """The planned seconds: one update, the sync, and one checkpoint at the assumed disk speed."""
    updates_s = sum(phase.seconds for phase in plan.phases if phase.name == "updates")
    sync_s = sum(phase.seconds for phase in plan.phases if phase.name.startswith("weight sync"))
    save_s = plan.checkpoint_bytes / (constants.DISK_GB_S.value * 1e9)
    return updates_s / plan.config.batch.num_updates + sync_s + save_s


def _measured_ending_s(metrics_file: Path, num_updates: int) -> float | None:
    """The longest measured seconds: one update, the sync, and one checkpoint; None without any."""
    rows = read_rows(metrics_file, {})

    def longest(name: str) -> float:
        values = [row.get(name) for row in rows]
        return max(
            (float(value) for value in values if isinstance(value, int | float)), default=0.0
        )

    # A signal may arrive right after the start of a step's last update.
    update_s = longest("time/update_s") / num_updates
    seconds = update_s + longest("time/sync_s") + longest("time/checkpoint_s")
    return seconds or None
