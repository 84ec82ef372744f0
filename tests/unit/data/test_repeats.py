import numpy as np
import pytest

from pacs_megatron.contracts import Prompt
from pacs_megatron.data.repeats import find_repeats, num_repeated, num_shared


def prompts_of(*rows):
    prompts = []
    for number, (problem, answer, *solution) in enumerate(rows):
        prompt = Prompt(
            id=f"d/{number}",
            text=problem,
            token_ids=np.array([1], np.int32),
            answer=answer,
            problem=problem,
            solution=solution[0] if solution else None,
        )
        prompts.append(prompt)
    return prompts


def test_rows_that_repeat_an_earlier_problem():
    prompts = prompts_of(("a", "1"), ("b", "2"), ("a", "1"), (" a\n", "1"), ("b  ", "2"))
    found = find_repeats(prompts, are_demonstrations=False)
    assert (found.num_problems, found.num_repeated, found.contradicting) == (2, 3, ())
    assert num_repeated(prompts) == 3 and num_repeated(prompts[:2]) == 0


def test_another_case_is_another_problem():
    found = find_repeats(prompts_of(("find x", "1"), ("find X", "2")), are_demonstrations=False)
    assert found == (2, 0, ())


def test_answers_that_contradict_each_other():
    prompts = prompts_of(("a", "1"), ("b", "2"), ("a", "3"), ("a", "4"), ("b", " 2 "))
    found = find_repeats(prompts, are_demonstrations=False)
    assert found.contradicting == (("d/0", "d/2"),)


@pytest.mark.parametrize(("are_demonstrations", "count"), [(False, 2), (True, 1)])
def test_several_demonstrations_of_a_problem_are_no_repeat(are_demonstrations, count):
    prompts = prompts_of(("a", "1", "so"), ("a", "1", "or so"), ("a", "1", "so"))
    assert find_repeats(prompts, are_demonstrations=are_demonstrations).num_repeated == count


def test_problems_of_another_data_set():
    train = prompts_of(("a", "1"), ("b", "2"))
    assert num_shared(prompts_of(("b ", "9"), ("c", "1"), ("a", "1")), train) == 2
    assert num_shared(prompts_of(("c", "1")), train) == 0
