import json

import pytest

from pacs_megatron.data import end_tokens, load_tokenizer, stop_token_ids
from pacs_megatron.errors import DataError
from tests.support.tiny_models import save_tokenizer


def test_local_folder(tokenizer_folder, tokenizer):
    assert tokenizer.decode(tokenizer("12 + é", add_special_tokens=False)["input_ids"]) == "12 + é"
    assert stop_token_ids(tokenizer, str(tokenizer_folder)) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(
    ("value", "extra"), [(5, {5}), ([5, 7], {5, 7}), (None, set()), ([], set())]
)
def test_stop_ids_join_both_sources(tmp_path, value, extra):
    tokenizer = save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert stop_token_ids(tokenizer, str(tmp_path)) == tuple(
        sorted({tokenizer.eos_token_id} | extra)
    )


def test_no_stop_token(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.eos_token = None
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match="no end-of-sequence token"):
        stop_token_ids(tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"eos_token_id": "x"}',
        '{"eos_token_id": -1}',
        '{"eos_token_id": [true]}',
        "9" * 5000,
    ],
)
def test_malformed_generation_config(tmp_path, text):
    tokenizer = save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=r"generation_config\.json"):
        stop_token_ids(tokenizer, str(tmp_path))


def one_line(path):
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_folder(tmp_path):
    assert "no such folder" in one_line(tmp_path / "absent")


def test_folder_without_tokenizer(tmp_path):
    assert "the folder has no tokenizer.json" in one_line(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert one_line(tmp_path).endswith(f"correct model.path, such as {tmp_path}/mine")


def test_truncated_tokenizer(tmp_path):
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:100])
    assert "could not load it" in one_line(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    save_tokenizer(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "set model.trust_remote_code=true only if" in one_line(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "generation", "eos", "expected"),
    [
        ([256, 258], "no file", 258, (256, 258)),
        (256, "no file", 258, (256, 258)),
        ([256], [257], 258, (256, 257, 258)),
        (None, None, 258, (258,)),
        ("no key", {}, 258, (258,)),
        (256, [257], None, (256, 257, 258)),
    ],
)
def test_stop_ids_are_those_of_every_file_and_of_the_template(
    tmp_path, config, generation, eos, expected
):
    """As SGLang: config.json and generation_config.json together. The template closes turns with
    258.
    """
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.eos_token = None if eos is None else "<|im_end|>"
    model = {"model_type": "qwen3"}
    if config != "no key":
        model["eos_token_id"] = config
    (tmp_path / "config.json").write_text(json.dumps(model))
    if generation != "no file":
        record = {} if generation == {} else {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(record))
    assert stop_token_ids(tokenizer, str(tmp_path)) == expected


def test_a_config_with_a_vision_tower_has_the_stop_ids_inside(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    config = {"model_type": "qwen3_5", "text_config": {"eos_token_id": 257}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_token_ids(tokenizer, str(tmp_path)) == (257, 258)


def test_the_end_of_a_turn_is_the_end_of_a_demonstration(tmp_path):
    """A base model with the template of a chat model: its end of sequence ends no turn."""
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.eos_token = "<|endoftext|>"
    ends = end_tokens(tokenizer, str(tmp_path))
    assert (ends.stops, ends.end, ends.template, ends.listed) == ((256, 258), 258, 258, {256})

    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    ends = end_tokens(tokenizer, str(tmp_path))
    assert (ends.stops, ends.end, ends.template) == ((256,), 256, None)


def test_tokens_on_which_sglang_always_stops(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens(["<|eom_id|>"])
    added = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert stop_token_ids(tokenizer, str(tmp_path)) == (258, added)


@pytest.mark.parametrize("value", ["x", -1, [True], 1.5])
def test_malformed_end_tokens_of_config_json(tmp_path, value):
    tokenizer = save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DataError, match=r"config\.json: eos_token_id is .*, expected a token id"):
        stop_token_ids(tokenizer, str(tmp_path))
