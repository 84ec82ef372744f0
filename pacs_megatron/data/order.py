"""The order of the training prompts: a function of the seed, resumable at any prompt.

One data set has a `PromptOrder`. Several with weights have a `MixedOrder` of these.
"""

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

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
        stream: Number of the data set in a mixture: each has permutations of its own.
    """

    def __init__(
        self, num_prompts: int, seed: int, shuffle: bool, digest: str = "", *, stream: int = 0
    ) -> None:
        self._fixed = {
            "num_prompts": num_prompts,
            "seed": seed,
            "shuffle": shuffle,
            "digest": digest,
        }
        self._num_prompts = num_prompts
        self._seed = seed
        self._stream = [stream] if stream else []
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._skipped: list[int] = []
        self._order = self._permutation(0)

    @property
    def num_prompts(self) -> int:
        return self._num_prompts

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

    def take_others(self, n: int, excluded: Collection[int]) -> list[int]:
        """The next `n` prompts that are not in `excluded`; fewer if the data set has no more.

        Those between them come first in the next take.
        """
        # The next prompts can be excluded ones, so as many more are taken.
        taken = self.take(min(n + len(excluded), self._num_prompts))
        others = [prompt for prompt in taken if prompt not in excluded][:n]
        self.put_back([prompt for prompt in taken if prompt not in others])
        return others

    def _start_next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch, *self._stream]))
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


class Ingredient(NamedTuple):
    """A data set of a mixture."""

    name: str
    weight: float
    order: PromptOrder


class MixedOrder:
    """The prompts of several data sets, each with its share: weight / sum of the weights.

    The prompts are numbered through, in the order of the data sets. Each data set has its own
    order; the choice of the data set that gives the next prompt depends on the weights only. After
    t prompts a data set has given its share of t to within 1 - 1 / (2 n - 2), for n data sets, by
    the rule of R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
    """

    def __init__(self, ingredients: Sequence[Ingredient]) -> None:
        """Two data sets or more."""
        self._ingredients = ingredients
        weights = [Fraction(each.weight) for each in ingredients]
        self._shares = [weight / sum(weights) for weight in weights]
        self._slack = Fraction(1, 2 * len(ingredients) - 2)
        self._given = [0] * len(ingredients)
        """prompts that each data set has given"""
        self._starts = [0]
        for each in ingredients:
            self._starts.append(self._starts[-1] + each.order.num_prompts)

    @property
    def epoch(self) -> int:
        """The largest epoch of the data sets: how often a prompt has been repeated."""
        return max(each.order.epoch for each in self._ingredients)

    def take(self, n: int) -> list[int]:
        """The next `n` prompts, all different.

        Raises ConfigError if a data set has fewer than its share.
        """
        chosen = self._choose(n, [n] * len(self._ingredients))
        for number, needed in Counter(chosen).items():
            name, _, order = self._ingredients[number]
            if needed > order.num_prompts:
                raise ConfigError(
                    f"a step needs {needed} different prompts of {name}, its share of {n}, but it "
                    f"has {order.num_prompts}; lower its weight or batch.prompts_per_step (or "
                    "admission.oversample), or use more data"
                )
        counts = Counter(chosen)
        taken = [each.order.take(counts[k]) for k, each in enumerate(self._ingredients)]
        return self._numbered(chosen, taken)

    def take_others(self, n: int, excluded: Collection[int]) -> list[int]:
        """Same as `PromptOrder.take_others`; a data set without further prompts gives none."""
        without = [self._local(excluded, number) for number in range(len(self._ingredients))]
        left = []
        for each, own in zip(self._ingredients, without, strict=True):
            left.append(each.order.num_prompts - len(own))
        chosen = self._choose(n, left)
        counts = Counter(chosen)
        taken = []
        for number, each in enumerate(self._ingredients):
            taken.append(each.order.take_others(counts[number], without[number]))
        return self._numbered(chosen, taken)

    def put_back(self, prompts: Sequence[int]) -> None:
        """Returns unused prompts; they come first when their data set is next."""
        for number, each in enumerate(self._ingredients):
            own = self._local(prompts, number)
            each.order.put_back(own)
            self._given[number] -= len(own)

    def _choose(self, n: int, left: Sequence[int]) -> list[int]:
        """The data sets of the next `n` prompts, of which each gives at most `left`; fewer than `n`
        if none has more.
        """
        remaining = list(left)
        chosen: list[int] = []
        while len(chosen) < n and any(remaining):
            number = self._next([k for k, count in enumerate(remaining) if count])
            remaining[number] -= 1
            self._given[number] += 1
            chosen.append(number)
        return chosen

    def _next(self, candidates: Sequence[int]) -> int:
        """The data set of the next prompt: of those that are due, the one whose deadline is first.

        A data set with share s is due for prompt t + 1 once s (t + 1) exceeds what it has given by
        the slack, and has to give before s t exceeds it by more than 1 - slack.
        """
        total = sum(self._given)

        def behind(number: int, position: int) -> Fraction:
            return self._shares[number] * position - self._given[number]

        due = [k for k in candidates if behind(k, total + 1) >= self._slack]
        if not due:  # only if data sets that are due have no prompts left
            return max(candidates, key=lambda k: behind(k, total + 1))
        return min(due, key=lambda k: (1 - self._slack - behind(k, total)) / self._shares[k])

    def _local(self, prompts: Collection[int], number: int) -> list[int]:
        """Those of `prompts` that belong to a data set, with their numbers in it."""
        start = self._starts[number]
        end = self._starts[number + 1]
        return [prompt - start for prompt in prompts if start <= prompt < end]

    def _numbered(self, chosen: Sequence[int], taken: Sequence[Sequence[int]]) -> list[int]:
        """The prompts of the data sets in the order in which these were chosen."""
        next_prompts = [iter(prompts) for prompts in taken]
        return [self._starts[number] + next(next_prompts[number]) for number in chosen]

    def state_dict(self) -> dict[str, Any]:
        """The positions in plain JSON values."""
        mixture = []
        for each, given in zip(self._ingredients, self._given, strict=True):
            state = {"name": each.name, "weight": each.weight, "given": given}
            mixture.append(state | {"order": each.order.state_dict()})
        return {"mixture": mixture}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`.

        Raises CheckpointError if it belongs to other data, other weights or another seed.
        """
        saved = state.get("mixture", [])
        before = [(each["name"], each["weight"]) for each in saved]
        now = [(each.name, each.weight) for each in self._ingredients]
        if before != now:
            raise CheckpointError(
                f"data position: the checkpoint mixes {shown(before, 200)}, this run "
                f"{shown(now, 200)}; use the same data sets and weights, or start a new run"
            )
        for each, own in zip(self._ingredients, saved, strict=True):
            each.order.load_state_dict(own["order"])
        self._given = [operator.index(own["given"]) for own in saved]
