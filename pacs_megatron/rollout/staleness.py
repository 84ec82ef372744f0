"""How old the weights are that a sample came from, and which weights this run knows at all.

With the weights of step s (after s steps were trained), step t may be sampled when t <= s + 1 + rollout.max_staleness.
The lag of a sample of step t is (t - 1) - s for the oldest of its spans; synchronous training has lag 0 everywhere.
"""

from collections.abc import Iterable, Mapping

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import RolloutError


class SentWeights:
    """Digest -> number of trained steps of the weights that this run has sent. Equal weights count as the newest."""

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}

    def add(self, digest: str, step: int) -> None:
        """The rollout engine now holds the weights after `step`."""
        self._step_of[digest] = step

    def check(self, sample: Sample) -> None:
        """Raises RolloutError for a sample from weights that this run never sent."""
        unknown = {span.digest for span in sample.spans} - self._step_of.keys()
        if unknown:
            raise RolloutError(
                f"sample {sample.id} comes from weights with digest {min(unknown)}, which this run never sent; restart "
                "the rollout servers"
            )

    def staleness(self, sample: Sample, step: int) -> int:
        """Trained steps between the oldest weights of a sample and the start of `step`, for which it is used."""
        return step - 1 - min((self._step_of[span.digest] for span in sample.spans), default=step - 1)

    def state_dict(self, samples: Iterable[Sample]) -> dict[str, int]:
        """What these samples refer to."""
        used = {span.digest for sample in samples for span in sample.spans}
        return {digest: step for digest, step in self._step_of.items() if digest in used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step_of.update(state)


def staleness_metrics(samples: Iterable[Sample], staleness: Iterable[int]) -> dict[str, float]:
    """`staleness/mean`, `staleness/max` in steps, and the share of samples whose tokens come from several versions."""
    pairs = list(zip(samples, staleness, strict=True))
    if not pairs:
        return {}
    return {
        "staleness/mean": sum(staleness for _, staleness in pairs) / len(pairs),
        "staleness/max": float(max(staleness for _, staleness in pairs)),
        "staleness/multi_version_frac": sum(len({s.version for s in sample.spans}) > 1 for sample, _ in pairs)
        / len(pairs),
    }
