import json
from datetime import datetime

import pytest

from pacs_megatron.config.schema import BenchmarkOptions, ColumnOptions, DatasetOptions
from pacs_megatron.data import ResponseRules, load_prompts
from pacs_megatron.data.notices import check_dropped, notices, train_notices
from pacs_megatron.data.tokenizer import EndTokens
from pacs_megatron.errors import DataError
from tests.support.tiny_tokenizers import THINKING_TEMPLATE, save_kind

NOW = datetime(2026, 1, 31, 23, 59, 7)
COLUMNS = ColumnOptions(problem="problem", answer="answer", solution="solution")
ENDS = EndTokens(listed=frozenset([258]), template=258, eos=258)


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(rows, data, *, max_response=None, benchmark=False, max_tokens=None):
        path = tmp_path / "set.json"
        keys = ("problem", "answer", "solution")
        path.write_text(json.dumps([dict(zip(keys, row, strict=False)) for row in rows]))
        kind = BenchmarkOptions if benchmark else DatasetOptions
        rules = None
        if max_response is not None:
            rules = ResponseRules(ends=ENDS, max_tokens=max_response)
        return load_prompts(
            kind(path=str(path), columns=COLUMNS, name="bench" if benchmark else "set"),
            data,
            tokenizer,
            now=NOW,
            max_tokens=max_tokens,
            responses=rules,
        )

    return load


def test_plain_data_have_no_notice(load, data_options):
    found = load([("a", "1", "x"), ("b", "1", "y")], data_options())
    assert notices(found, NOW) == []
    check_dropped(found, data_options(max_dropped_frac=0.0))


def test_problems_of_two_training_sets_are_counted(load, data_options):
    first = load([("a", "1"), ("b", "2"), ("c", "3")], data_options())
    second = load([("b ", "2"), ("d", "4")], data_options(), benchmark=True)
    [line] = train_notices([first, second], NOW)
    assert line.startswith("bench: 1 of 2 problems are in set too, so they are trained more often")


@pytest.mark.parametrize(("allowed", "is_error"), [(0.25, False), (0.24, True), (0.0, True)])
def test_dropped_prompts_above_the_share_are_an_error(load, data_options, allowed, is_error):
    data = data_options(max_prompt_tokens=200, max_dropped_frac=allowed)
    found = load([("a" * 500, "1"), ("b", "1"), ("c", "1"), ("d", "1")], data)
    [line] = notices(found, NOW)
    assert line == (
        "set: 1 of 4 rows are dropped: 1 prompts above data.max_prompt_tokens=200 tokens"
    )
    if not is_error:
        check_dropped(found, data)
        return
    with pytest.raises(DataError, match=rf"more than data\.max_dropped_frac={allowed:g}; raise"):
        check_dropped(found, data)


def test_long_demonstrations_are_counted_with_their_lengths(load, data_options):
    rows = [("a", "1", "x" * 9), ("b", "1", "x" * 10), ("c" * 500, "1", "x"), ("d", "1", "x")]
    data = data_options(max_prompt_tokens=200)
    found = load(rows, data, max_response=10)
    assert [prompt.id for prompt in found.prompts] == ["set/0", "set/3"]
    assert (found.num_too_long, found.demonstrations.num_too_long, found.num_dropped) == (1, 1, 2)
    assert found.demonstrations.lens.tolist() == [10, 11, 2]
    [line] = notices(found, NOW)
    assert line.endswith(
        "1 prompts above data.max_prompt_tokens=200 tokens, "
        "1 demonstrations above rollout.max_response_tokens=10"
    )
    with pytest.raises(DataError, match="2 of 4 rows are dropped"):
        check_dropped(found, data)


def test_a_long_problem_of_a_benchmark(load, data_options):
    rows = [("a" * 500, "1"), ("b", "1")]
    data = data_options()
    found = load(rows, data, benchmark=True, max_tokens=200)
    [line] = notices(found, NOW)
    assert line.startswith("bench: 1 of 2 rows are dropped: 1 prompts above 200 tokens, the model")
    with pytest.raises(DataError, match="bench: 1 of 2 rows are dropped"):
        check_dropped(found, data)


def test_repeated_and_contradicting_rows(load, data_options):
    rows = [("a", "1")] * 50 + [("b", "2")] * 49 + [("b", "3")]
    repeated, contradicting = notices(load(rows, data_options()), NOW)
    assert repeated.startswith("set: 98 of 100 prompts repeat an earlier one (2 different problems")
    assert contradicting.startswith("set: 1 problems have different answers, such as set/50 and")


def test_a_benchmark_of_the_training_data(load, data_options):
    train = load([("a", "1"), ("b", "2")], data_options())
    same = load([("b", "2"), ("c", "3")], data_options(), benchmark=True)
    [line] = notices(same, NOW, train=[train])
    assert line.startswith("bench: 1 of 2 problems are in the training data set too")
    other = load([("d", "2"), ("c", "3")], data_options(), benchmark=True)
    assert notices(other, NOW, train=[train]) == []


def test_a_template_that_prints_the_time(load, data_options, tokenizer, monkeypatch):
    template = "{{ strftime_now('%H:%M') }} {{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    [line] = notices(load([("a", "1")], data_options()), NOW)
    assert "prints the time" in line and "2026-01-31 23:59:07" in line
    assert "data.chat_template_args" in line


def test_demonstrations_beside_a_template_that_thinks(data_options, tmp_path):
    thinks = save_kind(tmp_path / "thinks", "byte_level", chat_template=THINKING_TEMPLATE)
    data = data_options()
    path = tmp_path / "set.json"
    rows = [("a", "<think>\nx</think>1"), ("b", "2")]
    keys = ("problem", "solution")
    path.write_text(json.dumps([dict(zip(keys, row, strict=True), answer="1") for row in rows]))
    ends = EndTokens(listed=frozenset(), template=thinks.eos_token_id, eos=None)
    found = load_prompts(
        DatasetOptions(path=str(path), columns=COLUMNS),
        data,
        thinks,
        responses=ResponseRules(ends=ends, max_tokens=100),
    )
    twice, unclosed = notices(found, NOW)
    assert "1 demonstrations start with <think>" in twice
    assert "1 demonstrations never close the <think>" in unclosed
