import json

import pytest

from pacs_megatron.data import load_tokenizer, stop_token_ids
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
    assert "could not load it" in one_line(tmp_path)


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
