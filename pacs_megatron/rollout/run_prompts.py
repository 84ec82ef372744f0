"""The prompts of a run: training data and benchmarks, the same in every attempt.

`prompts.json` in the run folder has the time of the first attempt, which a chat template may print,
and the notices about the data, for `status`. A checkpoint has the digests of what later attempts
compare: the benchmarks' problems and the reward (`RunPrompts.position`).
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from pacs_megatron.agents.files import agent_digests
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.data import PromptSet, load_prompts
from pacs_megatron.data.notices import check_dropped, notices, train_notices
from pacs_megatron.data.prompts import digest_of
from pacs_megatron.errors import DataError
from pacs_megatron.models import load_spec
from pacs_megatron.rewards.custom import file_digests
from pacs_megatron.rollout.requests import max_benchmark_prompt
from pacs_megatron.rollout.train_data import TrainData
from pacs_megatron.runtime.files import is_file, json_line, write_atomically
from pacs_megatron.runtime.json_reader import parsing, read_object
from pacs_megatron.runtime.run_folder import PROMPTS_FILE

_WORKER_OPTIONS = {"workers", "timeout_s", "memory_limit_gib", "max_failure_frac"}
"""Options of a reward that change no verdict"""
_AGENT_WORKER_OPTIONS = {"workers", "tool_workers", "memory_limit_gib"}
"""Options of an agent that change no trajectory within the limits"""
_REWARD = "reward"
_AGENT = "agent"
_BENCHMARKS = "benchmarks"


class RunPrompts:
    """Training data, benchmarks, and the notices about them."""

    def __init__(self, config: RunConfig, run_dir: Path, model_dir: Path, tokenizer: Any) -> None:
        """Loads the data, and writes `prompts.json` if the run has none.

        `load_position` writes it again: an attempt with other data changes nothing.

        Args:
            config: of the run.
            run_dir: the run folder.
            model_dir: the folder with config.json.
            tokenizer: of the model.

        Raises:
            DataError: the data or `prompts.json` is malformed, or too many rows are dropped.
        """
        now = first_time(run_dir)
        self.now = now
        """the time that the chat template prints"""
        self.train = TrainData(config, model_dir, tokenizer, now)
        max_context = load_spec(model_dir).max_context
        self.benchmarks = load_benchmarks(config, max_context, tokenizer, now)
        self.notices = train_notices(self.train.sets, now)
        for benchmark in self.benchmarks:
            check_dropped(benchmark, config.data)
            self.notices += notices(benchmark, now, train=self.train.sets)

        record = {"time": now.isoformat(), "notices": self.notices}
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        self._content = text.encode("utf-8", "backslashreplace")
        self._file = run_dir / PROMPTS_FILE
        if not is_file(self._file) or not any(run_dir.glob("checkpoints/*/manifest.json")):
            write_atomically(self._file, [self._content])

        self._digests: dict[str, Any] = {
            _REWARD: reward_digest(config),
            _BENCHMARKS: {each.name: digest_of(each.prompts) for each in self.benchmarks},
        }
        agents = config.rollout.agents
        if agents is not None:
            self._digests[_AGENT] = _agent_digest(agents)

    def position(self) -> dict[str, Any]:
        """The position in the data and the digests, for a checkpoint."""
        return {**self.train.order.state_dict(), **self._digests}

    def load_position(self, saved: Mapping[str, Any]) -> list[str]:
        """Continues at `saved` and returns a line for each change since then.

        A checkpoint of an earlier release has no digests, and nothing is compared.

        Raises CheckpointError if it belongs to other data.
        """
        self.train.order.load_state_dict(saved)
        write_atomically(self._file, [self._content])
        lines = []
        if self.has_other_reward(saved):
            lines.append(
                "the reward changed since the checkpoint (its options, or the file of "
                "reward.function or a module beside it): rewards and labels before and after it "
                "differ; samples of steps that are not trained yet are judged again"
            )
        if saved.get(_AGENT, self._digests.get(_AGENT)) != self._digests.get(_AGENT):
            lines.append(
                "the agent changed since the checkpoint (its options, its file, a module beside "
                "it, or a tool): trajectories before and after it differ"
            )
        before = saved.get(_BENCHMARKS, {})
        for name, digest in self._digests[_BENCHMARKS].items():
            if before.get(name, digest) != digest:
                lines.append(
                    f"{name}: the problems, the chat template or the tokenizer changed since the "
                    f"checkpoint, so eval/{name}/* before and after it cannot be compared"
                )
        return lines

    def has_other_reward(self, saved: Mapping[str, Any]) -> bool:
        """Whether another reward judged the samples of the checkpoint."""
        before = saved.get(_REWARD, self._digests[_REWARD])
        return bool(before != self._digests[_REWARD])


def load_benchmarks(
    config: RunConfig, max_context: int, tokenizer: Any, now: datetime
) -> list[PromptSet]:
    """The problems of every benchmark that fit into the model's context.

    Args:
        config: of the run.
        max_context: context of the model, tokens.
        tokenizer: of the model.
        now: time that the chat template prints.

    Raises:
        DataError: same as `load_prompts`.
    """
    max_tokens = max_benchmark_prompt(config, max_context)
    return [
        load_prompts(benchmark, config.data, tokenizer, now=now, max_tokens=max_tokens)
        for benchmark in config.evaluation.benchmarks
    ]


def first_time(run_dir: Path) -> datetime:
    """The time of the run's first attempt, local and in whole seconds; the current one before it.

    Raises DataError if `prompts.json` is malformed.
    """
    file = run_dir / PROMPTS_FILE
    if not is_file(file):
        return datetime.now().replace(microsecond=0)
    with parsing(str(file), DataError):
        return datetime.fromisoformat(read_object(file)["time"])


def reward_digest(config: RunConfig) -> str | None:
    """Digest of every option that changes a verdict, and of the reward function's code."""
    if config.reward is None:
        return None
    rule = config.reward.model_dump(mode="json", exclude=_WORKER_OPTIONS)
    record = {"rule": rule, "files": file_digests(config.reward)}
    return xxhash.xxh3_128_hexdigest(json_line(record))


def _agent_digest(options: AgentOptions) -> str:
    """Digest of every option that changes a trajectory, and of the code of agent and tools."""
    rule = options.model_dump(mode="json", exclude=_AGENT_WORKER_OPTIONS)
    return xxhash.xxh3_128_hexdigest(json_line({"rule": rule, "files": agent_digests(options)}))
