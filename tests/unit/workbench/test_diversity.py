"""Diversity against a plain double loop, what is left out of it, and the command on an evaluation's
files.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.cli import main
from pacs_megatron.errors import ConfigError, DataError
from pacs_megatron.workbench.diversity import (
    Embedder,
    load_embedder,
    load_vectors,
    question_scores,
    question_vectors,
    vectors_file,
)


def distances(correct: dict[str, list[str]], embed: Embedder) -> dict[str, float]:
    return question_scores(question_vectors(correct, embed))


def letters(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


def plain(texts: Sequence[str]) -> float:
    distances = []
    for left, right in itertools.combinations(letters(texts).tolist(), 2):
        dot = sum(x * y for x, y in zip(left, right, strict=True))
        distances.append(1 - dot / math.hypot(*left) / math.hypot(*right))
    return sum(distances) / len(distances)


def test_equals_a_plain_double_loop_for_each_question() -> None:
    one = ["aab", "abc", "ccb", "a"]
    two = ["b", "bc"]
    found = distances({"q1": one, "q2": two}, letters)
    assert found == {
        "q1": pytest.approx(plain(one), abs=1e-7),
        "q2": pytest.approx(plain(two), abs=1e-7),
    }


def test_same_and_orthogonal_and_opposite() -> None:
    assert distances({"q": ["ab", "aabb"]}, letters)["q"] == pytest.approx(0.0, abs=1e-12)
    assert distances({"q": ["a", "b"]}, letters)["q"] == pytest.approx(1.0)
    assert distances({"q": ["a", "b"]}, lambda _: np.array([[1.0, 0.0], [-3.0, 0.0]]))[
        "q"
    ] == pytest.approx(2.0)


def test_methods_of_a_file_keep_their_order(tmp_path: Path) -> None:
    """A set of names would have another order in each process."""
    names = [f"method-{number}" for number in (7, 3, 9, 1, 8, 2, 6, 4, 5, 0)]
    vectors = {name: {"q": np.ones((2, 3), dtype=np.float32)} for name in names}
    file = tmp_path / "vectors.npz"
    file.write_bytes(vectors_file("hashed", vectors))
    description, found = load_vectors([file])
    assert description == "hashed" and list(found) == names


def test_no_distance_is_negative() -> None:
    """Rounding gives some equal vectors a cosine above 1."""
    rows = np.random.default_rng(0).normal(size=(50, 1, 7))
    assert all(
        distances({"q": ["a", "b"]}, lambda _, row=row: np.repeat(row, 2, axis=0))["q"] >= 0.0
        for row in rows
    )


def test_questions_with_fewer_than_two_correct_are_left_out() -> None:
    assert set(distances({"q1": ["a", "b"], "q2": ["a"], "q3": []}, letters)) == {"q1"}


@pytest.mark.parametrize(
    ("vectors", "complaint"),
    [
        (np.ones((3, 2)), r"shape \(3, 2\), expected \(2, dimension\)"),
        (np.ones(2), "shape"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), "zero or not finite"),
        (np.array([[1.0, 0.0], [np.nan, 0.0]]), "zero or not finite"),
    ],
)
def test_embeddings_that_cannot_be_compared_are_rejected(
    vectors: np.ndarray, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        distances({"question 7": ["a", "b"]}, lambda _: vectors)


def write_evaluation(folder: Path, responses: dict[str, list[tuple[str, int]]]) -> Path:
    """Results as `eval` writes them: prompt id -> (response, label)."""
    rest = {
        "prompt": "p",
        "answer": "1",
        "failure": None,
        "stop": "eos",
        "prompt_tokens": 1,
        "response_tokens": 1,
    }
    records = []
    for prompt, found in responses.items():
        for i, (text, label) in enumerate(found):
            records.append(
                rest
                | {
                    "id": f"eval0:{prompt}#{i}",
                    "prompt_id": prompt,
                    "source": "sums",
                    "response": text,
                    "label": label,
                }
            )
    folder.mkdir(parents=True)
    lines = [json.dumps(record) for record in [{"digest": "d"}, *records]]
    (folder / "samples-d.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "results.json").write_text(json.dumps({"samples": "samples-d.jsonl"}))
    return folder


def test_the_command_on_two_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = write_evaluation(
        tmp_path / "same", {f"sums/{i}": [("one way", 1)] * 3 + [("wrong", 0)] for i in range(4)}
    )
    ways = ["by parts", "we add the digits", "note that 3 = 1 + 2", "so the sum is"]
    varied = {f"sums/{i}": [(way, 1) for way in ways] for i in range(4)} | {
        "sums/9": [("alone", 1), ("no", 0)]
    }
    run = write_evaluation(tmp_path / "run" / "eval", varied).parent
    out = tmp_path / "page.html"
    assert main(["diversity", str(same), str(run), "--embedder", "hashed", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "no semantic model" in lines[0]
    assert f"{same} sums: 0.0000 [0.0000, 0.0000] over 4 questions, 0 with fewer" in lines[1]
    expected = distances({"q": ways}, load_embedder("hashed")[1])["q"]
    assert f"{run} sums: {expected:.4f} " in lines[2]
    assert "1 with fewer than two correct" in lines[2]
    page = out.read_text()
    assert page.count("<svg") == 2 and "no semantic model" in page
    assert main(["diversity", str(run), str(run / "eval"), "--embedder", "hashed"]) == 2
    assert "eval is given twice" in capsys.readouterr().err
    assert main(["diversity", str(tmp_path), "--embedder", "hashed"]) == 2
    assert "no results.json" in capsys.readouterr().err


MODULES = ["Transformer", "Pooling", "Normalize"]


def embedding_model(
    folder: Path,
    model: Path,
    config: dict[str, object],
    modules: Sequence[str] = MODULES,
    limit: object = None,
) -> Path:
    """`model` in the format of sentence-transformers."""
    shutil.copytree(model, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 8} | config)
    )
    listed = [
        {"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    return folder


@pytest.mark.parametrize(
    ("config", "limit", "pool"),
    [
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            None,
            lambda states: states.mean(0),
        ),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, 4, lambda states: states[0]),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, None, lambda states: states[-1]),
        ({"pooling_mode": "mean"}, 4, lambda states: states.mean(0)),
        ({"pooling_mode": ["lasttoken"]}, 4, lambda states: states[-1]),
    ],
    ids=["mean", "first", "last", "mean of 4 tokens", "last of 4 tokens"],
)
def test_an_embedding_model_is_pooled_as_its_files_state(
    tmp_path: Path,
    tiny_qwen3: Path,
    config: dict[str, object],
    limit: int | None,
    pool: Callable[[Any], Any],
) -> None:
    """Each text alone through transformers, without padding, is the reference."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = embedding_model(tmp_path / "embedder", tiny_qwen3, config, limit=limit)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    name, embed = load_embedder(str(folder))
    assert name.startswith(f"{folder}, pooling: ") and (
        limit is None or f"at most {limit} tokens" in name
    )
    texts = [
        "short",
        "a text that is much longer than the other one",
        "x",
        *(["of another batch"] * 8),
    ]
    for text, vector in zip(texts, embed(texts), strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"][:limit]])
        with torch.inference_mode():
            expected = pool(model(ids).last_hidden_state[0])
        np.testing.assert_allclose(vector, expected.numpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "modules", "limit", "complaint"),
    [
        (
            {"pooling_mode_max_tokens": True},
            MODULES,
            None,
            "pooling ['max']; expected mean, cls or lasttoken",
        ),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            MODULES,
            None,
            "['mean', 'cls']",
        ),
        ({}, MODULES, None, "pooling []"),
        ({"pooling_mode": {"a": 1}}, MODULES, None, "pooling {'a': 1}"),
        (
            {"pooling_mode": "mean"},
            [*MODULES, "Dense"],
            None,
            "'Dense']; expected Transformer, Pooling",
        ),
        ({"pooling_mode": "mean"}, [], None, "modules.json lists []"),
        ({"pooling_mode": "mean"}, MODULES, -1, "max_seq_length -1; expected a positive integer"),
    ],
)
def test_other_embedding_models_are_rejected(
    tmp_path: Path,
    tiny_qwen3: Path,
    config: dict[str, object],
    modules: list[str],
    limit: object,
    complaint: str,
) -> None:
    folder = embedding_model(tmp_path / "embedder", tiny_qwen3, config, modules, limit)
    with pytest.raises(ConfigError) as caught:
        load_embedder(str(folder))
    assert complaint in str(caught.value) and f"--embedder {folder}" in str(caught.value)


def test_a_model_without_pooling_is_rejected(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_evaluation(tmp_path / "run", {"sums/0": [("a", 1), ("b", 1)]})
    for folder in (tiny_qwen3, tmp_path / "none"):
        assert (
            main(
                [
                    "diversity",
                    str(run),
                    "--embedder",
                    str(folder),
                    "--out",
                    str(tmp_path / "page.html"),
                ]
            )
            == 2
        )
        assert f"--embedder {folder}" in capsys.readouterr().err
