"""`preflight`: checks a run before it is queued; each result line is ok, warn or fail, with key and
fix.

On a login node it checks the configuration, the files and the software. Inside a job (`srun
pacs-megatron preflight`) all ranks take part, and it also checks equality and connections between
nodes.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.manifest import check_files, read_manifest
from pacs_megatron.checkpoint.names import CHECKPOINTS_FOLDER, MANIFEST_NAME, whole_checkpoints
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.schema import DatasetOptions, ModelOptions, WandbOptions
from pacs_megatron.config.text import local_path
from pacs_megatron.contracts.samples import Prompt
from pacs_megatron.data import load_prompts, load_tokenizer, stop_token_ids
from pacs_megatron.errors import PacsError
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.writers import check_wandb
from pacs_megatron.runtime.files import GIB, read_rows
from pacs_megatron.runtime.run_folder import METRICS_FILE, changed_since, run_folder
from pacs_megatron.runtime.waiting import quiet
from pacs_megatron.workbench.evaluation.preview import check_gold
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.known_models import find_spec
from pacs_megatron.workbench.plan.plan import Plan, make_plan
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


def run_preflight(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cluster: Path | None = None,
    start_servers: bool = True,
) -> list[Check]:
    """Runs all checks in order and returns their results: a single one if the configuration does
    not load.
    """
    try:
        loaded = load_config(path, overrides)
    except PacsError as error:
        return [Check("fail", "configuration", str(error))]
    checks = [Check("ok", "configuration", f"{path} loads")]
    spec = None
    model = loaded.config.model.path
    with suppress(PacsError, OSError):  # `_model` reports the reason
        spec = find_spec(model)
    try:
        plan = make_plan(loaded) if spec is not None else None
    except PacsError as error:
        return [*checks, Check("fail", "parallel", str(error))]
    checks += [*_plan(plan), *check_software(loaded), *check_gpus(loaded)]
    if loaded.config.logging.wandb is not None:
        checks.append(attempt("logging.wandb", partial(_can_log, loaded.config.logging.wandb)))
    with offline():
        checks.append(attempt("model.path", partial(_read_model, model)))
        readable = checks[-1].level != "fail"
        if readable:
            checks.append(
                attempt("model.path (tokenizer)", partial(_read_tokenizer, loaded.config.model))
            )
            checks += [*_data(loaded), *_reward(loaded)]
        else:
            checks.append(
                Check("warn", "data, reward", "not checked: they need the model's tokenizer")
            )
    checks += [*check_folders(loaded), *check_ports(loaded), *check_network_settings(loaded)]
    checks += check_cluster(cluster) if cluster is not None else []
    checks += _resume(loaded)
    if plan is not None:
        checks += [
            *check_free_space(loaded, plan),
            *check_memory(loaded, plan),
            *_signal(loaded, plan),
        ]
    # Last, because it takes the longest; no server is started if another check failed.
    failed = any(check.level == "fail" for check in checks)
    checks += check_servers(loaded, None if failed else local_model(model), start=start_servers)
    return checks


@contextmanager
def stdout_for_the_report() -> Iterator[None]:
    """Redirects output of plug-ins and their processes to stderr: stdout is for the report, which
    may be JSON.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


local_model = partial(model_folder, local_files_only=True)


@contextmanager
def offline() -> Iterator[None]:
    """Makes the Hugging Face libraries read their caches without network access, as in the jobs."""
    import datasets
    from huggingface_hub import constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def render(checks: Sequence[Check], *, as_json: bool) -> str:
    """One line per check and the counts, or JSON."""
    if as_json:
        return json.dumps([asdict(check) for check in checks], indent=2)
    counts = {
        level: sum(check.level == level for check in checks) for level in ("ok", "warn", "fail")
    }
    summary = ", ".join(f"{count} {level}" for level, count in counts.items())
    return "\n".join([*map(str, checks), summary])


# ----------------------------------------------------------------------------------------------------------------
# checks
def _plan(plan: Plan | None) -> Iterator[Check]:
    if plan is None or plan.gpu is None:
        return
    share = plan.peak.total / (plan.gpu.memory_gib * GIB)
    text = f"{plan.peak.total / GIB:.1f} GiB of {plan.gpu.memory_gib} GiB on a {plan.gpu.name} ({share:.0%}), planned"
    if not plan.fits:
        yield Check(
            "fail",
            "resources.gpu",
            f"does not fit: {text}",
            "`pacs-megatron plan` lists what to change",
        )
    else:
        yield judged("resources.gpu", share <= 0.95, text, otherwise="warn")


def _can_log(wandb: WandbOptions) -> str:
    check_wandb(wandb)
    return f"project {wandb.project}"


def _read_model(path: str) -> str:
    from pacs_megatron.convert.verify import check_names

    checkpoint = local_path(path)
    if (checkpoint / MANIFEST_NAME).is_file():
        check_files(checkpoint, read_manifest(checkpoint), digests=False)
        return f"{path}: a Megatron checkpoint, {load_spec(local_model(path)).family}"
    folder = HfFolder(local_model(path))
    table = weight_table(load_spec(folder.path))
    check_names(folder, table)
    return f"{folder.path}: {len(folder.names)} tensors, {table.num_parameters:,} parameters"


def _read_tokenizer(model: ModelOptions) -> str:
    folder = local_model(model.path)
    tokenizer = load_tokenizer(str(folder), model.trust_remote_code)
    if not tokenizer.chat_template:
        raise PacsError(f"{folder} has no chat template; use the one of an instruct model")
    stops = stop_token_ids(tokenizer, str(folder))
    rows = load_spec(folder).vocab_size
    # Some models' padding token has no row in the embedding; it is never looked up.
    largest = max(
        {id for id in tokenizer.get_vocab().values() if id != tokenizer.pad_token_id} | set(stops)
    )
    if largest >= rows:
        raise PacsError(
            f"{folder}: the tokenizer or generation_config.json has token id {largest}, but "
            "config.json has "
            f"vocab_size={rows}; use the model's own tokenizer"
        )
    return f"chat template, stops at {', '.join(map(str, stops))}"


def _data(loaded: LoadedConfig) -> Iterator[Check]:
    config = loaded.config
    sets = [("data.train", config.data.train)]
    sets += [
        (f"evaluation.benchmarks.{index}", dataset)
        for index, dataset in enumerate(config.evaluation.benchmarks)
    ]
    for key, dataset in sets:
        is_local = "://" not in dataset.path and (
            Path(dataset.path).suffix or os.path.exists(local_path(dataset.path))
        )
        fix = (
            ""
            if is_local
            else "`pacs-megatron fetch` on a machine with network fills the cache (HF_HOME)"
        )
        yield attempt(f"{key}.path", partial(_read_set, loaded, key, dataset), fix)


def _prompts(loaded: LoadedConfig, dataset: DatasetOptions) -> Sequence[Prompt]:
    model = loaded.config.model
    tokenizer = load_tokenizer(str(local_model(model.path)), model.trust_remote_code)
    return load_prompts(dataset, loaded.config.data, tokenizer).prompts


def _read_set(loaded: LoadedConfig, key: str, dataset: DatasetOptions) -> str:
    count = len(_prompts(loaded, dataset))
    least = loaded.config.batch.prompts_per_step
    if key == "data.train" and count < least:
        raise PacsError(
            f"{dataset.path}: {count} prompts for batch.prompts_per_step={least}; lower it"
        )
    return f"{dataset.path}: {count} prompts"


def _reward(loaded: LoadedConfig) -> Iterator[Check]:
    reward = loaded.config.reward
    if reward is None:
        return
    is_rare = False  # whether it accepts less than half of the gold answers

    def judges() -> str:
        nonlocal is_rare
        train = loaded.config.data.train
        prompts = _prompts(loaded, train.model_copy(update={"limit": NUM_GOLD}))
        with quiet(
            "pacs_megatron.rewards", logging.CRITICAL
        ):  # the report has one line for all warnings
            unverified = check_gold(prompts, reward)
        num_verified = len(prompts) - len(unverified)
        is_verifier = reward.name in ("math", "arithmetic")
        bad = unverified if is_verifier and not num_verified else []
        bad = bad or [each for each in unverified if each.failed and not is_verifier]
        if bad:
            fix = (
                "data.train.preset or columns"
                if is_verifier
                else "it: such samples are not counted"
            )
            raise PacsError(
                f"reward.name={reward.name} fails on {len(bad)} of {len(prompts)} gold answers, "
                "such as "
                f"{bad[0].answer!r} ({bad[0].reason}); correct {fix}"
            )
        if reward.name == "code":
            return f"{num_verified} of {len(prompts)} rows have tests; sandbox: {reward.sandbox}"
        is_rare = 2 * num_verified < len(prompts)
        return f"{reward.name} accepts {num_verified} of {len(prompts)} gold answers"

    check = attempt("reward", judges)
    if check.level == "ok" and reward.name == "code" and reward.sandbox == "none":
        fix = "programs of the policy can read your files, use the network and end your processes; set reward.sandbox"
        check = Check("warn", check.key, check.message, fix)
    if is_rare:
        check = Check(
            "warn",
            check.key,
            check.message,
            "check with `pacs-megatron data preview` that this is intended",
        )
    yield check


def _resume(loaded: LoadedConfig) -> Iterator[Check]:
    folder = run_folder(loaded)
    if folder.exists():
        yield attempt("run.name", partial(_is_the_same_run, loaded, folder))
    if (folder / CHECKPOINTS_FOLDER).is_file():
        yield Check(
            "fail", "checkpoint", f"{folder / CHECKPOINTS_FOLDER} is a file", "move it away"
        )
    elif whole := whole_checkpoints(folder):
        position, newest = whole[-1]
        fix = f"move {newest} away to resume from the one before"
        yield attempt("checkpoint", partial(_read_checkpoint, newest, str(position)), fix)
    else:
        yield Check(
            "ok",
            "checkpoint",
            f"{folder} has no complete checkpoint: the run starts from the model",
        )


def _is_the_same_run(loaded: LoadedConfig, folder: Path) -> str:
    changed = changed_since(loaded, folder)
    return f"{folder} resumes" + (f" with changed {', '.join(changed)}" if changed else "")


def _read_checkpoint(folder: Path, position: str) -> str:
    check_files(folder, read_manifest(folder), digests=False)
    return f"resumes from {folder.name}: {position}"


def _signal(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Checks that the signal leaves time to finish an update and to save, by measured or else
    planned times.
    """
    lead = loaded.config.resources.signal_lead_s
    measured = _measured_seconds(run_folder(loaded) / METRICS_FILE, loaded.config.batch.num_updates)
    if measured is None and not plan.phases:
        return
    need, source = (
        (planned_ending_s(plan), "planned")
        if measured is None
        else (measured, "measured in this run")
    )
    text = f"{lead} s before the time limit; an update, a weight sync and a save take {need:.0f} s ({source})"
    level: Level = "fail" if lead < need else "warn"
    yield judged(
        "resources.signal_lead_s", lead >= 1.5 * need, text, f"use at least {2 * need:.0f}", level
    )


def planned_ending_s(plan: Plan) -> float:
    """The planned seconds: one update, the sync, and one checkpoint at the assumed disk speed."""
    updates = sum(phase.seconds for phase in plan.phases if phase.name == "updates")
    sync = sum(phase.seconds for phase in plan.phases if phase.name.startswith("weight sync"))
    save = plan.checkpoint_bytes / (constants.DISK_GB_S.value * 1e9)
    return updates / plan.config.batch.num_updates + sync + save


def _measured_seconds(path: Path, num_updates: int) -> float | None:
    rows = read_rows(path, {})

    def longest(name: str) -> float:
        return max(
            (float(row[name]) for row in rows if isinstance(row.get(name), int | float)),
            default=0.0,
        )

    # A signal may arrive right after the start of a step's last update.
    return (
        longest("time/update_s") / num_updates
        + longest("time/sync_s")
        + longest("time/checkpoint_s")
        or None
    )
