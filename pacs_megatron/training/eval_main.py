"""`pacs-megatron eval`: pass@k of a Hugging Face folder by the embedded engine. Starts no Megatron."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.safetensors_file import tensor_bytes
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.rollout_options import EmbeddedRollout
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Sample, SampleRequest, WeightReceiver
from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.convert.certificate import CERTIFICATE_NAME
from pacs_megatron.data import load_prompts, load_tokenizer
from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary
from pacs_megatron.errors import CheckpointError
from pacs_megatron.evaluation.benchmarks import Evaluation, evaluate
from pacs_megatron.evaluation.passk import aggregate
from pacs_megatron.observability.progress import Progress
from pacs_megatron.observability.rollout_log import write_rollouts
from pacs_megatron.rewards.pool import RewardPool
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.runtime.files import json_line, write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import run_folder
from pacs_megatron.runtime.run_lock import RunLock, refuse_if_locked
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)

RESULTS_NAME = "results.json"
SAMPLES_NAME = "samples.jsonl"


def run_eval(
    config_path: Path, overrides: Sequence[str], *, model: Path | None, out: Path | None, verify: bool = True
) -> str:
    """Evaluates `model` (default: model.path) on the configured benchmarks and returns a table to print.

    Writes results.json (the metrics, the counts of every problem, what was evaluated and how) and samples.jsonl to `out`
    (default: `<run folder>/eval`), at the end: a failed evaluation writes nothing. The draws are those of an evaluation
    at step 0 of a run with the same run.seed.

    Raises PacsError for a mistake that the user can fix.
    """
    loaded = load_config(config_path, overrides)
    config = loaded.config
    _check(loaded)
    run_dir = run_folder(loaded)
    if out is None:
        refuse_if_locked(run_dir)
    folder = HfFolder(config.model.path if model is None else model)
    started = time.perf_counter()
    tokenizer = load_tokenizer(str(folder.path), config.model.trust_remote_code)
    benchmarks = [load_prompts(benchmark, config.data, tokenizer) for benchmark in config.evaluation.benchmarks]
    engine = _engine(folder, config, Vocabulary.from_tokenizer(tokenizer, str(folder.path)))
    certified = certified_digests(folder) if verify else {}
    digest = push_folder(folder, engine, version=0, certified=certified)

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    assert config.reward is not None
    with RewardPool(config.reward) as pool:
        judge = Judge(
            pool, decode, threshold=config.reward.label_threshold, max_failure_frac=config.reward.max_failure_frac
        )
        evaluation = evaluate(
            benchmarks, _with_progress(engine.stream), judge, config.evaluation, run_seed=config.run.seed, step=0
        )
    target = run_dir / "eval" if out is None else out
    prompts = {prompt.id: prompt for benchmark in benchmarks for prompt in benchmark.prompts}
    facts = {
        "model": str(folder.path),
        "weights_digest": digest,
        "verified": bool(certified),
        "seconds": time.perf_counter() - started,
    }
    # A folder elsewhere needs no lock.
    with RunLock(run_dir, "eval") if out is None else nullcontext():
        write_rollouts(target / SAMPLES_NAME, evaluation.samples, prompts, decode)
        write_atomically(target / RESULTS_NAME, [_results_json(evaluation, config, facts)])
    return f"{table(evaluation, config.evaluation.k)}\n{target / RESULTS_NAME}"


@report_wait("for the weights to load")
def push_folder(
    folder: HfFolder, receiver: WeightReceiver, version: int, certified: Mapping[str, str] | None = None
) -> str:
    """Sends a folder's weights to `receiver` and returns their digest.

    Raises SyncError; CheckpointError for a tensor that differs from `certified`, its digest by name.
    """
    digest = WeightDigest()
    receiver.begin_update(version)
    for name in folder.names:
        tensor = folder.get(name)
        digest.update(name, tensor)
        expected = (certified or {}).get(name)
        if expected is not None and xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)) != expected:
            raise CheckpointError(
                f"{folder.path}: {name} was altered since the export (its digest is not that of {CERTIFICATE_NAME}); export "
                "again, or pass --no-verify"
            )
        receiver.put(name, tensor)
    receiver.end_update(digest.hexdigest())
    return digest.hexdigest()


def certified_digests(folder: HfFolder) -> dict[str, str]:
    """Tensor name -> xxh3-128, from the certificate that an export writes beside the weights; empty without one."""
    path = folder.path / CERTIFICATE_NAME
    if not path.is_file():
        return {}
    try:
        tensors = read_object(path, error=CheckpointError)["hf"]["tensors"]
        return {str(tensor["name"]): tensor["xxh3_128"] for tensor in tensors if tensor["xxh3_128"]}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); export again, or remove it") from None


def table(evaluation: Evaluation, ks: Sequence[int]) -> str:
    """One line a benchmark: problems, samples, pass@k with its standard error, lengths, truncated and unjudged responses."""
    header = ["benchmark", "problems", "samples", *(f"pass@{k}" for k in ks), "tokens", "cut", "unjudged"]
    rows = [header]
    for result in evaluation.results:
        values = {name.rsplit("/", 1)[1]: value for name, value in result.metrics.items()}
        estimates = [aggregate(result.problems, k) for k in ks]
        rows.append(
            [
                result.name,
                f"{values['num_problems']:.0f}",
                f"{values['num_samples']:.0f}",
                *(_with_error(estimate.mean, estimate.standard_error) for estimate in estimates),
                _number(values["len_mean"], ".1f"),
                _number(values["truncated_frac"], ".1%"),
                f"{values['num_unjudged']:.0f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _check(loaded: LoadedConfig) -> None:
    if not loaded.config.evaluation.benchmarks:
        raise loaded.fail("evaluation.benchmarks is empty, add a benchmark")
    if loaded.config.reward is None:
        raise loaded.fail("`reward` is missing, but an evaluation needs one; add it")


@report_wait("for the model to load")
def _engine(folder: HfFolder, config: RunConfig, vocabulary: Vocabulary) -> EmbeddedEngine:
    """The embedded engine of the configuration, or one with default options if it names another engine."""
    options = config.rollout.embedded
    if options is None:
        assert config.evaluation.sampling is not None
        options = EmbeddedRollout(engine="embedded", sampling=config.evaluation.sampling)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EmbeddedEngine(folder.path, options, vocabulary, device=device)


def _with_progress(
    stream: Callable[[Sequence[SampleRequest]], Iterable[Sample]],
) -> Callable[[Sequence[SampleRequest]], Iterator[Sample]]:
    def sample(requests: Sequence[SampleRequest]) -> Iterator[Sample]:
        started = time.perf_counter()
        num_tokens = 0
        with Progress("eval", len(requests)) as progress:
            for done, sample in enumerate(stream(requests), start=1):
                num_tokens += sample.response_len
                progress.advance(done, {"tokens/s": num_tokens / (time.perf_counter() - started)})
                yield sample

    return sample


def _results_json(evaluation: Evaluation, config: RunConfig, facts: dict[str, Any]) -> bytes:
    sampling = config.evaluation.sampling
    assert sampling is not None
    record = {
        **facts,
        "seed": config.run.seed,
        "samples_per_prompt": config.evaluation.samples_per_prompt,
        "sampling": sampling.model_dump(mode="json"),
        "reward": config.reward.name if config.reward is not None else None,
        "metrics": evaluation.metrics,
        "problems": {result.name: [asdict(problem) for problem in result.problems] for result in evaluation.results},
    }
    return json.dumps(json.loads(json_line(record)), indent=1).encode() + b"\n"


def _with_error(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
