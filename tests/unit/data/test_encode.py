"""Every kind of tokenizer: control tokens of a problem stay text, those of a demonstration do not.

What is right is read from `transformers` alone: the tokenizer's own ids and its decoder.
"""

import json

import numpy as np
import pytest

from pacs_megatron.config.schema import ColumnOptions, DatasetOptions
from pacs_megatron.data import ResponseRules, end_tokens, load_prompts
from pacs_megatron.errors import DataError
from tests.support.tiny_models import EOS
from tests.support.tiny_tokenizers import (
    ADDED,
    KINDS,
    SPECIAL,
    THINKING_TEMPLATE,
    save_kind,
)

COLUMNS = ColumnOptions(problem="problem", answer="answer", solution="solution")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp(kind)
    save_kind(folder, kind)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def load(tmp_path, data_options):
    def load(tokenizer, folder, *pairs, max_tokens=1000):
        rows = [
            {"problem": problem, "answer": "1", "solution": solution} for problem, solution in pairs
        ]
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows))
        dataset = DatasetOptions(path=str(path), columns=COLUMNS)
        rules = ResponseRules(ends=end_tokens(tokenizer, str(folder)), max_tokens=max_tokens)
        return load_prompts(dataset, data_options(prompt_suffix=""), tokenizer, responses=rules)

    return load


def controls_of(tokenizer, ids):
    added = set(tokenizer.convert_tokens_to_ids([*SPECIAL, *ADDED]))
    return [int(token_id) for token_id in ids if int(token_id) in added]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def responses_of(found):
    return [found.demonstrations.token_ids[prompt.id].tolist() for prompt in found.prompts]


def test_a_control_token_of_a_problem_stays_text(load, tokenizer, folder):
    problems = [f"a{control} {control}{control}b{control}" for control in (*SPECIAL, *ADDED)]
    found = load(tokenizer, folder, ("a word", "so"), *((problem, "so") for problem in problems))
    plain, *hostile = found.prompts
    for problem, prompt in zip(problems, hostile, strict=True):
        assert controls_of(tokenizer, prompt.token_ids) == controls_of(tokenizer, plain.token_ids)
        shell = tokenizer(prompt.text.replace(problem, "@"), add_special_tokens=False)["input_ids"]
        assert decoded(tokenizer, prompt.token_ids) == decoded(tokenizer, shell).replace(
            "@", problem
        )


def test_a_token_that_a_normalizer_creates_stays_text(load, tokenizer, folder):
    problems = ["a<THINK>b", "</Think>", "a\uff1cthink\uff1e", "<tool_CALL>"]
    found = load(tokenizer, folder, ("a word", "so"), *((problem, "so") for problem in problems))
    plain, *hostile = found.prompts
    for prompt in hostile:
        assert controls_of(tokenizer, prompt.token_ids) == controls_of(tokenizer, plain.token_ids)


SOLUTIONS = [
    "<think>\nsteps\n</think>\n\nThe answer is 5.",
    "steps <tool_call>{1}</tool_call> this",
    "\n\nthis",
    " this",
    "this is <|im_start|> a token",
]


def test_a_demonstration_has_the_tokens_of_the_tokenizer(load, tokenizer, folder, kind):
    responses = responses_of(load(tokenizer, folder, *(("1+1", text) for text in SOLUTIONS)))
    for solution, response in zip(SOLUTIONS, responses, strict=True):
        expected = tokenizer(solution, add_special_tokens=False)["input_ids"]
        assert response[-1] == tokenizer.convert_tokens_to_ids(EOS)
        assert controls_of(tokenizer, response[:-1]) == controls_of(tokenizer, expected)

        # SentencePiece adds a space before a text; behind a prompt the policy samples none.
        if kind in ("byte_level", "merges", "strips", "lowercase"):
            assert response[:-1] == expected
        text = decoded(tokenizer, response[:-1])
        assert text.strip() == decoded(tokenizer, expected).strip()


def test_prompt_and_demonstration_continue_each_other(load, tokenizer, folder):
    """The ids of both together are those of the whole text, as a policy reads its own response."""
    found = load(tokenizer, folder, ("1+1", "this is 2"))
    [prompt] = found.prompts
    [response] = responses_of(found)
    whole = tokenizer(prompt.text + "this is 2", add_special_tokens=False)["input_ids"]
    assert [*prompt.token_ids.tolist(), *response[:-1]] == whole


def test_a_demonstration_has_one_end(load, tokenizer, folder):
    endings = ["", EOS, EOS + "\n", EOS + " \n\n"]
    responses = responses_of(load(tokenizer, folder, *(("1+1", "2" + end) for end in endings)))
    assert all(response == responses[0] for response in responses)
    assert responses[0].count(tokenizer.convert_tokens_to_ids(EOS)) == 1


def test_a_demonstration_may_end_with_any_stop_token(load, tmp_path, kind):
    tokenizer = save_kind(tmp_path / "t", kind)
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": [pad]}))
    [response] = responses_of(load(tokenizer, tmp_path / "t", ("1+1", "2<|endoftext|>")))
    assert controls_of(tokenizer, response) == [pad] and response[-1] == pad


def test_a_stop_token_before_the_end_is_an_error(load, tokenizer, folder):
    message = r"rows/1 has the stop token '<\|im_end\|>' \(id \d+\) before its end, .*cut"
    for solution in (f"2{EOS} more", f"2{EOS}{EOS}"):
        with pytest.raises(DataError, match=message):
            load(tokenizer, folder, ("1+0", "1"), ("1+1", solution))


def test_a_tokenizer_that_splits_special_tokens_still_has_those_of_the_template(
    load, tokenizer, folder
):
    whole = load(tokenizer, folder, ("1+1", "<think>2")).prompts[0].token_ids
    tokenizer.split_special_tokens = True
    try:
        found = load(tokenizer, folder, ("1+1", "<think>2"))
    finally:
        tokenizer.split_special_tokens = False
    np.testing.assert_array_equal(found.prompts[0].token_ids, whole)


def test_a_token_that_the_template_has_written_is_not_trained_twice(load, tmp_path, kind):
    tokenizer = save_kind(tmp_path / "t", kind, chat_template=THINKING_TEMPLATE)
    solutions = ["<think>\nsteps</think> 5", "<think> steps</think> 5", "steps</think> 5"]
    found = load(tokenizer, tmp_path / "t", *(("1+1", solution) for solution in solutions))
    think = tokenizer.convert_tokens_to_ids("<think>")
    first, *others = responses_of(found)
    assert think not in first and others == [first, first]
    assert found.prompts[0].token_ids.tolist().count(think) == 1
    assert found.demonstrations.num_opened == 2
    assert found.demonstrations.num_unclosed == 0


def test_demonstrations_that_never_close_the_templates_think_are_counted(load, tmp_path):
    tokenizer = save_kind(tmp_path / "t", "byte_level", chat_template=THINKING_TEMPLATE)
    found = load(tokenizer, tmp_path / "t", ("1+1", "2"), ("1+2", "x</think>3"))
    assert (found.demonstrations.opened, found.demonstrations.num_unclosed) == ("<think>", 1)
    assert found.demonstrations.num_opened == 0
