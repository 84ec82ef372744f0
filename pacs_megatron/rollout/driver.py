"""The driver: one process beside global rank 0, with its own GIL. It owns prompt order, requests, rewards and admission.

Concurrency: rank 0 asks one question at a time over a socket and gets one final answer; for the embedded engine the
driver asks back (`generate`) in between. The driver ends when the socket closes, and the kernel ends it when rank 0 dies.
It ignores SIGINT, SIGTERM and SIGUSR1: rank 0 turns signals into decisions and then closes the socket.
"""

import ctypes
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.batching.tables import facts_to_arrays, tabulate, tokens_to_arrays
from pacs_megatron.config import load_config
from pacs_megatron.config.schema import DemonstrationRollout, RunConfig, SglangRollout
from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest, Span, Stop
from pacs_megatron.data import PromptOrder, load_prompts, load_tokenizer, stop_token_ids
from pacs_megatron.data.prompts import PromptSet
from pacs_megatron.errors import DataError, PacsError, RolloutError
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.observability.rollout_log import rollout_path, write_rollouts
from pacs_megatron.rewards.pool import RewardPool
from pacs_megatron.rollout.admission import admit, shuffle_labels
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.rollout.requests import sample_requests
from pacs_megatron.rollout.sample_arrays import Message, requests_to_message, samples_from_message
from pacs_megatron.rollout.sglang import open_engine
from pacs_megatron.rollout.sglang_client import SglangEngine
from pacs_megatron.rollout.sglang_fleet import Health
from pacs_megatron.rollout.wire import Connection

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


class Driver:
    """Answers rank 0's questions."""

    def __init__(self, config: RunConfig, run_dir: Path, model_dir: Path, connection: Connection) -> None:
        self._config = config
        self._run_dir = run_dir
        self._connection = connection
        self._model_dir = model_dir
        self._tokenizer = load_tokenizer(str(model_dir), config.model.trust_remote_code)
        self._train = self._load_train()
        self._benchmarks = [load_prompts(b, config.data, self._tokenizer) for b in config.evaluation.benchmarks]
        self._order = PromptOrder(len(self._train.prompts), config.run.seed, config.data.shuffle)
        self._known: set[str] = set()
        self._engine: SglangEngine | None = None
        self._judge: Judge | None = None
        self._pool: RewardPool | None = None
        if config.reward is not None:
            self._pool = RewardPool(config.reward)
            self._judge = Judge(
                self._pool,
                self._decode,
                threshold=config.reward.label_threshold,
                max_failure_frac=config.reward.max_failure_frac,
            )

        if isinstance(config.rollout, SglangRollout):
            model = config.model.model_copy(update={"path": str(model_dir)})
            self._engine = open_engine(config.rollout, model, run_dir / "servers")

    def close(self) -> None:
        """End workers and own servers."""
        if self._engine is not None:
            self._engine.close()
        if self._pool is not None:
            self._pool.close()

    def _decode(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    # ---------------------------------------------------------------------------------------------------------- data
    def _load_train(self) -> PromptSet:
        config = self._config
        loaded = load_prompts(config.data.train, config.data, self._tokenizer)
        if loaded.num_too_long:
            logger.info(
                "%s: %d of %d prompts dropped: more than data.max_prompt_tokens=%d tokens",
                loaded.name,
                loaded.num_too_long,
                loaded.num_rows,
                config.data.max_prompt_tokens,
            )
        if isinstance(config.rollout, DemonstrationRollout):
            self._demonstrations = self._encode_demonstrations(loaded, config.rollout.max_response_tokens)
            kept = tuple(p for p in loaded.prompts if p.id in self._demonstrations)
            if not kept:
                raise DataError(
                    f"{config.data.train.path}: no demonstration fits rollout.max_response_tokens="
                    f"{config.rollout.max_response_tokens}; raise it"
                )
            if len(kept) < len(loaded.prompts):
                logger.info("%s: %d demonstrations dropped: too long", loaded.name, len(loaded.prompts) - len(kept))
            return PromptSet(
                name=loaded.name,
                prompts=kept,
                num_rows=loaded.num_rows,
                num_too_long=loaded.num_rows - len(kept),
                num_duplicates=loaded.num_duplicates,
            )
        return loaded

    def _encode_demonstrations(self, loaded: PromptSet, limit: int) -> dict[str, np.ndarray]:
        """Prompt id -> int32 response ids, ended by the end-of-sequence token; over-long ones are left out."""
        end = self._tokenizer.eos_token_id
        if end is None:
            end = stop_token_ids(self._tokenizer, str(self._model_dir))[0]
        found = {}
        for prompt in loaded.prompts:
            if not prompt.solution:
                raise DataError(
                    f"{self._config.data.train.path}: prompt {prompt.id} has no solution to learn from; name the column "
                    "with data.train.columns.solution"
                )
            ids = self._tokenizer(prompt.solution, add_special_tokens=False)["input_ids"]
            if len(ids) < limit:
                found[prompt.id] = np.array([*ids, end], dtype=np.int32)
        return found

    # ------------------------------------------------------------------------------------------------------ sampling
    def _sample(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> Iterator[Sample]:
        """Samples as they arrive. Raises RolloutError for one whose weights this run did not send."""
        found = self._from_ranks(prompts, requests) if self._engine is None else self._engine.stream(requests)
        for sample in found:
            unknown = {span.digest for span in sample.spans} - self._known
            if unknown:
                raise RolloutError(
                    f"sample {sample.id} comes from weights with digest {min(unknown)}, which this run never sent; "
                    "restart the rollout servers"
                )
            yield sample

    def _from_ranks(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> list[Sample]:
        """Embedded engine: the ranks sample, and rank 0 sends what they found."""
        header, arrays = requests_to_message(prompts, requests)
        self._connection.send({"kind": "generate", **header}, arrays)
        header, arrays = self._connection.receive()
        return samples_from_message(header, arrays)

    def begin_update(self) -> Message:
        """Nothing is asked of the servers from here to `set_current`; the servers that take the update."""
        assert self._engine is not None
        self._engine.begin_update()
        status = self._engine.status()
        urls = [server.url for server in status if server.health is not Health.DEAD]
        if not urls:
            raise RolloutError("no rollout server is alive: " + "; ".join(f"{s.url}: {s.reason}" for s in status))
        return {"kind": "updating", "urls": urls}, {}

    def set_current(self, version: int, digest: str) -> Message:
        """Samples of these weights are accepted from now on, and of no others."""
        self._known = {digest}
        if self._engine is not None:
            self._engine.set_current(version, digest)
        return {"kind": "current"}, {}

    def _demonstrated(self, prompts: Sequence[Prompt], step: int) -> list[Sample]:
        samples = []
        for prompt in prompts:
            response = self._demonstrations[prompt.id]
            samples.append(
                Sample(
                    id=f"{step}:{prompt.id}#0",
                    prompt_id=prompt.id,
                    token_ids=np.concatenate([prompt.token_ids, response]),
                    prompt_len=len(prompt.token_ids),
                    sampler_logprobs=np.zeros(len(response), dtype=np.float32),
                    spans=(Span(version=0, digest="demonstration", start=0, end=len(response)),),
                    stop=Stop.EOS,
                    reward=1.0,
                    label=1,
                )
            )
        return samples

    # --------------------------------------------------------------------------------------------------------- steps
    def rollout(self, step: int) -> Message:
        """The judged and admitted samples of a step."""
        config = self._config
        started = time.perf_counter()
        prompts = [self._train.prompts[k] for k in self._order.take(config.batch.prompts_per_step)]
        by_id = {prompt.id: prompt for prompt in prompts}
        if isinstance(config.rollout, DemonstrationRollout):
            judged = self._demonstrated(prompts, step)
        else:
            assert self._judge is not None
            requests = sample_requests(
                prompts,
                config.batch.samples_per_prompt,
                config.rollout.sampling,
                run_seed=config.run.seed,
                step=step,
                purpose="train",
            )
            judged = self._judge.judge(self._sample(prompts, requests), by_id)
        groups = _group(judged, [prompt.id for prompt in prompts])
        admitted = admit(groups, config.admission, min_group_size=1 if config.objective.name == "sft" else 2)
        kept = admitted.groups
        if config.data.shuffle_labels:
            kept = shuffle_labels(kept, seed=config.run.seed, step=step)
        if config.logging.save_rollouts and not isinstance(config.rollout, DemonstrationRollout):
            write_rollouts(rollout_path(self._run_dir, step), judged, by_id, self._decode)
        facts, tokens = tabulate(kept)
        arrays = {f"facts.{name}": value for name, value in facts_to_arrays(facts).items()}
        arrays |= {f"tokens.{name}": value for name, value in tokens_to_arrays(tokens).items()}
        metrics = _rollout_metrics(judged, admitted.counts) | {"data/epoch": float(self._order.epoch)}
        logger.info("step %d: %d samples in %.2f s", step, len(judged), time.perf_counter() - started)
        return {"kind": "groups", "metrics": metrics}, arrays

    def evaluate(self, step: int) -> Message:
        """Counts of every benchmark's problems."""
        config = self._config
        assert config.evaluation.sampling is not None and self._judge is not None
        prompts = [prompt for benchmark in self._benchmarks for prompt in benchmark.prompts]
        by_id = {prompt.id: prompt for prompt in prompts}
        requests = sample_requests(
            prompts,
            config.evaluation.samples_per_prompt,
            config.evaluation.sampling,
            run_seed=config.run.seed,
            step=step,
            purpose="eval",
        )
        judged = self._judge.judge(self._sample(prompts, requests), by_id)
        if config.logging.save_rollouts:
            write_rollouts(rollout_path(self._run_dir, step, "eval"), judged, by_id, self._decode)
        per_prompt: dict[str, list[Sample]] = {prompt.id: [] for prompt in prompts}
        for sample in judged:
            per_prompt[sample.prompt_id].append(sample)
        return {
            "kind": "evaluation",
            "benchmarks": {
                benchmark.name: [_counts(prompt.id, per_prompt[prompt.id]) for prompt in benchmark.prompts]
                for benchmark in self._benchmarks
            },
        }, {}

    # --------------------------------------------------------------------------------------------------------- serve
    def serve(self) -> None:
        """Answer until rank 0 says `close`. A PacsError becomes an answer; anything else ends the process."""
        self._connection.send({"kind": "ready", "num_prompts": len(self._train.prompts)})
        while True:
            question, _ = self._connection.receive()
            match question["op"]:
                case "close":
                    return
                case "state":
                    self._connection.send({"kind": "state", "order": self._order.state_dict()})
                case "load_state":
                    self._answer(partial(self.load_state, question["order"]))
                case "begin_update":
                    self._answer(self.begin_update)
                case "set_current":
                    self._answer(partial(self.set_current, question["version"], question["digest"]))
                case "rollout":
                    self._answer(partial(self.rollout, question["step"]))
                case "evaluate":
                    self._answer(partial(self.evaluate, question["step"]))

    def load_state(self, state: dict[str, Any]) -> Message:
        """Continue where a checkpoint was taken."""
        self._order.load_state_dict(state)
        return {"kind": "loaded"}, {}

    def _answer(self, compute: Callable[[], Message]) -> None:
        try:
            header, arrays = compute()
        except PacsError as error:
            logger.exception("told to the trainer")
            self._connection.send({"kind": "error", "type": type(error).__name__, "message": str(error)})
            return
        self._connection.send(header, arrays)


def _group(samples: Sequence[Sample], prompt_ids: Sequence[str]) -> list[Group]:
    members: dict[str, list[Sample]] = {prompt_id: [] for prompt_id in prompt_ids}
    for sample in samples:
        members[sample.prompt_id].append(sample)
    return [
        Group(prompt_id=prompt_id, samples=tuple(sorted(found, key=lambda s: _index_of(s.id))))
        for prompt_id, found in members.items()
    ]


def _index_of(sample_id: str) -> int:
    return int(sample_id.rsplit("#", 1)[1])


def _counts(prompt_id: str, samples: Sequence[Sample]) -> dict[str, Any]:
    judged = [s for s in samples if s.failure is None]
    return {
        "id": prompt_id,
        "samples": len(judged),
        "correct": sum(s.label == 1 for s in judged),
        "unjudged": len(samples) - len(judged),
        "truncated": sum(s.stop is Stop.LENGTH for s in samples),
        "tokens": sum(s.response_len for s in samples),
    }


def _rollout_metrics(samples: Sequence[Sample], dropped: dict[str, int]) -> dict[str, float]:
    """Means over the judged samples of the step (before admission), lengths over all of them."""
    judged = [s for s in samples if s.failure is None]
    lens = np.array([s.response_len for s in samples], dtype=np.float64)
    metrics = {
        "response/len_mean": float(lens.mean()),
        "response/len_max": float(lens.max()),
        "response/truncated_frac": float(np.mean([s.stop is Stop.LENGTH for s in samples])),
        "response/tokens": float(lens.sum()),
    }
    if judged:
        metrics["reward/mean"] = float(np.mean([s.reward for s in judged]))
        metrics["reward/label_mean"] = float(np.mean([s.label for s in judged]))
    return metrics | {f"admission/dropped_{name}": float(count) for name, count in dropped.items()}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """`python -m pacs_megatron.rollout.driver <run folder> <model folder> <socket fd>`: started by rank 0 only."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # Slurm signals every process of a step
        signal.signal(number, signal.SIG_IGN)
    run_dir, model_dir, fd = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    setup_logging(None, 0)
    connection = Connection(socket.socket(fileno=fd), "trainer")
    config = load_config(run_dir / "config.yaml").config
    try:
        driver = Driver(config, run_dir, model_dir, connection)
    except PacsError as error:
        connection.send({"kind": "error", "type": type(error).__name__, "message": str(error)})
        return int(error.exit_code)
    try:
        driver.serve()
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
