"""The samples of one dispatched step, finished or not, and their form in a checkpoint."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest, Stop
from pacs_megatron.errors import CheckpointError, PacsError
from pacs_megatron.rollout.sample_arrays import Message, samples_from_message, samples_to_message


@dataclass(slots=True, eq=False, kw_only=True)
class StepRollouts:
    """A step or an evaluation, from its dispatch to its training. The owner's lock guards changes of its samples."""

    step: int
    prompts: tuple[Prompt, ...]
    requests: tuple[SampleRequest, ...]
    """empty for demonstrations"""
    is_train: bool = True
    """False: an evaluation after `step`"""
    epoch: int = 0
    """of the data order when the prompts were taken"""
    sampled: dict[str, Sample] = field(default_factory=dict)
    """by id, in order of arrival; with the verdict once there is one"""
    judged: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    """requests that over-sampling does not need, because enough groups are admitted"""
    enough: int | None = None
    """number of admitted groups that the step needs; None: all groups"""
    refills: int = 0
    """rounds of further prompts, because too few groups were admitted"""
    is_returned: bool = False
    """the prompts of unfinished groups are back in the data's order"""
    num_admitted: int = 0
    """complete, judged groups that will be admitted"""
    started: bool = False
    """the rollout engine has its requests"""
    error: PacsError | None = None
    since: float = field(default_factory=time.perf_counter)
    by_id: dict[str, Prompt] = field(init=False)
    _ids_of: dict[str, list[str]] = field(init=False)
    """prompt id -> ids of its requests"""

    def __post_init__(self) -> None:
        self.by_id = {prompt.id: prompt for prompt in self.prompts}
        self._ids_of = {prompt.id: [] for prompt in self.prompts}
        for request in self.requests:
            self._ids_of[request.prompt_id].append(request.id)

    def extend(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> None:
        """Adds a round of prompts; `start` then requests their samples."""
        self.prompts, self.requests = (*self.prompts, *prompts), (*self.requests, *requests)
        self.refills, self.started = self.refills + 1, False
        self.__post_init__()

    @property
    def missing(self) -> list[SampleRequest]:
        """Requests without a sample, in their order."""
        return [r for r in self.requests if r.id not in self.sampled and r.id not in self.cancelled]

    @property
    def num_wanted(self) -> int:
        """Number of samples at completion."""
        return len(self.requests) - len(self.cancelled)

    @property
    def is_done(self) -> bool:
        """Whether every sample is judged. Raises the error of the step, if there is one."""
        if self.error is not None:
            raise self.error
        return len(self.judged) >= self.num_wanted

    @property
    def unfinished(self) -> list[str]:
        """Ids of prompts with a cancelled request: their groups stay incomplete."""
        return list(dict.fromkeys(r.prompt_id for r in self.requests if r.id in self.cancelled))

    def groups(self) -> list[Group]:
        """Complete judged groups in the order of the prompts; siblings in the order of their number."""
        members: dict[str, list[Sample]] = {prompt.id: [] for prompt in self.prompts}
        for sample_id in self.judged:
            members[self.sampled[sample_id].prompt_id].append(self.sampled[sample_id])
        cut = set(self.unfinished)
        return [_group(prompt_id, found) for prompt_id, found in members.items() if prompt_id not in cut]

    def whole_group(self, prompt_id: str) -> Group | None:
        """The group of a prompt, or None if a sample of it is not judged yet."""
        ids = self._ids_of[prompt_id]
        if not self.judged.issuperset(ids):
            return None
        return _group(prompt_id, [self.sampled[sample_id] for sample_id in ids])

    def cancel_rest(self) -> list[str]:
        """Cancels every request that is not judged. Returns the ids of those in flight."""
        in_flight = [request.id for request in self.missing]
        self.cancelled = {request.id for request in self.requests if request.id not in self.judged}
        return in_flight

    def in_order(self) -> list[Sample]:
        """Judged samples in the order of the requests, not of arrival."""
        order = [request.id for request in self.requests] if self.requests else list(self.sampled)
        return [self.sampled[sample_id] for sample_id in order if sample_id in self.judged]


def _group(prompt_id: str, samples: Sequence[Sample]) -> Group:
    return Group(prompt_id=prompt_id, samples=tuple(sorted(samples, key=lambda s: _number_of(s.id))))


def _number_of(sample_id: str) -> int:
    return int(sample_id.rsplit("#", 1)[1])


def rollouts_to_message(steps: Sequence[StepRollouts]) -> Message:
    """All samples, judged or not. Inverse of `rollouts_from_message`."""
    samples = [sample for rollouts in steps for sample in rollouts.sampled.values()]
    header, arrays = samples_to_message(samples)
    header["steps"] = [
        {
            "step": rollouts.step,
            "epoch": rollouts.epoch,
            "prompts": [prompt.id for prompt in rollouts.prompts],
            "cancelled": sorted(rollouts.cancelled),
            "enough": rollouts.enough,
            "is_returned": rollouts.is_returned,
            "refills": rollouts.refills,
            "samples": len(rollouts.sampled),
        }
        for rollouts in steps
    ]
    details = {s.id: s.reward_details for s in samples if s.reward_details is not None}
    if details:
        header["reward_details"] = details
    arrays["rewards"] = np.array([math.nan if s.reward is None else s.reward for s in samples], dtype=np.float64)
    arrays["labels"] = np.array([-1 if s.label is None else s.label for s in samples], dtype=np.int8)
    return header, arrays


def rollouts_from_message(
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    prompts: Mapping[str, Prompt],
    requests_of: Callable[[Sequence[Prompt], int], Sequence[SampleRequest]],
) -> list[StepRollouts]:
    """Saved steps. A sample whose verifier failed is unjudged and will be judged again.

    Raises CheckpointError for a prompt that the data no longer has.
    """
    samples = samples_from_message(header, arrays)
    details = header.get("reward_details", {})  # older checkpoints have none
    verdicts = list(zip(samples, arrays["rewards"].tolist(), arrays["labels"].tolist(), strict=True))
    steps, start = [], 0
    for saved in header["steps"]:
        missing = [prompt_id for prompt_id in saved["prompts"] if prompt_id not in prompts]
        if missing:
            raise CheckpointError(
                f"the checkpoint's rollout buffer has samples of prompt {missing[0]}, which the data no longer has; use the "
                "same data, or start a new run"
            )
        own = tuple(prompts[prompt_id] for prompt_id in saved["prompts"])
        rollouts = StepRollouts(
            step=saved["step"],
            prompts=own,
            requests=tuple(requests_of(own, saved["step"])),
            epoch=saved["epoch"],
            cancelled=set(saved["cancelled"]),
            enough=saved["enough"],
            is_returned=saved["is_returned"],
            refills=saved.get("refills", 0),
        )
        for sample, reward, label in verdicts[start : start + saved["samples"]]:
            if sample.prompt_id not in saved["prompts"]:
                raise ValueError(
                    f"sample {sample.id} is of prompt {sample.prompt_id}, which is not in step {saved['step']}"
                )
            if label >= 0:
                rollouts.judged.add(sample.id)
                known = None if math.isnan(reward) else reward  # a demonstration has a label and no reward
                rollouts.sampled[sample.id] = replace(
                    sample, reward=known, label=label, reward_details=details.get(sample.id)
                )
            else:
                rollouts.sampled[sample.id] = sample
        start += saved["samples"]
        steps.append(rollouts)
    return steps


def rollout_metrics(samples: Sequence[Sample], dropped: Mapping[str, int]) -> dict[str, float]:
    """Means of rewards and labels over the samples that have a reward, before admission; lengths over all samples."""
    rewarded = [s for s in samples if s.reward is not None]
    lens = np.array([s.response_len for s in samples], dtype=np.float64)
    metrics = {
        "response/len_mean": float(lens.mean()),
        "response/len_max": float(lens.max()),
        "response/truncated_frac": float(np.mean([s.stop is Stop.LENGTH for s in samples])),
        "response/tokens": float(lens.sum()),
    }
    if rewarded:
        metrics["reward/mean"] = float(np.mean([s.reward for s in rewarded]))
        metrics["reward/label_mean"] = float(np.mean([s.label for s in rewarded]))
    return metrics | {f"admission/dropped_{name}": float(count) for name, count in dropped.items()}
