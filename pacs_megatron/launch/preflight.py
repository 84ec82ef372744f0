"""`preflight`: everything that can be found out before a run waits in a queue; each line ok, warn or fail, key and fix.

On a login node it looks at the configuration, the files and the software. Inside a job (`srun pacs-megatron preflight`)
every rank takes part, and what has to be equal or connected between nodes is looked at too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import DatasetOptions, SglangRollout
from pacs_megatron.errors import PacsError
from pacs_megatron.launch import constants
from pacs_megatron.launch.constants import GIB
from pacs_megatron.launch.doctor import findings, installed
from pacs_megatron.launch.known_models import find_spec
from pacs_megatron.launch.plan import Plan, make_plan
from pacs_megatron.launch.train import run_folder

Level = Literal["ok", "warn", "fail"]
MIN_TORCH, MAX_TORCH = Version("2.9"), Version("2.14")
NUM_GOLD = 32
"""Gold answers that are sent through the reward."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line."""

    level: Level
    key: str
    """The configuration key to change, or what was looked at."""
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.key}: {self.message}{f' -> {self.fix}' if self.fix else ''}"


def run_preflight(path: Path, overrides: Sequence[str] = ()) -> list[Check]:
    """Every check in order; a configuration that does not load ends it after the first line."""
    try:
        loaded = load_config(path, overrides)
    except PacsError as error:
        return [Check("fail", "configuration", str(error))]
    checks = [Check("ok", "configuration", f"{path} loads")]
    plan: Plan | None = None
    if find_spec_or_none(loaded) is not None:
        try:
            plan = make_plan(loaded)
        except PacsError as error:
            return [*checks, Check("fail", "parallel", str(error))]
        checks.extend(_plan(plan))
    checks.extend([*_software(loaded), *_gpus(loaded)])
    model = list(_model(loaded))
    checks.extend(model)
    if any(check.level == "fail" for check in model):
        checks.append(Check("warn", "data, reward", "not looked at: they need the model's tokenizer"))
    else:
        checks.extend([*_tokenizer(loaded), *_data(loaded), *_reward(loaded)])
    checks.extend([*_sglang(loaded), *_folders(loaded), *_resume(loaded)])
    if plan is not None:
        checks.extend(_disk(loaded, plan))
        checks.extend(_signal(loaded, plan))
    return checks


def render(checks: Sequence[Check], *, as_json: bool) -> str:
    """One line a check and the count, or JSON."""
    if as_json:
        return json.dumps([asdict(check) for check in checks], indent=2)
    counts = {level: sum(check.level == level for check in checks) for level in ("ok", "warn", "fail")}
    summary = ", ".join(f"{count} {level}" for level, count in counts.items())
    return "\n".join([*map(str, checks), summary])


def find_spec_or_none(loaded: LoadedConfig) -> object | None:
    """The model's architecture, None where it cannot be had (`_model` says why)."""
    try:
        return find_spec(loaded.config.model.path)
    except PacsError:
        return None


def _attempt(key: str, action: Callable[[], str], fix: str = "") -> Check:
    """`ok` with what `action` returns, or `fail` with its named error, which brings its own fix."""
    try:
        return Check("ok", key, action())
    except PacsError as error:
        return Check("fail", key, str(error), fix)


# ---------------------------------------------------------------------------------------------------------------- checks
def _plan(plan: Plan) -> Iterator[Check]:
    if plan.gpu is None:
        return
    share = plan.peak.total / (plan.gpu.memory_gib * GIB)
    text = f"{plan.peak.total / GIB:.1f} GiB of {plan.gpu.memory_gib} GiB on a {plan.gpu.name} ({share:.0%}), planned"
    if not plan.fits:
        yield Check("fail", "resources.gpu", f"does not fit: {text}", "`pacs-megatron plan` says what to change")
    else:
        yield Check("warn" if share > 0.95 else "ok", "resources.gpu", text)
    fp8 = plan.config.precision.fp8
    if fp8 is not None and plan.gpu.fp8_tflops is None:
        message = f"FP8 ({fp8.recipe}) on a {plan.gpu.name}, which has no FP8 units"
        yield Check("fail", "precision.fp8", message, "remove precision.fp8, or use h100, h200 or b200")


def _software(loaded: LoadedConfig) -> Iterator[Check]:
    wanted = {"Python", "torch", "megatron-core", "transformers", "datasets", "math-verify", "NVIDIA Apex"}
    for row in findings():
        if row.name in wanted and row.state == "bad":
            yield Check("fail", row.name, row.detail, row.fix)
    torch_version = installed("torch")
    if torch_version is not None and not MIN_TORCH <= Version(torch_version) < MAX_TORCH:
        yield Check("fail", "torch", f"{torch_version}; tested: {MIN_TORCH} <= torch < {MAX_TORCH}", "make install")
    else:
        yield Check("ok", "software", f"torch {torch_version}, megatron-core {installed('megatron-core')}")
    logging = loaded.config.logging
    if logging.wandb is not None and installed("wandb") is None:
        yield Check("fail", "logging.wandb", "wandb is not installed", "pip install wandb, or remove logging.wandb")


def _gpus(loaded: LoadedConfig) -> Iterator[Check]:
    config = loaded.config
    wanted = config.resources.gpus_per_node
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        yield Check(
            "warn", "resources.gpus_per_node", "no GPU here (a login node?)", "run preflight inside the job too"
        )
        return
    if found < wanted:
        yield Check("fail", "resources.gpus_per_node", f"{found} GPUs here, {wanted} wanted", f"set it to {found}")
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GIB
    planned = constants.GPUS[config.resources.gpu].memory_gib if config.resources.gpu is not None else 0.0
    same = abs(memory - planned) < 0.05 * planned
    fix = "" if same else "name the GPU that is there, or `plan` counts with another one's memory"
    yield Check("ok" if same else "warn", "resources.gpu", f"{name}, {memory:.1f} GiB, planned with {planned} GiB", fix)
    from pacs_megatron.policy import precision

    def fits() -> str:
        machine = precision.inspect_machine()
        precision.check(config.precision, machine)
        return precision.describe(config.precision, machine)

    yield _attempt("precision", fits)


def _model(loaded: LoadedConfig) -> Iterator[Check]:
    path = loaded.config.model.path

    def is_whole() -> str:
        from pacs_megatron.checkpoint.hf_folder import HfFolder
        from pacs_megatron.models import load_spec, weight_table

        folder = HfFolder(local_model(path))
        table = weight_table(load_spec(folder.path))
        missing = [name for name in table.by_hf if name not in set(folder.names)]
        if missing:
            raise PacsError(f"{folder.path} lacks {len(missing)} tensors, first {missing[0]}; download it again")
        return f"{folder.path}: {len(folder.names)} tensors, {table.num_parameters:,} parameters"

    if (Path(path) / "manifest.json").is_file():  # a converted checkpoint brings digests of its own
        yield Check("ok", "model.path", f"{path} is a Megatron checkpoint")
        return
    yield _attempt("model.path", is_whole)


def local_model(path: str) -> Path:
    """A local folder, or a hub id's folder in the local cache: nothing is fetched. Raises PacsError for neither."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise PacsError(
            f"model.path={path} is no folder and not in the local cache (HF_HOME); run `pacs-megatron fetch` where there "
            "is a network, or correct the path"
        ) from None


def _tokenizer(loaded: LoadedConfig) -> Iterator[Check]:
    model = loaded.config.model

    def works() -> str:
        from pacs_megatron.data import load_tokenizer, stop_token_ids

        folder = local_model(model.path)
        tokenizer = load_tokenizer(str(folder), model.trust_remote_code)
        if not tokenizer.chat_template:
            raise PacsError(
                f"{folder} has no chat template; use an instruct model's tokenizer, or add chat_template.jinja"
            )
        return f"chat template, stops at {', '.join(map(str, stop_token_ids(tokenizer, str(folder))))}"

    yield _attempt("model.path (tokenizer)", works)


def _data(loaded: LoadedConfig) -> Iterator[Check]:
    config = loaded.config
    sets = [("data.train", config.data.train)]
    sets += [(f"evaluation.benchmarks.{index}", dataset) for index, dataset in enumerate(config.evaluation.benchmarks)]
    for key, dataset in sets:

        def loads(key: str = key, dataset: DatasetOptions = dataset) -> str:
            return _read_set(loaded, key, dataset)

        yield _attempt(f"{key}.path", loads)


def _read_set(loaded: LoadedConfig, key: str, dataset: DatasetOptions) -> str:
    from pacs_megatron.data import load_prompts, load_tokenizer

    config = loaded.config
    tokenizer = load_tokenizer(str(local_model(config.model.path)), config.model.trust_remote_code)
    prompts = load_prompts(dataset, config.data, tokenizer).prompts
    if not prompts:
        raise PacsError(
            f"{dataset.path}: every prompt is longer than data.max_prompt_tokens={config.data.max_prompt_tokens}; raise it"
        )
    if key == "data.train" and len(prompts) < config.batch.prompts_per_step:
        raise PacsError(
            f"{dataset.path}: {len(prompts)} prompts for batch.prompts_per_step={config.batch.prompts_per_step}; lower it"
        )
    return f"{dataset.path}: {len(prompts)} prompts"


def _reward(loaded: LoadedConfig) -> Iterator[Check]:
    config = loaded.config
    if config.reward is None:
        return
    reward = config.reward

    def judges() -> str:
        from pacs_megatron.data import load_tokenizer
        from pacs_megatron.evaluation.preview import preview_with_reward

        tokenizer = load_tokenizer(str(local_model(config.model.path)), config.model.trust_remote_code)
        some = config.data.train.model_copy(update={"limit": NUM_GOLD})
        report = preview_with_reward(some, config.data, tokenizer, reward, num_examples=0)
        if report.num_checked and not report.num_verified and reward.name in ("math", "arithmetic"):
            worst = report.unverified[0]
            raise PacsError(
                f"reward.name={reward.name} accepts none of {report.num_checked} gold answers, such as {worst.answer!r} "
                f"({worst.reason}); correct data.train.preset or columns"
            )
        return f"{reward.name} accepts {report.num_verified} of {report.num_checked} gold answers"

    yield _attempt("reward", judges)


def _sglang(loaded: LoadedConfig) -> Iterator[Check]:
    rollout = loaded.config.rollout
    if not isinstance(rollout, SglangRollout):
        return
    if rollout.api_key_env is not None and not os.environ.get(rollout.api_key_env):
        message = f"the environment variable {rollout.api_key_env} is not set"
        yield Check("fail", "rollout.api_key_env", message, "export it, or remove rollout.api_key_env")
    if rollout.servers is None:
        return
    longest = max_sequence_tokens(loaded.config)
    context = rollout.servers.context_length
    if context is not None and context < longest:
        message = f"{context} tokens, but prompts and responses may reach {longest}"
        yield Check("fail", "rollout.servers.context_length", message, f"use at least {longest}")
    code = "from importlib.metadata import version; print(version('sglang'))"
    command = [*rollout.servers.python, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Check(
            "fail", "rollout.servers.python", f"{' '.join(command[:-2])}: {error}", "name an existing interpreter"
        )
        return
    if done.returncode:
        fix = "install sglang there (make install-sglang), or name the interpreter that has it"
        yield Check("fail", "rollout.servers.python", f"{' '.join(command[:-2])} has no sglang", fix)
    else:
        yield Check("ok", "rollout.servers.python", f"sglang {done.stdout.strip()}")


def _folders(loaded: LoadedConfig) -> Iterator[Check]:
    for key, folder in (("run.dir", Path(loaded.config.run.dir)), ("TMPDIR", Path(tempfile.gettempdir()))):
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        if not existing.is_dir():
            yield Check("fail", key, f"{existing} is a file", "name a folder")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield Check("fail", key, f"{existing} is not writable", "choose another folder")
        else:
            yield Check("ok", key, f"{folder} is writable")


def _resume(loaded: LoadedConfig) -> Iterator[Check]:
    folder = run_folder(loaded)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if not checkpoints:
        yield Check("ok", "run.name", f"{folder} has no checkpoint: the run starts")
        return

    def readable() -> str:
        from pacs_megatron.checkpoint.manifest import check_files, read_manifest

        check_files(checkpoints[-1], read_manifest(checkpoints[-1]), digests=False)
        return f"resumes from {checkpoints[-1].name}"

    yield _attempt("run.name", readable, f"move {checkpoints[-1]} away to resume from the one before")


def _disk(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    folder = Path(loaded.config.run.dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free, need = shutil.disk_usage(existing).free, plan.disk_bytes
    text = f"{free / GIB:.1f} GiB free at {existing}, {need / GIB:.1f} GiB for checkpoints and export"
    if free < need:
        yield Check("fail", "checkpoint.keep_last", text, "lower it, free space, or choose another run.dir")
    else:
        yield Check("ok", "checkpoint.keep_last", text)


def _signal(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """The signal must come early enough for one update and one save: as measured, else as planned."""
    lead = loaded.config.resources.signal_lead_s
    measured = _measured_seconds(run_folder(loaded) / "metrics.jsonl")
    if measured is not None:
        need, word = measured, "measured in this run"
    elif plan.phases:
        update = next(phase.seconds for phase in plan.phases if phase.name == "updates")
        save = plan.checkpoint_bytes / (constants.DISK_GB_S.value * 1e9)
        need, word = update / loaded.config.batch.updates_per_step + save, "planned"
    else:
        return
    text = f"{lead} s before the time limit; an update and a save take {need:.0f} s ({word})"
    if lead < need:
        yield Check("fail", "resources.signal_lead_s", text, f"use at least {2 * need:.0f}")
    else:
        yield Check("warn" if lead < 2 * need else "ok", "resources.signal_lead_s", text)
    limit = _seconds(loaded.config.resources.time_limit)
    if limit <= lead:
        message = f"{loaded.config.resources.time_limit} is not longer than resources.signal_lead_s={lead}"
        yield Check("fail", "resources.time_limit", message, "raise it: the signal would come at the start")


def _measured_seconds(path: Path) -> float | None:
    if not path.is_file():
        return None
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    longest = {
        name: max((float(row[name]) for row in rows if isinstance(row.get(name), int | float)), default=0.0)
        for name in ("time/update_s", "time/checkpoint_s")
    }
    return sum(longest.values()) or None


def _seconds(time_limit: str) -> int:
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
