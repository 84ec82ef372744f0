"""Problems that a data set has twice, with other answers, or that another data set has too."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacs_megatron.contracts import Prompt


class Repeats(NamedTuple):
    """Counts of the problems of a data set."""

    num_problems: int
    """Number of different problems"""
    num_repeated: int
    """Prompts that repeat an earlier one: the same problem, and the same demonstration if any"""
    contradicting: tuple[tuple[str, str], ...]
    """Ids of two prompts with different answers, one pair for each such problem"""


def problem_key(problem: str) -> str:
    """Equal for problems that differ in white space only."""
    return " ".join(problem.split())


def find_repeats(prompts: Sequence[Prompt], *, are_demonstrations: bool) -> Repeats:
    """The problems that the prompts repeat.

    Args:
        prompts: Those of one data set.
        are_demonstrations: Whether the solutions are trained: several of one problem are no repeat.
    """
    first_of: dict[str, Prompt] = {}
    contradicting: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        key = problem_key(prompt.problem)
        solution = prompt.solution or "" if are_demonstrations else ""
        seen.add((key, problem_key(solution)))

        first = first_of.setdefault(key, prompt)
        if first.answer.strip() != prompt.answer.strip():
            contradicting.setdefault(key, (first.id, prompt.id))
    return Repeats(
        num_problems=len(first_of),
        num_repeated=len(prompts) - len(seen),
        contradicting=tuple(contradicting.values()),
    )


def num_repeated(prompts: Iterable[Prompt]) -> int:
    """Number of prompts whose problem an earlier one of them has."""
    keys = [problem_key(prompt.problem) for prompt in prompts]
    return len(keys) - len(set(keys))


def num_shared(prompts: Iterable[Prompt], others: Iterable[Prompt]) -> int:
    """Number of `prompts` whose problem one of `others` has."""
    keys = {problem_key(prompt.problem) for prompt in others}
    return sum(problem_key(prompt.problem) in keys for prompt in prompts)
