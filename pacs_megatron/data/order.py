"""In which order prompts are trained on: from the seed, and resumable to the sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pacs_megatron.errors import CheckpointError, ConfigError


class PromptOrder:
    """An endless order over prompts 0 .. num_prompts - 1: each epoch has every prompt once.

    The epoch's permutation is a function of (seed, epoch) alone. One `take` never holds a prompt twice, since a step
    names its samples by prompt: a take that crosses into the next epoch skips what it holds already, and those
    prompts come first in the next take, as do those that were put back.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ConfigError(f"the order needs at least one prompt, got {num_prompts}")
        self._fixed = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._num_prompts, self._seed, self._shuffle = num_prompts, seed, shuffle
        self._epoch = 0
        self._position = 0
        self._skipped: list[int] = []
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """0-based number of the epoch that the last prompt taken belongs to (0 before the first)."""
        return self._epoch

    def take(self, n: int) -> list[int]:
        """The next `n` prompts, all different. Raises ConfigError when there are fewer than `n` prompts at all."""
        if n > self._num_prompts:
            raise ConfigError(
                f"a step asks for {n} different prompts but the data set keeps {self._num_prompts}; lower "
                "batch.prompts_per_step (or admission.oversample) or use more data"
            )
        waiting, self._skipped = self._skipped, []
        taken: list[int] = []
        held: set[int] = set()

        def offer(prompt: int) -> None:
            if prompt in held or len(taken) == n:
                self._skipped.append(prompt)
            else:
                taken.append(prompt)
                held.add(prompt)

        for prompt in waiting:
            offer(prompt)
        while len(taken) < n:
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
            offer(self._order[self._position])
            self._position += 1
        return taken

    def put_back(self, prompts: Sequence[int]) -> None:
        """These were taken and not used: they come first in the next take."""
        self._skipped += prompts

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order: list[int] = generator.permutation(self._num_prompts).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the position in the permutation, not the permutation."""
        return {**self._fixed, "epoch": self._epoch, "position": self._position, "skipped": list(self._skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Raises CheckpointError when it belongs to other data or another seed."""
        for name, value in self._fixed.items():
            if state[name] != value:
                raise CheckpointError(
                    f"data position: the checkpoint has {name}={state[name]}, this run {name}={value}; use the same data "
                    "and run.seed, or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._skipped = list(state["skipped"])
        self._order = self._permutation(self._epoch)
