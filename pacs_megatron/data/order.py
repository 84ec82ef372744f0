"""The order of the training prompts: a function of the seed, resumable at any prompt."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pacs_megatron.errors import CheckpointError, ConfigError, shown


class PromptOrder:
    """An endless order over prompts 0 .. num_prompts - 1: each epoch contains every prompt once.

    The permutation of an epoch depends on (seed, epoch) only. One `take` never returns a prompt
    twice: if it reaches the next epoch, it skips prompts that it has. Skipped and returned prompts
    come first in the next take.

    Args:
        num_prompts: Number of prompts of the data set.
        seed: Seed of the permutations.
        shuffle: If false, each epoch has the order of the data set.
        digest: Digest of the prompts' content, with which a resumed run detects other prompts.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, digest: str = "") -> None:
        self._fixed = {
            "num_prompts": num_prompts,
            "seed": seed,
            "shuffle": shuffle,
            "digest": digest,
        }
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._skipped: list[int] = []
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """0-based epoch of the last prompt taken (0 before the first)."""
        return self._epoch

    def take(self, n: int) -> list[int]:
        """The next `n` prompts, all different.

        Raises ConfigError if the data set has fewer than `n`.
        """
        if n > self._num_prompts:
            raise ConfigError(
                f"a step needs {n} different prompts but the data set has {self._num_prompts}; "
                "lower batch.prompts_per_step (or admission.oversample) or use more data"
            )
        skipped = self._skipped
        self._skipped = []
        taken: dict[int, None] = {}  # a set that keeps the order

        def offer(prompt: int) -> None:
            if prompt in taken or len(taken) == n:
                self._skipped.append(prompt)
            else:
                taken[prompt] = None

        for prompt in skipped:
            offer(prompt)
        while len(taken) < n:
            if self._position == self._num_prompts:
                self._start_next_epoch()
            offer(self._order[self._position])
            self._position += 1
        return list(taken)

    def put_back(self, prompts: Sequence[int]) -> None:
        """Returns unused prompts; they come first in the next take."""
        self._skipped += prompts

    def _start_next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return [int(prompt) for prompt in generator.permutation(self._num_prompts)]

    def state_dict(self) -> dict[str, Any]:
        """The position in plain JSON values, without the permutation itself."""
        return {
            **self._fixed,
            "epoch": self._epoch,
            "position": self._position,
            "skipped": list(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`.

        Raises CheckpointError if it belongs to other data or another seed.
        """
        for name, value in self._fixed.items():
            if state[name] != value:
                raise CheckpointError(
                    f"data position: the checkpoint has {name}={shown(state[name])}, this run "
                    f"{name}={shown(value)}; use the same data set, chat template, tokenizer and "
                    "run.seed, or start a new run"
                )

        epoch = state["epoch"]
        position = state["position"]
        skipped = state["skipped"]
        if not (0 <= epoch < 2**63 and 0 <= position <= self._num_prompts):
            raise ValueError(f"epoch={epoch} position={position}")
        # `index` and the range reject what is not an integer or not a prompt.
        prompts = range(self._num_prompts)
        self._epoch = operator.index(epoch)
        self._position = operator.index(position)
        self._skipped = [prompts[number] for number in skipped]
        self._order = self._permutation(self._epoch)
