"""One line for each property of a data set that changes what a run trains or measures.

The log of a run, `status`, `data preview`, `preflight` and `eval` show them.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from pacs_megatron.config.schema import DataOptions
from pacs_megatron.data.prompts import PromptSet, problem_id_of
from pacs_megatron.data.repeats import find_repeats, num_shared
from pacs_megatron.errors import DataError


def check_dropped(prompt_set: PromptSet, data: DataOptions) -> None:
    """Raises DataError if more rows were dropped than `data.max_dropped_frac` allows."""
    if prompt_set.num_dropped > data.max_dropped_frac * prompt_set.num_rows:
        raise DataError(
            f"{_dropped(prompt_set)}, more than data.max_dropped_frac={data.max_dropped_frac:g}; "
            "raise the limit of the length, or data.max_dropped_frac"
        )


def train_notices(sets: Sequence[PromptSet], now: datetime) -> list[str]:
    """The lines of the training sets of a run, also about problems that two of them have.

    Args:
        sets: The training sets.
        now: Time that the chat template has printed.
    """
    lines = []
    for number, prompt_set in enumerate(sets):
        lines += notices(prompt_set, now)
        lines += shared_notices(prompt_set, sets[:number])
    return lines


def shared_notices(prompt_set: PromptSet, others: Sequence[PromptSet]) -> list[str]:
    """A line for each other training set that has problems of this training set."""
    lines = []
    for other in others:
        shared = num_shared(prompt_set.prompts, other.prompts)
        if shared:
            lines.append(
                f"{prompt_set.name}: {shared} of {len(prompt_set.prompts)} problems are in "
                f"{other.name} too, so they are trained more often; remove them from one"
            )
    return lines


def notices(prompt_set: PromptSet, now: datetime, *, train: Sequence[PromptSet] = ()) -> list[str]:
    """The lines of a data set, empty without such a property.

    Args:
        prompt_set: The data set.
        now: Time that the chat template has printed.
        train: The training sets of the same run, if `prompt_set` is a benchmark.
    """
    lines = [_dropped(prompt_set)] if prompt_set.num_dropped else []
    lines += _repeats(prompt_set)
    lines += _demonstrations(prompt_set)
    if prompt_set.prints_time and not train:
        lines.append(
            f"{prompt_set.name}: the chat template prints the time; every attempt of a run prints "
            f"that of its first one ({now:%Y-%m-%d %H:%M:%S}). For the same prompts in other runs, "
            "set the template's variable with data.chat_template_args"
        )
    for train_set in train:
        shared = num_shared(prompt_set.prompts, train_set.prompts)
        if shared:
            lines.append(
                f"{prompt_set.name}: {shared} of {len(prompt_set.prompts)} problems are in the "
                f"training data {train_set.name} too, so results on them show no generalisation; "
                "use other problems"
            )
    return lines


def _dropped(prompt_set: PromptSet) -> str:
    """The numbers of dropped rows, with their limits."""
    parts = []
    if prompt_set.num_too_long:
        parts.append(f"{prompt_set.num_too_long} prompts above {prompt_set.limit}")
    demonstrations = prompt_set.demonstrations
    if demonstrations is not None and demonstrations.num_too_long:
        parts.append(
            f"{demonstrations.num_too_long} demonstrations above "
            f"rollout.max_response_tokens={demonstrations.max_tokens}"
        )
    return (
        f"{prompt_set.name}: {prompt_set.num_dropped} of {prompt_set.num_rows} rows are dropped: "
        + ", ".join(parts)
    )


def _repeats(prompt_set: PromptSet) -> Iterator[str]:
    are_demonstrations = prompt_set.demonstrations is not None
    # Further orders of the choices of one problem are meant.
    prompts = [prompt for prompt in prompt_set.prompts if problem_id_of(prompt.id) == prompt.id]
    repeats = find_repeats(prompts, are_demonstrations=are_demonstrations)
    num_prompts = len(prompts)
    if repeats.num_repeated:
        yield (
            f"{prompt_set.name}: {repeats.num_repeated} of {num_prompts} prompts repeat an earlier "
            f"one ({repeats.num_problems} different problems), so a step can have a problem "
            "several times; remove the repeated rows"
        )
    if repeats.contradicting:
        first, other = repeats.contradicting[0]
        yield (
            f"{prompt_set.name}: {len(repeats.contradicting)} problems have different answers, "
            f"such as {first} and {other}; correct or remove these rows"
        )


def _demonstrations(prompt_set: PromptSet) -> Iterator[str]:
    demonstrations = prompt_set.demonstrations
    if demonstrations is None:
        return
    opened = demonstrations.opened
    if demonstrations.num_opened:
        yield (
            f"{prompt_set.name}: {demonstrations.num_opened} demonstrations start with {opened}, "
            "which the chat template has written already; they are trained without it"
        )
    if demonstrations.num_unclosed:
        yield (
            f"{prompt_set.name}: {demonstrations.num_unclosed} demonstrations never close the "
            f"{opened} of the chat template, so the policy learns not to close it; add "
            f"</{opened[1:]} to the solutions, or change the template"
        )
