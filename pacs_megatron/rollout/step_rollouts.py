"""The samples of a dispatched step, their form in a checkpoint, and the weight versions that
sampled them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest, Stop
from pacs_megatron.errors import CheckpointError, PacsError, RolloutError
from pacs_megatron.rollout.sample_arrays import Message, samples_from_message, samples_to_message


@dataclass(slots=True, eq=False, kw_only=True)
class StepRollouts:
    """The samples of a step or an evaluation, from dispatch to training.

    The owner's lock guards changes.
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
    is_returned: bool = False
    """whether the prompts of unfinished groups were returned to the data"""
    num_admitted: int = 0
    """complete, judged groups that will be admitted"""
    started: bool = False
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
        """Adds a round of prompts; `start` then requests their samples."""
        self.prompts = (*self.prompts, *prompts)
        self.requests = (*self.requests, *requests)
        self.refills = self.refills + 1
        self.started = False
        self.__post_init__()

    @property
    def missing(self) -> list[SampleRequest]:
        return [r for r in self.requests if r.id not in self.sampled and r.id not in self.cancelled]

    @property
    def num_wanted(self) -> int:
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
        """Judged groups in the order of the prompts; siblings in the order of their number."""
        groups = [self.whole_group(prompt_id) for prompt_id in self.by_id]
        return [group for group in groups if group is not None]

    def whole_group(self, prompt_id: str) -> Group | None:
        """The group of a prompt, or None until all of its samples are judged."""
        ids = self._ids_of[prompt_id]
        if not self.judged.issuperset(ids):
            return None
        return Group(
            prompt_id=prompt_id, samples=tuple(self.sampled[sample_id] for sample_id in ids)
        )

    def cancel_rest(self) -> list[str]:
        """Cancels every request that is not judged. Returns the ids of those in flight."""
        in_flight = [request.id for request in self.missing]
        self.cancelled = {request.id for request in self.requests if request.id not in self.judged}
        return in_flight

    def in_order(self) -> list[Sample]:
        """Judged samples in the order of the prompts."""
        ids = [sample_id for of_prompt in self._ids_of.values() for sample_id in of_prompt]
        return [self.sampled[sample_id] for sample_id in ids if sample_id in self.judged]


_SAVED = ("step", "epoch", "enough", "is_returned", "refills")


def rollouts_to_message(steps: Sequence[StepRollouts]) -> Message:
    """The message of all samples, judged or not. Inverse of `rollouts_from_message`."""
    samples = [sample for rollouts in steps for sample in rollouts.sampled.values()]
    header, arrays = samples_to_message(samples)
    header["steps"] = [
        {name: getattr(rollouts, name) for name in _SAVED}
        | {
            "prompts": [prompt.id for prompt in rollouts.prompts],
            "cancelled": sorted(rollouts.cancelled),
            "samples": len(rollouts.sampled),
        }
        for rollouts in steps
    ]
    header["rewards"] = [[s.reward, s.reward_details] for s in samples]
    arrays["labels"] = np.array(
        [-1 if s.label is None else s.label for s in samples], dtype=np.int8
    )
    return header, arrays


def rollouts_from_message(
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    prompts: Mapping[str, Prompt],
    requests_of: Callable[[Sequence[Prompt], int], Sequence[SampleRequest]],
) -> list[StepRollouts]:
    """The saved steps. Samples whose verifier failed will be judged again. Raises CheckpointError."""
    verdicts = zip(
        samples_from_message(header, arrays),
        header["rewards"],
        arrays["labels"].tolist(),
        strict=True,
    )
    samples = [
        sample if label < 0 else replace(sample, reward=reward, label=label, reward_details=details)
        for sample, (reward, details), label in verdicts
    ]
    steps = []
    start = 0
    for saved in header["steps"]:
        missing = [prompt_id for prompt_id in saved["prompts"] if prompt_id not in prompts]
        if missing:
            raise CheckpointError(
                f"the checkpoint's rollout buffer has samples of prompt {missing[0]}, which the "
                "data no longer has; use the same data, or start a new run"
            )
        found = samples[start : start + saved["samples"]]
        for sample in found:
            if sample.prompt_id not in saved["prompts"]:
                raise ValueError(
                    f"sample {sample.id} is of prompt {sample.prompt_id}, which is not in step "
                    f"{saved['step']}"
                )
        own = tuple(prompts[prompt_id] for prompt_id in saved["prompts"])
        steps.append(
            StepRollouts(
                prompts=own,
                requests=tuple(requests_of(own, saved["step"])),
                sampled={sample.id: sample for sample in found},
                judged={sample.id for sample in found if sample.label is not None},
                cancelled=set(saved["cancelled"]),
                **{name: saved[name] for name in _SAVED},
            )
        )
        start += saved["samples"]
    return steps


def rollout_metrics(samples: Sequence[Sample], dropped: Mapping[str, int]) -> dict[str, float]:
    """Metrics before admission: means of rewards and labels over judged samples, lengths over all
    samples.
    """
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
        return (
            step - 1 - min((self._step_of[span.digest] for span in sample.spans), default=step - 1)
        )

    def state_dict(self, samples: Iterable[Sample]) -> dict[str, int]:
        used = {span.digest for sample in samples for span in sample.spans}
        return {digest: step for digest, step in self._step_of.items() if digest in used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step_of.update(state)


def staleness_metrics(samples: Iterable[Sample], staleness: Iterable[int]) -> dict[str, float]:
    """`staleness/mean` and `staleness/max` in steps, and the share of samples with several weight
    versions.
    """
    pairs = list(zip(samples, staleness, strict=True))
    if not pairs:
        return {}
    num_mixed = sum(len({span.version for span in sample.spans}) > 1 for sample, _ in pairs)
    return {
        "staleness/mean": sum(staleness for _, staleness in pairs) / len(pairs),
        "staleness/max": float(max(staleness for _, staleness in pairs)),
        "staleness/multi_version_frac": num_mixed / len(pairs),
    }
