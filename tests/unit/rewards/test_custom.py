import sys
from dataclasses import replace

import pytest

from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards.custom import Custom

HEAD = """
from fractions import Fraction

import numpy as np


class Mute(Exception):
    def __str__(self):
        return 1 / 0


def judge(prompt, response):
    """


def write(folder, text, name="mine.py"):
    (folder / name).write_text(text)
    return folder / name


def test_function_in_a_file(make_prompt, tmp_path):
    file = write(
        tmp_path, "def judge(prompt, response):\n    return float(prompt.answer in response)\n"
    )
    judge = Custom(f"{file}:judge")
    assert judge(make_prompt("5"), "it is 5") == 1.0
    assert judge(make_prompt("5"), "it is 6") == 0.0


def test_a_function_of_the_sample(make_prompt, tmp_path):
    body = """
def judge(sample):
    [turn] = sample.turns
    assert (turn.role, turn.text) == ("assistant", sample.response)
    names = (sample.problem, sample.prompt, sample.answer, sample.prompt_id, sample.source)
    assert names == ("What is it?", "<user>q</user>", "5", "train/7", "train"), names
    assert "none" not in sample.extra and sample.extra.get("none") is None
    return sample.extra["points"] * (sample.answer in sample.response)
"""
    judge = Custom(f"{write(tmp_path, body)}:judge")
    prompt = replace(make_prompt("5"), extra={"points": 2})
    assert judge(prompt, "it is 5") == 2.0
    assert judge(prompt, "it is 6") == 0.0


@pytest.mark.parametrize(
    ("parameters", "takes_sample"),
    [
        ("sample", True),
        ("sample, strict=True", True),
        ("sample, *, strict=True", True),
        ("sample, *others", True),
        ("sample, **others", True),
        ("prompt, response", False),
        ("prompt, response='', strict=True", False),
        ("prompt, response, strict=True", False),
        ("prompt='', response=''", False),
        ("*arguments", False),
    ],
)
def test_the_form_depends_on_the_parameters(make_prompt, tmp_path, parameters, takes_sample):
    """A function with two required parameters has the form of earlier releases."""
    text = f"def judge({parameters}):\n    return len(locals().get('arguments', ' '))\n"
    judge = Custom(f"{write(tmp_path, text)}:judge")
    assert judge._takes_prompt is not takes_sample
    assert judge(make_prompt("5"), "x") in (1.0, 2.0)


FIELDS = "a sample has the attributes problem, prompt, answer, response, extra, turns, prompt_id"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sample.completion", f"no attribute 'completion'.*; {FIELDS}"),
        ("sample['answer']", f"not subscriptable; {FIELDS}"),
        ("[text for text in sample]", f"not iterable; {FIELDS}"),
        ("sample.extra['kind']", r"sample\.extra has 'level', 'x'; add it to extra_columns of the"),
        ("{}['kind']", r"KeyError: 'kind'$"),
        ("None.answer", r"no attribute 'answer'$"),
        ("len(5)", r"has no len\(\)$"),
    ],
)
def test_a_wrong_guess_names_what_exists(make_prompt, tmp_path, body, message):
    file = write(tmp_path, f"def judge(sample):\n    return {body}\n")
    prompt = replace(make_prompt("5"), extra={"level": 1, "x": 2})
    with pytest.raises(RewardError, match=message):
        Custom(f"{file}:judge")(prompt, "5")


def test_function_in_a_module(make_prompt, tmp_path, monkeypatch):
    write(
        tmp_path,
        "def judge(prompt, response):\n    return len(response)\n",
        "custom_reward_module.py",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert Custom("custom_reward_module:judge")(make_prompt("5"), "abc") == 3.0
    del sys.modules["custom_reward_module"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "expected module:function"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("absent.py:f", "no file"),
        ("{file}:missing", "has no 'missing'"),
        ("{file}:number", "is a int, expected a function"),
        (
            "{file}:three",
            r"three'\(a, b, c\) cannot be called as f\(sample\); .*problem, prompt, answer, resp",
        ),
        ("{file}:none", "cannot be called as f\\(sample\\)"),
        ("builtins:max", "no signature found"),
        ("{broken}:f", "raised ZeroDivisionError"),
    ],
)
def test_rejected_early_in_one_line(tmp_path, function, message):
    file = write(tmp_path, "number = 3\ndef three(a, b, c): ...\ndef none(): ...\n")
    broken = write(tmp_path, "1 / 0\n", "broken.py")
    with pytest.raises(ConfigError, match=message) as caught:
        Custom(function.format(file=file, broken=broken))
    assert "\n" not in str(caught.value)


def one_line(folder, body):
    return Custom(f"{write(folder, HEAD + body)}:judge")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('a')", "raised KeyError"),
        ("return None", "returned NoneType"),
        ("return '1'", "returned str, expected a number"),
        ("return 1j", "returned complex"),
        ("return np.array([1.0, 2.0])", "returned ndarray"),
        ("return np.float32('nan')", "the reward is nan"),
        ("return 10**400", "returned an integer that no 64-bit float can represent"),
        ("raise Mute", "raised Mute: no text, its __str__ raised ZeroDivisionError"),
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt: "),
    ],
)
def test_failures_are_reward_errors(make_prompt, tmp_path, body, message):
    with pytest.raises(RewardError, match=message):
        one_line(tmp_path, body)(make_prompt("5"), "x")


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "True",
        "1.0",
        "np.float32(1)",
        "np.int64(1)",
        "np.bool_(True)",
        "np.array(1.0)",
        "Fraction(1)",
    ],
)
def test_any_real_scalar_is_a_reward(make_prompt, tmp_path, value):
    reward = one_line(tmp_path, f"return {value}")(make_prompt("5"), "x")
    assert type(reward) is float and reward == 1.0


def test_a_wrong_field_of_the_prompt_names_the_fields(make_prompt, tmp_path):
    file = write(tmp_path, "def judge(prompt, response):\n    return prompt.target == response\n")
    with pytest.raises(RewardError, match=r"no attribute 'target'; a prompt has id, .*answer"):
        Custom(f"{file}:judge")(make_prompt("5"), "5")
    other = write(tmp_path, "def judge(prompt, response):\n    return response.target\n", "o.py")
    with pytest.raises(RewardError, match=r"no attribute 'target'$"):
        Custom(f"{other}:judge")(make_prompt("5"), "5")


def test_a_module_beside_the_file_is_imported_after_installed_ones(
    make_prompt, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "def points(text):\n    return len(text)\n", "beside_of_reward.py")
    write(tmp_path, "raise ImportError('not the standard library')\n", "json.py")
    text = "import json\nfrom beside_of_reward import points\n\n\n"
    file = write(tmp_path, text + "def judge(prompt, response):\n    return points(response)\n")
    assert Custom(f"{file}:judge")(make_prompt("5"), "123") == 3.0


def test_an_async_function_is_an_error_before_sampling(make_prompt, tmp_path, recwarn):
    file = write(tmp_path, "async def judge(prompt, response):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"async function.*asyncio\.run inside it"):
        Custom(f"{file}:judge")
    text = (
        "async def inner():\n    return 1.0\n\n\ndef judge(prompt, response):\n    return inner()\n"
    )
    hidden = write(tmp_path, text, "hidden.py")
    with pytest.raises(RewardError, match=r"async function"):
        Custom(f"{hidden}:judge")(make_prompt("5"), "5")
    assert not recwarn.list
