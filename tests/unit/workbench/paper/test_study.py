"""`paper`: the real DAG over the shipped studies, with commands that only write their outputs; the
tables' figures.

The same DAG with its real commands, killed and resumed:
tests/integration/workbench/paper/test_study.py.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.cli import main
from pacs_megatron.config import load_config
from pacs_megatron.rollout.passk import pass_at_k
from pacs_megatron.workbench.diversity import vectors_file
from pacs_megatron.workbench.paper import study as paper
from pacs_megatron.workbench.statistics import bootstrap_mean, bootstrap_seeds

PROBLEMS = 4
DRAWS = 16


class Commands:
    """In place of processes: each command writes what it would, from a seed of its words, and is
    noted.
    """

    def __init__(self) -> None:
        self.called: list[str] = []
        self.fails: str | None = None

    def __call__(self, command: list[str], **_: Any) -> Commands:
        words = command[1:] if command[1] == "-c" else command[3:]
        self.called.append(f"{words[0]} {self.place(words)}")
        self.code = 75 if self.fails == self.called[-1] else 0
        if not self.code:
            {
                "-c": self.inputs,
                "train": self.train,
                "eval": self.eval,
                "diversity": self.diversity,
            }[words[0]](words)
        return self

    def wait(self) -> int:
        return self.code

    @staticmethod
    def place(words: list[str]) -> str:
        names = [word.partition("=")[2] for word in words if word.startswith("run.name=")]
        if names:
            return names[0]
        return Path(words[-1] if words[0] == "-c" else words[1]).name

    def inputs(self, words: list[str]) -> None:
        Path(words[-1]).mkdir(parents=True)
        (Path(words[-1]) / "done").touch()

    def train(self, words: list[str]) -> None:
        loaded = load_config(Path(words[1]), words[2:])
        folder = Path(loaded.config.run.dir) / loaded.config.run.name
        checkpoint = folder / "checkpoints" / f"step_{loaded.config.run.steps:06d}"
        for made in (checkpoint, folder / "hf"):
            made.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
        (folder / "config.yaml").write_text(loaded.to_yaml())
        row = {"step": 1, "reward/mean": 0.5, "policy/entropy": 0.3}
        if loaded.config.logging.step_start_entropy:
            row["policy/entropy_step_start"] = 0.4
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "exit_code").write_text("0\n")

    def eval(self, words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        rng = np.random.default_rng(sum(out.parent.name.encode()))
        counts = [
            {"num_samples": DRAWS, "num_correct": int(c)}
            for c in rng.integers(0, DRAWS, size=PROBLEMS)
        ]
        out.mkdir(parents=True, exist_ok=True)
        record = {
            "metrics": {"eval/test/pass@1": 0.5, "eval/test/pass@4": 0.7},
            "problems": {"test": counts},
        }
        (out / "results.json").write_text(json.dumps(record))

    def diversity(self, words: list[str]) -> None:
        run = words[1]
        rng = np.random.default_rng(sum(run.encode()))
        vectors = {f"{run} test": {f"test/{i}": rng.normal(size=(3, 5)) for i in range(PROBLEMS)}}
        Path(words[words.index("--save") + 1]).write_bytes(vectors_file("hashed", vectors))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    found = Commands()
    monkeypatch.setattr(paper.subprocess, "Popen", found)
    yield found


def test_the_laptop_runs_each_node_once_and_prints_the_same_again(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [
        "paper",
        "table2",
        "table3",
        "figure5",
        "--scale",
        "laptop",
        "--dir",
        str(tmp_path),
        "--seeds",
        "2",
    ]
    commands.fails = "train tiny-grpo-s0"
    assert main(call) == 75
    assert (
        "tiny-grpo-s0: train ended with exit code 75; the same command continues there"
        in capsys.readouterr().err
    )
    before = len(commands.called)
    commands.fails = None
    assert main(call) == 0
    assert commands.called[before - 1] == commands.called[before] == "train tiny-grpo-s0"
    runs = []
    for method in ("ppo", "grpo", "pacs"):
        for seed in range(2):
            runs.append(f"tiny-{method}-s{seed}")
    wanted = set()
    for verb in ("train", "eval", "diversity"):
        for run in runs:
            wanted.add(f"{verb} {run}")
    wanted |= {"-c inputs", "train warmstart", "eval tiny-base"}
    assert set(commands.called) == wanted and len(commands.called) == len(wanted) + 1
    assert commands.called[:2] == ["-c inputs", "train warmstart"]
    tables = capsys.readouterr().out.partition("\ntable2")[2]
    count = len(commands.called)
    assert main(call) == 0
    assert len(commands.called) == count
    assert capsys.readouterr().out.partition("\ntable2")[2] == tables
    check_figures(tmp_path)
    # Figure 5(a): every method logs the entropy of all responses at the step's start.
    curves = (tmp_path / "figure5-tiny.html").read_text()
    assert "entropy at the step&#x27;s start: pacs 0.4, grpo 0.4, ppo 0.4" in curves
    panels = (tmp_path / "figure5-tiny-pca.html").read_text()
    assert panels.count("<svg") == PROBLEMS and "PACS" not in panels
    # Two seeds of three responses each; only PACS and GRPO are overlaid.
    assert panels.count('class="dot s0"') == panels.count('class="dot s1"') == 6 * PROBLEMS
    assert 'class="dot s2"' not in panels
    (tmp_path / "tiny-pacs-s1" / "eval" / "results.json").unlink()
    assert main(call) == 0
    assert commands.called[count:] == ["eval tiny-pacs-s1"]
    assert main([*call, "run.steps=40"]) == 2
    assert "choose another --dir" in capsys.readouterr().err


def check_figures(folder: Path) -> None:
    """The values of table2.json are means over seeds and problems of Chen's pass@k."""
    cells = json.loads((folder / "table2.json").read_text())
    assert [(c["method"], c["metric"]) for c in cells] == [
        (method, f"pass@{k}")
        for method, k in itertools.product(("base", "ppo", "grpo", "pacs"), (1, 4, 8))
    ]
    for cell in cells:
        found = list(folder.glob(f"tiny-{cell['method']}*/eval/results.json"))
        assert len(found) == cell["seeds"] == (1 if cell["method"] == "base" else 2)
        counts = []
        for path in found:
            for p in json.loads(path.read_text())["problems"]["test"]:
                counts.append(p["num_correct"])
        k = int(cell["metric"][5:])
        value, low, high = cell["ours"]
        assert value == pytest.approx(100 * np.mean([pass_at_k(DRAWS, c, k) for c in counts]))
        assert low <= value <= high and low < high and cell["published"] is None


def test_the_paper_has_its_published_numbers_beside_ours(
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against table 2 and table 3 of the paper, typed again here."""
    monkeypatch.setattr(
        Commands, "eval", lambda self, words: write_results(Path(words[words.index("--out") + 1]))
    )
    assert main(["paper", "table2", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    [line] = re.findall(r"qwen3-8b beyondaime\n(?:.*\n)+?(pacs .*)", out)
    assert re.findall(r"/ ([\d.]+)", line) == ["28.86", "43.15", "49.58", "55.39", "60.19", "64.02"]
    assert line.count("50.00 [") == 1
    assert [c for c in commands.called if c.startswith("eval")] == [
        f"eval qwen3-8b-{run}"
        for run in ("base", "ppo-s0", "grpo-s0", "pacs-s0", "pacs-unweighted-s0")
    ]
    study = paper.Study("paper", tmp_path, (), None)
    # Figure 6 draws them.
    gpqa = {"base": [48.04], "ppo": [48.48], "grpo": [48.55], "pacs": [52.46]}
    for method, row in gpqa.items():
        assert study.spec["published"]["qwen3-8b"][method]["gpqa"] == row
    assert study.spec["published_diversity"]["qwen3-8b"] == {
        "pacs": {"aime24": 0.0272, "aime25": 0.0392},
        "grpo": {"aime24": 0.0217, "aime25": 0.0249},
    }


def write_results(out: Path, num_correct: int = 64, draws: int = 128) -> None:
    counts = [{"num_samples": draws, "num_correct": num_correct}] * 2
    names = ("math500", "amc23", "aime24", "aime25", "beyondaime")
    out.mkdir(parents=True)
    (out / "results.json").write_text(json.dumps({"problems": dict.fromkeys(names, counts)}))


def test_table_1_has_averages_and_differences_beside_the_abstracts(
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """+8.26 (4B) and +9.57 (8B) on average, as in the abstract."""

    def evaluate(self: Commands, words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        write_results(out, 96 if "pacs" in out.parent.name else 64)

    monkeypatch.setattr(Commands, "eval", evaluate)
    assert main(["paper", "table1", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    cells = json.loads((tmp_path / "table1.json").read_text())
    found = {}
    for cell in cells:
        if cell["place"][1] == "average of 5 benchmarks":
            found[(cell["place"][0], cell["method"], cell["metric"])] = cell
    published = {key: cell["published"] for key, cell in found.items()}
    assert published == {
        ("qwen3-4b", "base", "pass@1"): 54.37,
        ("qwen3-4b", "base", "over base"): None,
        ("qwen3-4b", "pacs", "pass@1"): 62.63,
        ("qwen3-4b", "pacs", "over base"): 8.26,
        ("qwen3-8b", "base", "pass@1"): 53.75,
        ("qwen3-8b", "base", "over base"): None,
        ("qwen3-8b", "pacs", "pass@1"): 63.32,
        ("qwen3-8b", "pacs", "over base"): 9.57,
    }
    assert found[("qwen3-8b", "pacs", "pass@1")]["ours"] == pytest.approx([75.0] * 3)
    assert found[("qwen3-8b", "pacs", "over base")]["ours"] == pytest.approx([25.0] * 3)
    assert "+25.00 [+25.00, +25.00] / +9.57" in printed
    assert "published (tables of version 2" in printed


def test_version_1_has_the_numbers_of_the_pictures_and_not_the_abstracts_label(
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluate(self: Commands, words: list[str]) -> None:
        write_results(Path(words[words.index("--out") + 1]), 256, draws=512)

    monkeypatch.setattr(Commands, "eval", evaluate)
    words = ["paper", "table2", "table2-math500", "--scale", "v1", "--dir", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "read from the pictures of the authors' repository" in printed
    numbers = {}
    for file in ("table2", "table2-math500"):
        for cell in json.loads((tmp_path / f"{file}.json").read_text()):
            key = (cell["place"][1], cell["method"], cell["metric"])
            numbers[key] = cell["published"]
    # The headline of version 1: 59.78 at pass@256, 13.32 above PPO and 14.36 above GRPO.
    best, ppo, grpo = (numbers[("aime24", name, "pass@256")] for name in ("pacs", "ppo", "grpo"))
    assert (best, round(best - ppo, 2), round(best - grpo, 2)) == (59.78, 13.32, 14.36)
    assert [numbers[("aime25", name, "pass@256")] for name in ("pacs", "ppo", "grpo")] == [
        58.22,
        42.91,
        46.45,
    ]
    assert numbers[("math500", "pacs", "pass@2")] == 84.39
    assert numbers[("math500", "base", "pass@32")] == 92.80
    assert ("math500", "pacs", "pass@256") not in numbers


def test_published_averages_of_table_1() -> None:
    """The paper's averages of pass@1 over five benchmarks,
    recomputed from the numbers in the file.
    """
    study = paper.Study("paper", Path("none"), (), None)
    found = {}
    for model, methods in study.spec["published"].items():
        for method in ("base", "pacs"):
            found[(model, method)] = np.mean(
                [
                    methods[method][name][0]
                    for name in study.spec["artefacts"]["table1"]["benchmarks"]
                ]
            )
    wanted = {
        ("qwen3-8b", "pacs"): 63.32,
        ("qwen3-8b", "base"): 53.75,
        ("qwen3-4b", "pacs"): 62.63,
        ("qwen3-4b", "base"): 54.37,
    }
    assert found == {key: pytest.approx(value, abs=0.0065) for key, value in wanted.items()}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["table4"], "table4: unknown at scale paper; choose from table1"),
        (["table6", "--scale", "laptop"], "table6: unknown at scale laptop"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *words, "--dir", str(tmp_path / "none")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_every_run_of_both_studies_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scale, count in (("paper", 52), ("v1", 16), ("laptop", 30)):
        assert (
            main(["paper", "all", "--scale", scale, "--dir", str(tmp_path / "none"), "--dry-run"])
            == 0
        )
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == count and all(": missing  python -" in line for line in lines)
    study = paper.Study("paper", tmp_path, (), None)
    _, chains = study.nodes(list(study.spec["artefacts"].values()))
    assert len(chains) == 20
    for config, overrides in {chain.config: chain.overrides for chain in chains}.items():
        assert load_config(config, overrides).config.run.dir == str(tmp_path)


def test_the_bootstrap_draws_seeds_and_problems() -> None:
    rng = np.random.default_rng(0)
    one = rng.random((1, 40))
    found = bootstrap_seeds(one)
    plain = bootstrap_mean(one[0].tolist())
    assert found is not None and plain is not None
    np.testing.assert_allclose(found, plain, atol=0.01)
    apart = np.repeat(
        [[0.0], [1.0]], 40, axis=1
    )  # two seeds that disagree: the draws are (0,0), (0,1), (1,0), (1,1)
    assert bootstrap_seeds(apart) == (0.5, 0.0, 1.0)
    some = one.copy()
    some[0, :20] = np.nan
    half = bootstrap_seeds(some)
    assert half is not None and half.value == pytest.approx(one[0, 20:].mean())
    assert bootstrap_seeds(np.full((2, 3), np.nan)) is None


def test_the_bootstrap_equals_a_plain_loop_where_seeds_lack_different_problems() -> None:
    rng = np.random.default_rng(1)
    scores = np.stack([rng.random(24), 3 + rng.random(24), 9 * rng.random(24)])
    scores[0, 4:] = scores[1, 20:] = np.nan
    means = []
    for _ in range(1500):
        rows = rng.integers(3, size=3)
        columns = rng.integers(24, size=24)
        drawn = []
        for r in rows:
            for c in columns:
                if not np.isnan(scores[r, c]):
                    drawn.append(scores[r, c])
        means += [sum(drawn) / len(drawn)] if drawn else []
    found = bootstrap_seeds(scores)
    assert found is not None
    np.testing.assert_allclose(
        found, [np.nanmean(scores), *np.percentile(means, [2.5, 97.5])], atol=0.25
    )


def test_a_run_that_did_not_end_well_at_its_last_step_is_not_done(
    commands: Commands, tmp_path: Path
) -> None:
    study = paper.Study("laptop", tmp_path, ("run.steps=40",), 1)
    _, [_, chain, *_] = study.nodes([study.spec["artefacts"]["table2"]])
    train = chain.nodes[0]
    assert train.label == "train" and not train.is_done()
    commands([sys.executable, *train.words])
    assert train.is_done()
    (chain.folder / "exit_code").write_text("75\n")
    assert not train.is_done()
    (chain.folder / "exit_code").write_text("0\n")
    (chain.folder / "hf").rmdir()
    assert not train.is_done()
    (chain.folder / "hf").mkdir()
    study = paper.Study("laptop", tmp_path, ("run.steps=50",), 1)
    assert not study.nodes([study.spec["artefacts"]["table2"]])[1][1].nodes[0].is_done()


LAPTOP = ("--scale", "laptop", "--seeds", "1", "--dir")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run.steps=3"], "no table or figure is named; choose from table1"),
        (["table2", "run={name: x}"], "run={name: x}: a study sets this key or a part of it"),
        (["table2", " run.seed=1"], "a study sets this key"),
        (["table9", "objective.score_std_floor=null"], "objective.score_std_floor=None"),
        (["figure6", "reward.label_rule=last_box"], "reward.label_rule"),
    ],
)
def test_a_mistake_starts_nothing(
    words: list[str],
    complaint: str,
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["paper", *words, "--dir", str(tmp_path / "none")]) == 2
    assert complaint in capsys.readouterr().err
    assert not commands.called and not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a: b", "a #b", "a:", "a ", "a\tb"])
def test_a_folder_that_yaml_reads_otherwise(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["paper", "table2", "--scale", "laptop", "--dir", str(tmp_path / name), "--dry-run"])
        == 2
    )
    assert f"--dir {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("methods: [base, pacs]", "methods: [base, pacs3]", "KeyError: 'pacs3'"),
        ("models: [tiny]", "models: tiny", "KeyError: 't'"),
        ("seeds: 3", "seeds: [3]", "TypeError"),
        ("diversity: [test]", "diversity: [other]", "KeyError: 'other'"),
        (
            "k: [1, 4, 8]\nart",
            "k: [1, 4, 8]\npublished: {tiny: {pacs: {test: [50, 60]}}}\nart",
            "published: [50, 60]",
        ),
        (
            "k: [1, 4, 8]\nart",
            "k: [1, 4, 8]\npublished: {tiny: {pacs: {test: ['50']}}}\nart",
            "TypeError",
        ),
    ],
)
def test_a_malformed_study_is_named(
    before: str,
    after: str,
    complaint: str,
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = paper.shipped_folder("configs").resolve().parent
    for name in ("configs", "examples"):
        shutil.copytree(checkout / name, tmp_path / name)
    file = tmp_path / "configs" / "paper" / "studies" / "laptop.yaml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    monkeypatch.setattr(paper, "shipped_folder", lambda name: tmp_path / name)
    assert (
        main(["paper", "table1", "table3", "--scale", "laptop", "--dir", str(tmp_path / "runs")])
        == 2
    )
    err = capsys.readouterr().err
    assert f"{file} is malformed" in err and complaint in err and not commands.called


def test_a_damaged_output_is_named_and_made_again(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["paper", "table2", "table3", *LAPTOP, str(tmp_path)]
    assert main(call) == 0
    tables = capsys.readouterr().out.partition("\ntable2")[2]
    results = tmp_path / "tiny-pacs-s0" / "eval" / "results.json"
    vectors = tmp_path / "tiny-pacs-s0" / paper.VECTORS
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    damaged: list[tuple[Path, bytes]] = [
        (results, text) for text in (b"", b"{}", b'{"problems": []}')
    ]
    for n, correct in (("2", "5"), ('"2"', "1"), ("2", "null")):
        counts = f'[{{"num_samples": {n}, "num_correct": {correct}}}]'
        damaged.append((results, f'{{"problems": {{"test": {counts}}}}}'.encode()))
    damaged += [
        (vectors, text) for text in (b"", b"text", vectors.read_bytes()[:-9], array.getvalue())
    ]
    for path, content in damaged:
        whole = path.read_bytes()
        path.write_bytes(content)
        assert main(call) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"DataError: {path}")
        path.write_bytes(whole)
    results.unlink()
    vectors.unlink()
    assert main(call) == 0
    assert commands.called[-2:] == ["eval tiny-pacs-s0", "diversity tiny-pacs-s0"]
    assert capsys.readouterr().out.partition("\ntable2")[2] == tables


def test_seeds_with_other_numbers_of_problems(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["paper", "table2", "--scale", "laptop", "--seeds", "2", "--dir", str(tmp_path)]
    assert main(call) == 0
    path = tmp_path / "tiny-pacs-s1" / "eval" / "results.json"
    record = json.loads(path.read_text())
    record["problems"]["test"].pop()
    path.write_text(json.dumps(record))
    assert main(call) == 2
    err = capsys.readouterr().err
    assert str(path) in err and "test has other numbers of problems" in err


def test_no_right_answers(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pass@k is 0 with an interval of 0; a diversity does not exist."""

    def wrong(self: Commands, words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True)
        counts = [{"num_samples": 16, "num_correct": 0}] * 3
        metrics = {"eval/test/pass@1": 0.0}
        (out / "results.json").write_text(
            json.dumps({"metrics": metrics, "problems": {"test": counts}})
        )

    def empty(self: Commands, words: list[str]) -> None:
        vectors = {f"{words[1]} test": {f"test/{i}": np.empty((0, 0)) for i in range(3)}}
        Path(words[words.index("--save") + 1]).write_bytes(vectors_file("hashed", vectors))

    monkeypatch.setattr(Commands, "eval", wrong)
    monkeypatch.setattr(Commands, "diversity", empty)
    assert main(["paper", "table2", "figure5", *LAPTOP, str(tmp_path)]) == 0
    assert {tuple(cell["ours"]) for cell in json.loads((tmp_path / "table2.json").read_text())} == {
        (0.0, 0.0, 0.0)
    }
    assert {cell["ours"] for cell in json.loads((tmp_path / "figure5.json").read_text())} == {None}


def test_jobs_in_the_queue(
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call without --cluster does not train beside them; a chain whose last job ended meanwhile
    is not submitted.
    """
    call = ["paper", "table1", *LAPTOP, str(tmp_path)]
    monkeypatch.setattr(
        paper, "known_jobs", lambda folder: {"7": "train"} if folder.name == "tiny-pacs-s0" else {}
    )
    monkeypatch.setattr(paper, "job_states", lambda jobs: dict.fromkeys(jobs, "PENDING"))
    assert main(call) == 2
    assert f"{tmp_path}/tiny-pacs-s0: in the queue: 7" in capsys.readouterr().err
    assert commands.called == ["-c inputs", "train warmstart"]
    monkeypatch.setattr(paper, "job_states", lambda jobs: {})
    assert main(call) == 0
    study = paper.Study("laptop", tmp_path, (), 1)
    [chain] = study.nodes([study.spec["artefacts"]["table1"]])[1][1:]
    assert not list(paper._submit(chain, Path("none")))
