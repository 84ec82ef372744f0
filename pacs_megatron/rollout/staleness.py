"""Staleness of samples, and the weights that this run has sent.

With the weights after s trained steps, step t may be sampled if t <= s + 1 + rollout.max_staleness. The staleness of a
sample of step t is (t - 1) - s for the oldest of its spans. It is 0 in synchronous training.
"""

from collections.abc import Iterable, Mapping

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import RolloutError


class SentWeights:
    """Maps the digest of sent weights to their number of trained steps. Equal weights count as the newest."""

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}

    def add(self, digest: str, step: int) -> None:
        """The rollout engine has the weights after `step`."""
        self._step_of[digest] = step

    def check(self, sample: Sample) -> None:
        """Raises RolloutError for a sample from weights that this run has not sent."""
        unknown = {span.digest for span in sample.spans} - self._step_of.keys()
        if unknown:
            raise RolloutError(
                f"sample {sample.id} comes from weights with digest {min(unknown)}, which this run never sent; restart "
                "the rollout servers"
            )

    def staleness(self, sample: Sample, step: int) -> int:
        """Trained steps between the oldest weights of a sample and the start of `step`, which trains it."""
        return step - 1 - min((self._step_of[span.digest] for span in sample.spans), default=step - 1)

    def state_dict(self, samples: Iterable[Sample]) -> dict[str, int]:
        """The weights that these samples come from."""
        used = {span.digest for sample in samples for span in sample.spans}
        return {digest: step for digest, step in self._step_of.items() if digest in used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step_of.update(state)


def staleness_metrics(samples: Iterable[Sample], staleness: Iterable[int]) -> dict[str, float]:
    """`staleness/mean` and `staleness/max` in steps, and the share of samples with several weight versions."""
    pairs = list(zip(samples, staleness, strict=True))
    if not pairs:
        return {}
    num_mixed = sum(len({span.version for span in sample.spans}) > 1 for sample, _ in pairs)
    return {
        "staleness/mean": sum(staleness for _, staleness in pairs) / len(pairs),
        "staleness/max": float(max(staleness for _, staleness in pairs)),
        "staleness/multi_version_frac": num_mixed / len(pairs),
    }
