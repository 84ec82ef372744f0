"""Training prompts in order, with sample requests for them or with the data's solutions as samples."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, Span, Stop
from pacs_megatron.data import PromptOrder, load_prompts, stop_token_ids
from pacs_megatron.data.prompts import PromptSet, as_plain_text, control_tokens, digest_of, tokenize
from pacs_megatron.errors import DataError
from pacs_megatron.rollout.requests import sample_requests
from pacs_megatron.rollout.step_rollouts import StepRollouts

logger = logging.getLogger(__name__)


class TrainData:
    def __init__(self, config: RunConfig, model_dir: Path, tokenizer: Any) -> None:
        """Raises DataError if the data cannot be read or have no prompt to train on."""
        self._config = config
        self._tokenizer = tokenizer
        self._demonstrations: dict[str, np.ndarray] = {}
        loaded = load_prompts(config.data.train, config.data, tokenizer)
        if loaded.num_too_long:
            limit = f"data.max_prompt_tokens={config.data.max_prompt_tokens} tokens"
            counts = loaded.num_too_long, loaded.num_rows
            logger.info("%s: %d of %d prompts dropped: more than %s", loaded.name, *counts, limit)
        self.prompts = loaded.prompts
        if not config.rollout.is_sampled:
            self._demonstrations = self._encode(
                loaded, config.rollout.sampling.max_response_tokens, model_dir
            )
            self.prompts = tuple(p for p in loaded.prompts if p.id in self._demonstrations)
            if not self.prompts:
                limit = f"rollout.max_response_tokens={config.rollout.sampling.max_response_tokens}"
                raise DataError(
                    f"{config.data.train.path}: no demonstration fits {limit}; raise it"
                )
            if dropped := len(loaded.prompts) - len(self.prompts):
                logger.info("%s: %d demonstrations dropped: too long", loaded.name, dropped)
        self.by_id = {prompt.id: prompt for prompt in self.prompts}
        self._number_of = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        digest = digest_of(self.prompts)
        self.order = PromptOrder(len(self.prompts), config.run.seed, config.data.shuffle, digest)

    def take(self, step: int) -> StepRollouts:
        """The rollouts of `step` for the next prompts; demonstrations are complete at once."""
        config = self._config
        wanted = config.batch.prompts_per_step
        indices = self.order.take(math.ceil(wanted * config.admission.oversample))
        prompts = tuple(self.prompts[k] for k in indices)
        demonstrated = {sample.id: sample for sample in self._demonstrated(prompts, step)}
        return StepRollouts(
            step=step,
            prompts=prompts,
            requests=tuple(self.requests(prompts, step)),
            epoch=self.order.epoch,
            enough=wanted if len(prompts) > wanted or config.admission.refill_rounds else None,
            sampled=demonstrated,
            judged=set(demonstrated),
        )

    def refill(self, rollouts: StepRollouts, num_missing: int) -> tuple[Prompt, ...]:
        """New prompts for `num_missing` groups of a step; empty if the step has all prompts of the
        data.
        """
        wanted = math.ceil(num_missing * self._config.admission.oversample)
        taken = self.order.take(min(wanted + len(rollouts.prompts), len(self.prompts)))
        new = [k for k in taken if self.prompts[k].id not in rollouts.by_id][:wanted]
        self.order.put_back([k for k in taken if k not in new])
        return tuple(self.prompts[k] for k in new)

    def put_back(self, prompt_ids: Sequence[str]) -> None:
        """Returns the prompts of incomplete groups; they come first in the next step."""
        self.order.put_back([self._number_of[prompt_id] for prompt_id in prompt_ids])

    def requests(self, prompts: Sequence[Prompt], step: int) -> list[SampleRequest]:
        """One request for each sample of a group; none for demonstrations."""
        config = self._config
        if not config.rollout.is_sampled:
            return []
        sampling = config.rollout.sampling
        num = config.batch.samples_per_prompt
        return sample_requests(prompts, num, sampling, run_seed=config.run.seed, step=step)

    def _encode(self, loaded: PromptSet, limit: int, model_dir: Path) -> dict[str, np.ndarray]:
        """Prompt id -> int32 response ids with the end-of-sequence token; over-long solutions are
        dropped.

        Special tokens in a solution stay text, as in a problem.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            end = stop_token_ids(self._tokenizer, str(model_dir))[0]
        found = {}
        controls = control_tokens(self._tokenizer)
        for prompt in loaded.prompts:
            if not prompt.solution:
                raise DataError(
                    f"{self._config.data.train.path}: prompt {prompt.id} has no solution to train "
                    "on; name the column with data.train.columns.solution"
                )
            [ids] = tokenize([as_plain_text(prompt.solution, controls)], self._tokenizer)
            if len(ids) < limit:
                found[prompt.id] = np.array([*ids, end], dtype=np.int32)
        return found

    def _demonstrated(self, prompts: Sequence[Prompt], step: int) -> list[Sample]:
        pairs = [(p, self._demonstrations[p.id]) for p in prompts if p.id in self._demonstrations]
        return [
            Sample(
                id=f"{step}:{prompt.id}#0",
                prompt_id=prompt.id,
                token_ids=np.concatenate([prompt.token_ids, response]),
                prompt_len=len(prompt.token_ids),
                sampler_logprobs=np.zeros(len(response), dtype=np.float32),
                spans=(Span(version=0, digest="demonstration", start=0, end=len(response)),),
                stop=Stop.EOS,
                label=1,
            )
            for prompt, response in pairs
        ]
