"""`pacs-megatron eval`: pass@k of Hugging Face folders and checkpoints of runs.

Starts no Megatron.
"""

import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pacs_megatron.checkpoint.hf_folder import HfFolder, check_names
from pacs_megatron.checkpoint.names import MANIFEST_NAME, newest_step, position_of
from pacs_megatron.config import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.text import local_path
from pacs_megatron.contracts import Prompt, Sample, SampleRequest
from pacs_megatron.contracts.conversation import response_text, turns_of
from pacs_megatron.convert.certificate import CERTIFICATE_NAME
from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf
from pacs_megatron.data import PromptSet, load_tokenizer, stop_token_ids
from pacs_megatron.data.notices import check_dropped, notices
from pacs_megatron.errors import CheckpointError, ConfigError, RewardError
from pacs_megatron.models import load_spec, read_spec, weight_table
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.logs import setup_command_logging
from pacs_megatron.observability.progress import Progress
from pacs_megatron.rewards.custom import file_digests
from pacs_megatron.rewards.labels import check_failures
from pacs_megatron.rewards.pool import received
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.requests import evaluation_requests
from pacs_megatron.rollout.run_prompts import load_benchmarks
from pacs_megatron.runtime.files import (
    check_distinct,
    check_output,
    is_file,
    json_line,
    write_outputs,
)
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, run_folder
from pacs_megatron.runtime.run_lock import LOCK_FILE, RunLock, check_not_locked
from pacs_megatron.workbench.evaluation.results import (
    harness_json,
    results_json,
    row_counts,
    summarize,
    table,
)
from pacs_megatron.workbench.evaluation.sample_file import REWARD_FILES, SampleFile, first_time
from pacs_megatron.workbench.evaluation.samplers import EmbeddedSampler, ServerSampler, push_folder

logger = logging.getLogger(__name__)

RESULTS_NAME = "results.json"
HARNESS_NAME = "lm_eval_results.json"
_WORKER_OPTIONS = {"workers", "timeout_s", "memory_limit_gib", "max_failure_frac"}
"""Options of a reward that change no verdict"""
_EXPORT_FOLDERS = ("hf", "hf_exports", "snapshots")
"""Folder names that many models share, so a name for the results omits them"""


def run_eval(
    config_path: Path,
    overrides: Sequence[str],
    *,
    model: Sequence[str] = (),
    out: Path | None = None,
    verify: bool = True,
    rejudge: bool = False,
) -> str:
    """Evaluates the models on the configured benchmarks and returns a table for each of them.

    Writes results.json, lm_eval_results.json and the samples; several models get one subfolder
    each. Samples are appended while sampling. The same command resumes an interrupted evaluation.
    Sample seeds equal those of a run's evaluation at step 0.

    Args:
        config_path: of the run.
        overrides: `key=value` each.
        model: Hugging Face folders or hub ids, run folders, or checkpoints of runs, which are
            exported first; overrides may follow. Default: model.path.
        out: the folder of the results. Default: `<run folder>/eval`.
        verify: whether weights of an export must be those of its certificate.
        rejudge: judges existing samples again.

    Raises:
        PacsError: the configuration, a model, the sampler or the reward failed.
    """
    setup_command_logging()
    models: list[str] = []
    all_overrides = list(overrides)
    for word in model:
        if "=" not in word or Path(word).exists():
            models.append(word)
        else:
            all_overrides.append(word)

    loaded = load_config(config_path, all_overrides)
    config = loaded.config
    if not config.evaluation.benchmarks:
        raise loaded.fail("evaluation.benchmarks is empty, add a benchmark")
    if config.reward is None:
        raise loaded.fail("`reward` is missing, but an evaluation needs one; add it")

    run_dir = run_folder(loaded)
    base = run_dir / "eval" if out is None else out
    check_distinct(map(Path, models))
    if out is None:
        check_not_locked(run_dir)
    folders = [_folder_of(name) for name in models or [config.model.path]]

    is_new = not base.exists()
    try:
        with RunLock(base, "eval"):
            return _evaluate(config, folders, base, verify=verify, rejudge=rejudge)
    finally:
        # An evaluation that wrote nothing leaves no folder.
        if is_new and [path.name for path in base.glob("*")] == [LOCK_FILE]:
            (base / LOCK_FILE).unlink()
            base.rmdir()


# ------------------------------------------------------------------------------------------ models
def _folder_of(model: str) -> HfFolder:
    """The Hugging Face folder of an argument, with the tensors of its config.json.

    A checkpoint is exported to hf_exports/ of its run, once; it may be pruned then.
    """
    folder = HfFolder(_path_of(local_path(model)))
    check_names(folder, weight_table(read_spec(folder.config)))
    return folder


def _path_of(path: Path) -> Path:
    """The Hugging Face folder's path; exports a checkpoint if needed."""
    is_run = (path / CONFIG_FILE).is_file() and not (path / "config.json").exists()
    if is_run:
        step = newest_step(path)
        if (path / "hf").is_dir() or step is None:
            return path / "hf"
        path = path / "checkpoints" / f"step_{step:06d}"

    export = path.absolute().parent.parent / "hf_exports" / path.name
    is_pruned = export.is_dir() and not path.is_dir()
    is_checkpoint = is_pruned or (path / MANIFEST_NAME).is_file()
    if position_of(path.name) is not None and is_checkpoint:
        if not export.exists():
            logger.info("exporting %s to %s", path, export)
            megatron_to_hf(path, ConversionOptions(out=export), step=None)
        path = export
    return model_folder(str(path), "--model")


def _names(folders: Sequence[HfFolder]) -> list[str]:
    """A name for each model's results: the end of its path, without parts that all runs share."""
    names: list[str] = []
    for folder in folders:
        parts = [part for part in folder.path.resolve().parts if part not in _EXPORT_FOLDERS]
        is_step = position_of(parts[-1]) is not None
        name = "-".join(parts[-2:] if is_step else parts[-1:])

        unique_name = name
        number = len(names) + 1
        while unique_name in names:
            unique_name = f"{name}-{number}"
            number += 1
        names.append(unique_name)
    return names


def certified_digests(folder: HfFolder) -> dict[str, str]:
    """Tensor name -> xxh3-128, from the certificate that an export writes beside the weights; empty
    without one.
    """
    path = folder.path / CERTIFICATE_NAME
    if not is_file(path, CheckpointError):
        return {}
    try:
        tensors = read_object(path, error=CheckpointError)["hf"]["tensors"]
        return {str(tensor["name"]): tensor["xxh3_128"] for tensor in tensors if tensor["xxh3_128"]}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}); export again, or remove it"
        ) from None


# -------------------------------------------------------------------------------------- evaluation
def _evaluate(
    config: RunConfig, folders: Sequence[HfFolder], base: Path, *, verify: bool, rejudge: bool
) -> str:
    """The tables of all models, one after the other."""
    assert config.reward is not None
    sampler: EmbeddedSampler | ServerSampler
    if config.rollout.sglang is None:
        sampler = EmbeddedSampler(config)
    else:
        sampler = ServerSampler(config, base / "servers")
    # Every submitted sample comes with its text, so the judge decodes nothing.
    judge = Judge(config.reward, lambda ids: "", truncated=config.admission.truncated)

    texts = []
    with judge, sampler:
        evaluation = _Evaluation(config, sampler, judge, verify, rejudge)
        if len(folders) == 1:
            return evaluation.run(folders[0], base)
        for folder, name in zip(folders, _names(folders), strict=True):
            texts.append(f"{name}\n{evaluation.run(folder, base / name)}")
    return "\n\n".join(texts)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Samples, judges and counts one model."""

    config: RunConfig
    sampler: EmbeddedSampler | ServerSampler
    judge: Judge
    verify: bool
    rejudge: bool

    def run(self, folder: HfFolder, target: Path) -> str:
        """Writes the results of one model to the folder `target` and returns the table."""
        started = time.perf_counter()
        config = self.config
        options = config.evaluation
        assert config.reward is not None
        tokenizer = load_tokenizer(str(folder.path), config.model.trust_remote_code)
        certified = certified_digests(folder) if self.verify else {}
        produced_by = self._produced_by(folder, tokenizer, certified)
        now = first_time(target, produced_by)
        prompt_sets = self._load(folder, tokenizer, now)
        requests = evaluation_requests(options, prompt_sets, run_seed=config.run.seed, step=0)
        prompts: dict[str, Prompt] = {}
        for prompt_set in prompt_sets:
            prompts |= {prompt.id: prompt for prompt in prompt_set.prompts}

        judged_by = self._judged_by()
        # A folder that cannot be written is an error before --rejudge replaces the samples.
        check_output(target / HARNESS_NAME, b'{\n  "results": ')
        check_output(target / RESULTS_NAME, b'{\n "model": ')

        with SampleFile(target, produced_by, judged_by, prompts, now) as samples:
            self._complete(samples, requests, prompts, folder, tokenizer)
            outcomes = [samples.outcomes[request.id] for request in requests]
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        check_failures(
            failures,
            len(outcomes),
            config.reward.max_failure_frac,
            then=f", and pass --rejudge ({samples.path})",
        )

        results = summarize(options, prompt_sets, requests, samples.outcomes)
        facts = {
            "model": str(folder.path.resolve()),
            "weights_digest": produced_by["weights"],
            "verified": bool(certified),
            "engine": produced_by["engine"],
            "seconds": time.perf_counter() - started,
            "seed": config.run.seed,
            "samples": samples.path.name,
            "sampling": produced_by["sampling"],
            "reward": judged_by,
            "rows": row_counts(options, prompt_sets),
        }
        outputs = [
            (target / HARNESS_NAME, harness_json(results, facts)),
            (target / RESULTS_NAME, results_json(results, facts)),
        ]
        write_outputs(outputs)
        return f"{table(results)}\n{target / RESULTS_NAME}"

    def _load(self, folder: HfFolder, tokenizer: Any, now: datetime) -> list[PromptSet]:
        """The prompts of every benchmark; logs the notices about them.

        Raises DataError, also if too many problems do not fit into the model's context.
        """
        max_context = load_spec(folder.path).max_context
        prompt_sets = load_benchmarks(self.config, max_context, tokenizer, now)
        for prompt_set in prompt_sets:
            check_dropped(prompt_set, self.config.data)
            for line in notices(prompt_set, now):
                logger.warning("%s", line)
        return prompt_sets

    def _produced_by(
        self, folder: HfFolder, tokenizer: Any, certified: Mapping[str, str]
    ) -> dict[str, Any]:
        """Every setting that changes a response to a problem."""
        config = self.config
        sampling = config.evaluation.sampling
        assert sampling is not None
        template = {
            "template": tokenizer.chat_template,
            "args": config.data.chat_template_args,
            "system": config.data.system_prompt,
            "suffix": config.data.prompt_suffix,
        }
        return {
            "weights": push_folder(folder, None, 0, certified),
            **self.sampler.describe(),
            "seed": config.run.seed,
            "sampling": sampling.model_dump(mode="json"),
            "prompt": xxhash.xxh3_128_hexdigest(json_line(template)),
            "stop_token_ids": list(stop_token_ids(tokenizer, str(folder.path))),
        }

    def _judged_by(self) -> dict[str, Any]:
        """Every setting that changes a verdict."""
        assert self.config.reward is not None
        rule = self.config.reward.model_dump(mode="json", exclude=_WORKER_OPTIONS)
        judged_by = {f"reward.{key}": value for key, value in rule.items()}
        judged_by["admission.truncated"] = self.config.admission.truncated
        files = file_digests(self.config.reward)
        if files:
            judged_by[REWARD_FILES] = files
        return judged_by

    def _complete(
        self,
        samples: SampleFile,
        requests: Sequence[SampleRequest],
        prompts: Mapping[str, Prompt],
        folder: HfFolder,
        tokenizer: Any,
    ) -> None:
        """Samples and judges the samples that the file lacks.

        Args:
            samples: the file.
            requests: all samples that the results need.
            prompts: prompt id -> prompt.
            folder: the model.
            tokenizer: of the model.

        Raises:
            ConfigError: `rejudge` without all samples, or another verifier judged them.
            RewardError: a reward that is no label.
        """
        missing = list(_missing(requests, samples.outcomes, self.sampler.chunk))
        if self.rejudge:
            if missing:
                raise ConfigError(
                    f"--rejudge: {samples.path} does not have all samples of these weights and "
                    "settings; first finish the evaluation without --rejudge, with the reward of "
                    "the existing samples"
                )
            assert self.config.reward is not None
            samples.rejudge(self.judge, self.config.reward.max_failure_frac)
        samples.check_verifier()
        if not missing:
            return

        self.sampler.load(folder, tokenizer)
        seeds = {request.id: request.seed for request in missing}
        verdicts: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
        num_pending = 0  # samples without a verdict
        started = time.perf_counter()
        num_tokens = 0
        num_done = sum(request.id in samples.outcomes for request in requests)

        def decode(ids: np.ndarray) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        def write(*, wait: bool) -> None:
            """Appends the judged samples to the file; with `wait`, all of them."""
            nonlocal num_done, num_pending
            while num_pending and (wait or not verdicts.empty()):
                [sample] = received(verdicts, 1)
                turns = turns_of(sample, decode) if sample.environment or sample.calls else []
                samples.append(sample, seeds[sample.id], turns)
                num_pending -= 1
                num_done += 1
            tokens_per_s = num_tokens / (time.perf_counter() - started)
            progress.advance(num_done, {"tokens/s": tokens_per_s})

        with Progress("eval", len(requests), done=num_done, unit="sample") as progress:
            for sample in self.sampler.stream(missing, prompts):
                num_tokens += sample.response_len
                # The batch of a missing sample also contains existing ones.
                if sample.id not in samples.outcomes:
                    decoded = replace(sample, text=response_text(sample, decode))
                    num_pending += 1
                    if sample.failure is not None:  # an agent's: there is nothing to judge
                        verdicts.put(decoded)
                    else:
                        self.judge.submit(decoded, prompts[sample.prompt_id], verdicts.put)
                write(wait=False)
            write(wait=True)


def _missing(
    requests: Sequence[SampleRequest], done: Mapping[str, Any], chunk: int
) -> Iterator[SampleRequest]:
    """The requests without an outcome, and those that the engine decodes in one batch with them.

    Args:
        requests: of the evaluation.
        done: sample id -> outcome.
        chunk: requests of a batch.
    """
    for start in range(0, len(requests), chunk):
        batch = requests[start : start + chunk]
        if any(request.id not in done for request in batch):
            yield from batch
