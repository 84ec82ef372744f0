"""`pacs-megatron eval`: pass@k of Hugging Face folders and checkpoints of runs. Starts no Megatron."""

import itertools
import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.names import MANIFEST_NAME, newest_step, position_of
from pacs_megatron.config import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Prompt, Sample, SampleRequest
from pacs_megatron.convert.certificate import CERTIFICATE_NAME
from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf
from pacs_megatron.data import load_prompts, load_tokenizer, stop_token_ids
from pacs_megatron.errors import CheckpointError, ConfigError, RewardError
from pacs_megatron.models.hub import model_folder
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.observability.progress import Progress
from pacs_megatron.rewards.labels import check_failures
from pacs_megatron.rewards.pool import received
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.requests import evaluation_requests
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
from pacs_megatron.workbench.evaluation.results import harness_json, results_json, summarize, table
from pacs_megatron.workbench.evaluation.sample_file import SampleFile
from pacs_megatron.workbench.evaluation.samplers import EmbeddedSampler, ServerSampler, push_folder

logger = logging.getLogger(__name__)

RESULTS_NAME = "results.json"
HARNESS_NAME = "lm_eval_results.json"
_WORKER_OPTIONS = {"workers", "timeout_s", "memory_limit_gib", "max_failure_frac"}
"""Options of a reward that change no verdict"""


def run_eval(
    config_path: Path, overrides: Sequence[str], *, model: Sequence[str] = (), out: Path | None = None,
    verify: bool = True, rejudge: bool = False,
) -> str:  # fmt: skip
    """Evaluates the models (default: model.path) on the configured benchmarks and returns a table
    for each of them.

    A model is a Hugging Face folder or hub id, a run folder, or a checkpoint of a run, which is
    exported first. Writes results.json, lm_eval_results.json and the samples to `out` (default:
    `<run folder>/eval`); several models get one subfolder each. Samples are appended while
    sampling. The same command resumes an interrupted evaluation. Sample seeds equal those of a
    run's evaluation at step 0. `rejudge`: judges existing samples again. Raises PacsError.
    """
    setup_logging(None, 0)
    # Overrides may follow the list of models.
    models = [word for word in model if "=" not in word or Path(word).exists()]
    overrides = [*overrides, *(word for word in model if word not in models)]
    loaded = load_config(config_path, overrides)
    if not loaded.config.evaluation.benchmarks:
        raise loaded.fail("evaluation.benchmarks is empty, add a benchmark")
    if loaded.config.reward is None:
        raise loaded.fail("`reward` is missing, but an evaluation needs one; add it")
    config = loaded.config
    run_dir = run_folder(loaded)
    base = run_dir / "eval" if out is None else out
    check_distinct(map(Path, models))
    if out is None:
        check_not_locked(run_dir)
    folders = [_folder_of(model) for model in models or [config.model.path]]
    is_new = not base.exists()
    try:
        with RunLock(base, "eval"):
            return _evaluate(config, folders, base, verify=verify, rejudge=rejudge)
    finally:
        if is_new and [path.name for path in base.glob("*")] == [LOCK_FILE]:
            (base / LOCK_FILE).unlink()
            base.rmdir()


def _folder_of(model: str) -> HfFolder:
    """The Hugging Face folder of an argument; a checkpoint is exported to hf_exports/ of its run,
    once; it may be pruned then.
    """
    path = Path(model)
    if (path / CONFIG_FILE).is_file() and not (path / "config.json").exists():  # a run
        step = newest_step(path)
        if (path / "hf").is_dir() or step is None:
            return HfFolder(path / "hf")
        path = path / "checkpoints" / f"step_{step:06d}"
    target = path.absolute().parent.parent / "hf_exports" / path.name
    is_pruned = target.is_dir() and not path.is_dir()
    if position_of(path.name) is not None and (is_pruned or (path / MANIFEST_NAME).is_file()):
        if not target.exists():
            logger.info("exporting %s to %s", path, target)
            megatron_to_hf(path, ConversionOptions(out=target), step=None)
        path = target
    return HfFolder(model_folder(str(path), "--model"))


def _names(folders: Sequence[HfFolder]) -> list[str]:
    """A name for each model's results: the end of its path, without parts that all runs share."""
    names: list[str] = []
    for folder in folders:
        parts = [
            part
            for part in folder.path.resolve().parts
            if part not in ("hf", "hf_exports", "snapshots")
        ]
        name = "-".join(parts[-2:] if position_of(parts[-1]) is not None else parts[-1:])
        numbered = (f"{name}-{number}" for number in itertools.count(len(names) + 1))
        names.append(next(each for each in itertools.chain([name], numbered) if each not in names))
    return names


def _evaluate(
    config: RunConfig, folders: Sequence[HfFolder], base: Path, *, verify: bool, rejudge: bool
) -> str:
    """The tables of all models, one after the other."""
    servers = config.rollout.sglang
    truncated = config.admission.truncated
    assert config.reward is not None
    sampler = (
        EmbeddedSampler(config)
        if servers is None
        else ServerSampler(servers, config.model, base / "servers")
    )
    texts = []
    with (
        Judge(config.reward, lambda ids: "", truncated=truncated) as judge,
        sampler,
    ):  # texts come with the samples
        evaluation = _Evaluation(config, sampler, judge, verify, rejudge)
        for folder, name in zip(folders, _names(folders), strict=True):
            if len(folders) == 1:
                return evaluation.run(folder, base)
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
        config = self.config
        started = time.perf_counter()
        options = config.evaluation
        sampling = config.evaluation.sampling
        reward = config.reward
        assert sampling is not None and reward is not None
        tokenizer = load_tokenizer(str(folder.path), config.model.trust_remote_code)
        sets = [load_prompts(benchmark, config.data, tokenizer) for benchmark in options.benchmarks]
        prompts = {prompt.id: prompt for found in sets for prompt in found.prompts}
        requests = evaluation_requests(options, sets, run_seed=config.run.seed, step=0)
        certified = certified_digests(folder) if self.verify else {}
        template = {"template": tokenizer.chat_template, "args": config.data.chat_template_args}
        template |= {"system": config.data.system_prompt, "suffix": config.data.prompt_suffix}
        produced_by = {  # every setting that changes a response to a problem
            "weights": push_folder(folder, None, 0, certified),
            **self.sampler.describe(),
            "seed": config.run.seed,
            "sampling": sampling.model_dump(mode="json"),
            "prompt": xxhash.xxh3_128_hexdigest(json_line(template)),
            "stop_token_ids": list(stop_token_ids(tokenizer, str(folder.path))),
        }
        rule = reward.model_dump(mode="json", exclude=_WORKER_OPTIONS)
        judged_by = {f"reward.{key}": value for key, value in rule.items()}
        judged_by["admission.truncated"] = config.admission.truncated
        check_output(
            target / HARNESS_NAME, b'{\n  "results": '
        )  # before --rejudge replaces the samples
        check_output(target / RESULTS_NAME, b'{\n "model": ')
        with SampleFile(target, produced_by, judged_by, prompts) as samples:
            self._complete(samples, requests, prompts, folder, tokenizer)
            outcomes = [samples.outcomes[request.id] for request in requests]
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        check_failures(
            failures,
            len(outcomes),
            reward.max_failure_frac,
            then=f", and pass --rejudge ({samples.path})",
        )
        results = summarize(options, sets, requests, samples.outcomes)
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
        }
        files = {
            HARNESS_NAME: harness_json(results, facts),
            RESULTS_NAME: results_json(results, facts),
        }
        write_outputs([(target / name, content) for name, content in files.items()])
        return f"{table(results)}\n{target / RESULTS_NAME}"

    def _complete(
        self, samples: SampleFile, requests: Sequence[SampleRequest], prompts: Mapping[str, Prompt], folder: HfFolder,
        tokenizer: Any,
    ) -> None:  # fmt: skip
        """Samples and judges the samples that the file lacks.

        Raises RewardError for a reward that is no label.
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
        answers: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
        texts: dict[str, str] = {}
        started = time.perf_counter()
        num_tokens = 0
        done = sum(request.id in samples.outcomes for request in requests)

        def write(*, wait: bool) -> None:
            nonlocal done
            while texts and (wait or not answers.empty()):
                [answer] = received(answers, 1)
                samples.append(answer, seeds[answer.id], texts.pop(answer.id))
                done += 1
            progress.advance(done, {"tokens/s": num_tokens / (time.perf_counter() - started)})

        with Progress("eval", len(requests), done=done) as progress:
            for sample in self.sampler.stream(missing):
                num_tokens += sample.response_len
                if sample.id not in samples.outcomes:
                    text = str(
                        tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
                    )
                    texts[sample.id] = text
                    self.judge.submit(sample, prompts[sample.prompt_id], answers.put, text)
                write(wait=False)
            write(wait=True)


def _missing(
    requests: Sequence[SampleRequest], done: Mapping[str, Any], chunk: int
) -> Iterator[SampleRequest]:
    """The requests without an outcome, and those that the engine decodes in one batch with them."""
    for start in range(0, len(requests), chunk):
        batch = requests[start : start + chunk]
        if any(request.id not in done for request in batch):
            yield from batch


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
