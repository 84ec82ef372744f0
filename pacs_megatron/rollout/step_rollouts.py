"""The samples of a dispatched step, their form in a checkpoint, and the weight versions that
sampled them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest, Stop
from pacs_megatron.contracts.samples import AGENT_FAILURE
from pacs_megatron.errors import CheckpointError, PacsError, RolloutError
from pacs_megatron.rollout.sample_arrays import Message, samples_from_message, samples_to_message


@dataclass(slots=True, eq=False, kw_only=True)
class StepRollouts:
    """The samples of a step or an evaluation, from dispatch to training.

    A sample is missing until it arrives (`sampled`), then waits for its verdict (`judged`). A group
    is whole when all of its samples are judged.

    Concurrency: the owner's lock guards changes.
    """

    step: int
    prompts: tuple[Prompt, ...]
    requests: tuple[SampleRequest, ...]
    """empty for demonstrations"""
    is_train: bool = True
    """False: an evaluation after `step`"""
    epoch: int = 0
    sampled: dict[str, Sample] = field(default_factory=dict)
    """samples by id, in order of arrival; a verdict replaces the sample by the judged one"""
    judged: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    """requests that over-sampling does not need, because enough groups are admitted"""
    enough: int | None = None
    """number of admitted groups that the step needs; None: all groups"""
    refills: int = 0
    extra: dict[str, int] = field(default_factory=dict)
    """prompt id -> number of its further samples, of prompts whose number is decided
    (`admission.resample`)
    """
    is_returned: bool = False
    """whether the prompts of unfinished groups were returned to the data"""
    num_admitted: int = 0
    """complete, judged groups that will be admitted"""
    started: bool = False
    """whether the missing samples are requested; SGLang only"""
    error: PacsError | None = None
    since: float = field(default_factory=time.perf_counter)
    by_id: dict[str, Prompt] = field(init=False)
    _ids_of: dict[str, list[str]] = field(init=False)
    """prompt id -> ids of its requests, or of its demonstrations"""

    def __post_init__(self) -> None:
        self.by_id = {prompt.id: prompt for prompt in self.prompts}
        self._ids_of = {prompt.id: [] for prompt in self.prompts}
        for item in self.requests or self.sampled.values():
            self._ids_of[item.prompt_id].append(item.id)

    def extend(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> None:
        """Adds a round of prompts; `RolloutBuffer.start` then requests their samples.

        Args:
            prompts: not yet in the step.
            requests: those of `prompts`.
        """
        self.prompts = (*self.prompts, *prompts)
        self.requests = (*self.requests, *requests)
        self.refills = self.refills + 1
        self.started = False
        self.__post_init__()

    def extend_groups(self, extra: Mapping[str, int], requests: Sequence[SampleRequest]) -> None:
        """Adds further samples of prompts of the step; `RolloutBuffer.start` then requests them.

        Args:
            extra: number of further samples by prompt id, 0 where there are none.
            requests: those of the further samples.
        """
        self.extra = {**self.extra, **extra}
        self.requests = (*self.requests, *requests)
        self.started = self.started and not requests
        self.__post_init__()

    @property
    def missing(self) -> list[SampleRequest]:
        """Requests without a sample, except cancelled ones."""
        # Tests of membership do not fail while another thread adds a sample, an iteration does.
        return [
            request
            for request in self.requests
            if request.id not in self.sampled and request.id not in self.cancelled
        ]

    @property
    def num_required(self) -> int:
        """Number of samples that must be judged."""
        return len(self.requests) - len(self.cancelled)

    @property
    def is_done(self) -> bool:
        """Whether every sample is judged. Raises the error of the step, if there is one."""
        if self.error is not None:
            raise self.error
        return len(self.judged) >= self.num_required

    @property
    def unfinished(self) -> list[str]:
        """Ids of prompts with a cancelled request: their groups stay incomplete."""
        cancelled = [request for request in self.requests if request.id in self.cancelled]
        return list(dict.fromkeys(request.prompt_id for request in cancelled))

    def groups(self) -> list[Group]:
        """Judged groups in the order of the prompts; siblings in the order of their number."""
        groups = [self.whole_group(prompt_id) for prompt_id in self.by_id]
        return [group for group in groups if group is not None]

    def whole_group(self, prompt_id: str) -> Group | None:
        """The group of a prompt, or None until all of its samples are judged."""
        ids = self._ids_of[prompt_id]
        if not self.judged.issuperset(ids):
            return None
        samples = tuple(self.sampled[sample_id] for sample_id in ids)
        return Group(prompt_id=prompt_id, samples=samples)

    def in_order(self) -> list[Sample]:
        """Judged samples in the order of the prompts."""
        samples = []
        for ids in self._ids_of.values():
            samples += [self.sampled[sample_id] for sample_id in ids if sample_id in self.judged]
        return samples

    def drop_verdicts(self) -> None:
        """Removes reward, label and failure of all samples, which are judged again then."""
        self.judged = set()
        for sample_id, sample in self.sampled.items():
            self.sampled[sample_id] = replace(
                sample, reward=None, label=None, reward_details=None, failure=None
            )

    def cancel_rest(self) -> list[str]:
        """Cancels every request that is not judged. Returns the ids of those in flight."""
        in_flight = [request.id for request in self.missing]
        self.cancelled = {request.id for request in self.requests if request.id not in self.judged}
        return in_flight


def is_agent_failure(sample: Sample) -> bool:
    """Whether an agent failed, so that there is no response to judge."""
    return sample.failure is not None and sample.failure.startswith(AGENT_FAILURE)


_SAVED = ("step", "epoch", "enough", "is_returned", "refills", "extra")
"""Fields that a checkpoint has under their names"""


def rollouts_to_message(steps: Sequence[StepRollouts]) -> Message:
    """The message of all samples, judged or not. Inverse of `rollouts_from_message`.

    A trajectory whose agent failed is left out, so that it starts again, unless the ranks have the
    step: then its samples stay.

    Returns:
        Header and arrays of `samples_to_message`. The header has also `steps`, `rewards` (reward
        and details by sample), and `failures` of agents if there are any (by sample, or null); the
        arrays `labels`, int8 [samples], -1 without a label.
    """
    samples: list[Sample] = []
    saved_steps = []
    for rollouts in steps:
        kept = list(rollouts.sampled.values())
        if not rollouts.is_returned:
            kept = [sample for sample in kept if not is_agent_failure(sample)]
        samples += kept
        fields = {name: getattr(rollouts, name) for name in _SAVED}
        fields["prompts"] = [prompt.id for prompt in rollouts.prompts]
        fields["cancelled"] = sorted(rollouts.cancelled)
        fields["samples"] = len(kept)
        saved_steps.append(fields)

    header, arrays = samples_to_message(samples)
    header["steps"] = saved_steps
    header["rewards"] = [[sample.reward, sample.reward_details] for sample in samples]
    if any(is_agent_failure(sample) for sample in samples):
        header["failures"] = [
            sample.failure if is_agent_failure(sample) else None for sample in samples
        ]
    labels = [-1 if sample.label is None else sample.label for sample in samples]
    arrays["labels"] = np.array(labels, dtype=np.int8)
    return header, arrays


def rollouts_from_message(
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    prompts: Mapping[str, Prompt],
    requests_of: Callable[[Sequence[Prompt], int, Mapping[str, int]], Sequence[SampleRequest]],
) -> list[StepRollouts]:
    """The saved steps. Samples whose verifier failed will be judged again.

    Args:
        header: of `rollouts_to_message`.
        arrays: of `rollouts_to_message`.
        prompts: the data's prompts by id.
        requests_of: returns the requests of a step's prompts, with further samples by prompt id.

    Raises:
        CheckpointError: if the data no longer has a prompt.
        ValueError: if the message is malformed.
    """
    samples = _with_verdicts(header, arrays)
    steps = []
    start = 0
    for of_checkpoint in header["steps"]:
        # A checkpoint of an earlier release has no further samples.
        saved = {"extra": {}, **of_checkpoint}
        prompt_ids = saved["prompts"]
        missing = [prompt_id for prompt_id in prompt_ids if prompt_id not in prompts]
        if missing:
            raise CheckpointError(
                f"the checkpoint's rollout buffer has samples of prompt {missing[0]}, which the "
                "data no longer has; use the same data, or start a new run"
            )

        stop = start + saved["samples"]
        of_step = samples[start:stop]
        start = stop
        for sample in of_step:
            if sample.prompt_id not in prompt_ids:
                raise ValueError(
                    f"sample {sample.id} is of prompt {sample.prompt_id}, which is not in step "
                    f"{saved['step']}"
                )

        step_prompts = tuple(prompts[prompt_id] for prompt_id in prompt_ids)
        rollouts = StepRollouts(
            prompts=step_prompts,
            requests=tuple(requests_of(step_prompts, saved["step"], saved["extra"])),
            sampled={sample.id: sample for sample in of_step},
            judged={
                sample.id
                for sample in of_step
                if sample.label is not None or sample.failure is not None
            },
            cancelled=set(saved["cancelled"]),
            **{name: saved[name] for name in _SAVED},
        )
        steps.append(rollouts)
    return steps


def _with_verdicts(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Sample]:
    """The samples of a message, with reward and label where they have a label, or the failure of
    their agent.
    """
    samples = samples_from_message(header, arrays)
    labels = arrays["labels"].tolist()
    failures = header.get("failures", [None] * len(samples))
    judged = []
    for sample, (reward, details), label, failure in zip(
        samples, header["rewards"], labels, failures, strict=True
    ):
        if label < 0:
            judged.append(replace(sample, failure=failure))
        else:
            judged.append(replace(sample, reward=reward, label=label, reward_details=details))
    return judged


class SentWeights:
    """Maps the digest of sent weights to their number of trained steps, s.

    Equal weights count as the newest.

    Step t may be sampled if t <= s + 1 + rollout.max_staleness. A sample's staleness is (t - 1) - s
    of its oldest span.
    """

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}

    def add(self, digest: str, step: int) -> None:
        """Records that the rollout engine has the weights after `step`."""
        self._step_of[digest] = step

    def check(self, sample: Sample) -> None:
        """Raises RolloutError for a sample from weights that this run has not sent."""
        unknown = {span.digest for span in sample.spans} - self._step_of.keys()
        if unknown:
            raise RolloutError(
                f"sample {sample.id} comes from weights with digest {min(unknown)}, which this run "
                "never sent; restart the rollout servers"
            )

    def staleness(self, sample: Sample, step: int) -> int:
        """Age of a sample of `step` in steps; 0 without spans."""
        newest = step - 1
        oldest = min((self._step_of[span.digest] for span in sample.spans), default=newest)
        return newest - oldest

    def state_dict(self, samples: Iterable[Sample]) -> dict[str, int]:
        """The digests that `samples` come from."""
        used: set[str] = set()
        for sample in samples:
            used.update(span.digest for span in sample.spans)
        return {digest: step for digest, step in self._step_of.items() if digest in used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step_of.update(state)


def rollout_metrics(samples: Sequence[Sample], dropped: Mapping[str, int]) -> dict[str, float]:
    """Metrics before admission: means of rewards and labels over judged samples, lengths over all
    samples.

    Args:
        samples: at least one.
        dropped: counts of `admission.admit`.
    """
    lens = np.array([sample.response_len for sample in samples], dtype=np.float64)
    truncated = [sample.stop is Stop.LENGTH for sample in samples]
    metrics = {
        "response/len_mean": float(lens.mean()),
        "response/len_max": float(lens.max()),
        "response/truncated_frac": float(np.mean(truncated)),
        "response/tokens": float(lens.sum()),
    }
    rewarded = [sample for sample in samples if sample.reward is not None]
    if rewarded:
        metrics["reward/mean"] = float(np.mean([sample.reward for sample in rewarded]))
        metrics["reward/label_mean"] = float(np.mean([sample.label for sample in rewarded]))
    for name, count in dropped.items():
        metrics[f"admission/dropped_{name}"] = float(count)
    return metrics


def staleness_metrics(samples: Iterable[Sample], staleness: Iterable[int]) -> dict[str, float]:
    """Metrics of the age of the samples that a step trains on; empty without samples.

    Returns:
        `staleness/mean` and `staleness/max` in steps, and the share of samples with several weight
        versions.
    """
    ages = []
    num_mixed = 0
    for sample, age in zip(samples, staleness, strict=True):
        ages.append(age)
        versions = {span.version for span in sample.spans}
        num_mixed += len(versions) > 1
    if not ages:
        return {}
    return {
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
        "staleness/multi_version_frac": num_mixed / len(ages),
    }
