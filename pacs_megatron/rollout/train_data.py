"""Training prompts in order, with sample requests or with the data's solutions as samples.

With a rollout engine a prompt gives `batch.samples_per_prompt` requests. Without one, the data's
solution is the only sample of its prompt, with label 1: a demonstration.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import RunConfig, TrainOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, Span, Stop
from pacs_megatron.data import (
    Ingredient,
    MixedOrder,
    PromptOrder,
    PromptSet,
    ResponseRules,
    end_tokens,
    load_prompts,
)
from pacs_megatron.data.notices import check_dropped
from pacs_megatron.data.prompts import digest_of
from pacs_megatron.data.repeats import num_repeated
from pacs_megatron.rollout.requests import sample_requests
from pacs_megatron.rollout.step_rollouts import StepRollouts

logger = logging.getLogger(__name__)


def load_train(
    config: RunConfig,
    dataset: TrainOptions,
    model_dir: Path,
    tokenizer: Any,
    now: datetime | None = None,
) -> PromptSet:
    """The prompts of a training set, with the solutions as responses if none are sampled.

    Args:
        config: of the run.
        dataset: one of `config.data.train_sets`.
        model_dir: the folder with config.json, for the stop tokens.
        tokenizer: of the model.
        now: time that the chat template prints; None: the current one.

    Raises:
        DataError: same as `load_prompts`.
    """
    responses = None
    if not config.rollout.is_sampled:
        responses = ResponseRules(
            ends=end_tokens(tokenizer, str(model_dir)),
            max_tokens=config.rollout.sampling.max_response_tokens,
        )
    return load_prompts(dataset, config.data, tokenizer, now=now, responses=responses)


class TrainData:
    """The training data of a run, and the position in it."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        tokenizer: Any,
        now: datetime | None = None,
    ) -> None:
        """Loads the data and starts at the first prompt of the first epoch.

        Args:
            config: of the run.
            model_dir: the folder with config.json, for the stop tokens.
            tokenizer: of the model.
            now: time that the chat template prints; None: the current one.

        Raises:
            DataError: if the data cannot be read, have no prompt to train on, or too many rows are
                dropped.
        """
        self._config = config
        datasets = config.data.train_sets
        self.sets = [load_train(config, each, model_dir, tokenizer, now) for each in datasets]
        prompts: list[Prompt] = []
        self._demonstrations: dict[str, np.ndarray] = {}
        for loaded in self.sets:
            if loaded.num_filtered:
                logger.info(
                    "%s: %d rows used, %d outside `where`",
                    loaded.name,
                    loaded.num_rows,
                    loaded.num_filtered,
                )
            check_dropped(loaded, config.data)
            prompts += loaded.prompts
            if loaded.demonstrations is not None:
                self._demonstrations |= loaded.demonstrations.token_ids

        self.prompts = tuple(prompts)
        self.repeats_problems = num_repeated(self.prompts) > 0
        self.by_id = {prompt.id: prompt for prompt in self.prompts}
        self._number_of = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        self.order = _order(config, self.sets)

    def take(self, step: int) -> StepRollouts:
        """The rollouts of `step` for the next prompts; demonstrations are complete at once.

        With over-sampling it takes more prompts than the step needs.

        Raises ConfigError if the data has fewer prompts.
        """
        config = self._config
        num_required = config.batch.prompts_per_step
        indices = self.order.take(math.ceil(num_required * config.admission.oversample))
        prompts = tuple(self.prompts[k] for k in indices)

        # Only over-sampling and refills end a step before all of its groups are admitted.
        can_have_surplus = len(prompts) > num_required or config.admission.refill_rounds
        demonstrations = {sample.id: sample for sample in self._samples(prompts, step)}
        return StepRollouts(
            step=step,
            prompts=prompts,
            requests=tuple(self.requests(prompts, step)),
            epoch=self.order.epoch,
            enough=num_required if can_have_surplus else None,
            sampled=demonstrations,
            judged=set(demonstrations),
        )

    def refill(self, rollouts: StepRollouts, num_missing: int) -> tuple[Prompt, ...]:
        """New prompts for `num_missing` groups of a step; empty if the step has all prompts of the
        data.
        """
        num_new = math.ceil(num_missing * self._config.admission.oversample)
        in_step = {self._number_of[prompt.id] for prompt in rollouts.prompts}
        return tuple(self.prompts[k] for k in self.order.take_others(num_new, in_step))

    def put_back(self, prompt_ids: Sequence[str]) -> None:
        """Returns the prompts of incomplete groups; they come first in the next step."""
        self.order.put_back([self._number_of[prompt_id] for prompt_id in prompt_ids])

    def requests(
        self, prompts: Sequence[Prompt], step: int, extra: Mapping[str, int] | None = None
    ) -> list[SampleRequest]:
        """One request for each sample of a group; none for demonstrations.

        Args:
            extra: further samples by prompt id (`admission.resample`); None: none.
        """
        config = self._config
        if not config.rollout.is_sampled:
            return []
        num_samples = config.batch.samples_per_prompt
        by_prompt = {prompt.id: num_samples for prompt in prompts}
        for prompt_id, number in (extra or {}).items():
            by_prompt[prompt_id] = num_samples + number
        return sample_requests(
            prompts,
            by_prompt,
            config.rollout.sampling,
            run_seed=config.run.seed,
            step=step,
        )

    def _samples(self, prompts: Sequence[Prompt], step: int) -> list[Sample]:
        """The demonstrations of `prompts` as judged samples; empty if responses are sampled."""
        samples = []
        for prompt in prompts:
            response = self._demonstrations.get(prompt.id)
            if response is None:
                continue
            span = Span(version=0, digest="demonstration", start=0, end=len(response))
            sample = Sample(
                id=f"{step}:{prompt.id}#0",
                prompt_id=prompt.id,
                token_ids=np.concatenate([prompt.token_ids, response]),
                prompt_len=len(prompt.token_ids),
                sampler_logprobs=np.zeros(len(response), dtype=np.float32),
                spans=(span,),
                stop=Stop.EOS,
                label=1,
            )
            samples.append(sample)
        return samples


def _order(config: RunConfig, sets: Sequence[PromptSet]) -> PromptOrder | MixedOrder:
    """The order of the training prompts, by the weights of the data sets."""
    ingredients = []
    for stream, (dataset, loaded) in enumerate(zip(config.data.train_sets, sets, strict=True)):
        order = PromptOrder(
            len(loaded.prompts),
            config.run.seed,
            config.data.shuffle,
            digest_of(loaded.prompts),
            stream=stream,
        )
        ingredients.append(Ingredient(loaded.name, dataset.weight, order))
    return ingredients[0].order if len(ingredients) == 1 else MixedOrder(ingredients)
