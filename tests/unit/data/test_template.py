from datetime import datetime

import pytest

from pacs_megatron.data.template import render, text_after_answer
from pacs_megatron.errors import DataError
from tests.support.tiny_models import save_tokenizer

NOW = datetime(2026, 1, 31, 23, 59, 7)


@pytest.fixture
def with_template(tmp_path):
    def make(template):
        return save_tokenizer(tmp_path / "tokenizer", chat_template=template)

    return make


@pytest.mark.parametrize("part", ["%Y", "%b", "%d", "%A", "%H", "%M", "%S", "%j"])
@pytest.mark.parametrize(
    "place", ["{{ strftime_now(%s) }}", "{%% set d = strftime_now(%s) %%}{{ d }}"]
)
def test_every_part_of_the_time_is_that_of_the_argument(with_template, data_options, part, place):
    tokenizer = with_template(place % repr(part) + "{{ messages[0].content }}")
    rendered = render(["x"], data_options(), tokenizer, NOW)
    assert rendered.texts == [NOW.strftime(part) + "x"]
    assert rendered.prints_time


def test_a_macro_prints_the_time_too(with_template, data_options):
    tokenizer = with_template(
        "{% macro today() %}{{ strftime_now('%Y') }}{% endmacro %}{{ today() }}"
        "{{ messages[0].content }}"
    )
    rendered = render(["x"], data_options(), tokenizer, NOW)
    assert rendered.texts == ["2026x"] and rendered.prints_time


def test_an_argument_in_place_of_the_time(with_template, data_options):
    """As Llama 3.2's template does."""
    tokenizer = with_template(
        "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%Y') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    data = data_options(chat_template_args={"date_string": "26 Jul 2024"})
    rendered = render(["x"], data, tokenizer, NOW)
    assert rendered.texts == ["26 Jul 2024x"] and not rendered.prints_time


def test_a_template_without_time(tokenizer, data_options):
    assert not render(["x"], data_options(), tokenizer, NOW).prints_time


def test_a_random_template_is_an_error(with_template, data_options):
    tokenizer = with_template("{{ range(99999) | random }}{{ messages[0].content }}")
    with pytest.raises(DataError, match="gives another text each time; remove its random parts"):
        render(["x"], data_options(), tokenizer, NOW)


@pytest.mark.parametrize(
    ("template", "after"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
            "<|im_end|>\n",
        ),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "</s>"),
        ("{{ messages[0].content }}", ""),
        ("{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('no') }}{% endif %}", ""),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "\n"),
    ],
    ids=["chatml", "end of sequence", "first turn only", "raises", "line end"],
)
def test_the_text_after_an_answer(with_template, template, after):
    assert text_after_answer(with_template(template)) == after


def test_no_template(with_template):
    assert text_after_answer(with_template(None)) == ""
