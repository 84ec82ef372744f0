"""`pacs-megatron eval` on a real folder, with a real reward pool, through the command line's own
entry point.
"""

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pacs_megatron.cli import main
from pacs_megatron.errors import CheckpointError
from pacs_megatron.rollout.passk import pass_at_k
from pacs_megatron.workbench.evaluation import sample_file
from pacs_megatron.workbench.evaluation.command import _folder_of, _names
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny_qwen3, save_tokenizer
from tests.support.tiny_run import write_tiny_run

REWARD = """
def longer_than_three(prompt, response):
    return float(len(response) > 3)
"""


@pytest.fixture
def config(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """Two benchmarks of 3 and 2 problems; a reward that a random model sometimes earns."""
    for name, count in (("first", 3), ("second", 2)):
        rows = [{"q": f"What is {i} + {i}?", "a": str(2 * i)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    columns = {"problem": "q", "answer": "a"}
    # A random model hardly ever ends by itself, and a cut answer is wrong: let any small letter end
    # it.
    sampling = {"max_response_tokens": 16, "stop": list("abcdefghijklmnopqrstuvwxyz")}
    tree = {
        "run": {"name": "test", "dir": str(tmp_path / "runs"), "steps": 1, "seed": 3},
        "model": {"path": str(tiny_qwen3)},
        "objective": {"name": "pacs"},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 2, "tokens_per_microbatch": 2048},
        "rollout": {
            "engine": "embedded",
            "sampling": {"max_response_tokens": 16},
            "batch_sequences": 7,
        },
        "reward": {"name": "custom", "function": f"{tmp_path / 'reward.py'}:longer_than_three"},
        "data": {"train": {"path": str(tmp_path / "first.jsonl"), "columns": columns}},
        "optimizer": {"lr": 1e-4},
        "evaluation": {
            "benchmarks": [
                {"path": str(tmp_path / f"{name}.jsonl"), "columns": columns}
                for name in ("first", "second")
            ],
            "samples_per_prompt": 6,
            "k": [1, 4],
            "sampling": sampling,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML, and has no anchors
    return path


def read_samples(out: Path) -> list[dict]:
    [file] = out.glob("samples-*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def test_counts_estimates_and_files(config, tmp_path, tiny_qwen3, capsys):
    assert main(["eval", str(config)]) == 0
    out = tmp_path / "runs" / "test" / "eval"
    results = json.loads((out / "results.json").read_text())
    samples = read_samples(out)
    assert len(samples) == 5 * 6
    assert len({sample["id"] for sample in samples}) == len(samples)
    labels = set()
    for name, count in (("first", 3), ("second", 2)):
        correct = []
        for row in range(count):
            mine = [sample for sample in samples if sample["prompt_id"] == f"{name}/{row}"]
            assert len(mine) == 6
            for sample in mine:
                # Judged by hand: the verdict, unless the answer was cut.
                assert sample["label"] == (len(sample["response"]) > 3 and sample["stop"] == "eos")
                labels.add(sample["label"])
            correct.append(sum(sample["label"] for sample in mine))
        for k in (1, 4):
            expected = sum(pass_at_k(6, c, k) for c in correct) / count
            assert results["metrics"][f"eval/{name}/pass@{k}"] == pytest.approx(expected, abs=1e-12)
        assert [problem["num_correct"] for problem in results["problems"][name]] == correct
    assert labels == {0, 1}
    assert results["model"] == str(tiny_qwen3)
    assert [results["rows"][name]["too_long"] for name in ("first", "second")] == [0, 0]
    printed = capsys.readouterr().out
    assert f"{results['metrics']['eval/first/pass@4']:.4f}" in printed
    assert "results.json" in printed


def test_rows_outside_where_are_counted_and_ids_stay(config, tmp_path):
    change = "evaluation.benchmarks.0.where={a: {one_of: ['0', '4']}}"
    assert main(["eval", str(config), change, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["rows"] == {
        "first": {
            "read": 3,
            "where": {"a": {"one_of": ["0", "4"]}},
            "outside_where": 1,
            "too_long": 0,
            "used": 2,
        },
        "second": {"read": 2, "where": {}, "outside_where": 0, "too_long": 0, "used": 2},
    }
    assert [problem["problem_id"] for problem in results["problems"]["first"]] == [
        "first/0",
        "first/2",
    ]


@pytest.mark.full  # the resumed evaluation below compares samples too
def test_the_same_command_gives_the_same_samples_and_another_model_others(
    config, tmp_path, tiny_qwen3_tied
):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    assert main(["eval", str(config), "--out", str(first)]) == 0
    assert main(["eval", str(config), "--out", str(again)]) == 0
    assert main(["eval", str(config), "--model", str(tiny_qwen3_tied), "--out", str(other)]) == 0
    samples_of = [sorted(map(json.dumps, read_samples(folder))) for folder in (first, again, other)]
    assert samples_of[0] == samples_of[1] != samples_of[2]


def test_an_evaluation_that_was_killed_goes_on_with_the_same_samples(config, tmp_path, monkeypatch):
    """Killed inside a line; then with more draws: samples that exist stay, byte for byte."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    assert main(["eval", str(config), "--out", str(whole)]) == 0
    [file] = whole.glob("samples-*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    cut.mkdir()
    target = cut / file.name
    target.write_bytes(b"".join(lines[:10]) + lines[10][:-20])
    assert main(["eval", str(config), "--out", str(cut)]) == 0
    assert target.read_bytes().startswith(b"".join(lines[:10]))
    assert sorted(target.read_bytes().splitlines(keepends=True)) == sorted(lines)
    metrics = [
        json.loads((folder / "results.json").read_text())["metrics"] for folder in (whole, cut)
    ]
    assert metrics[0] == metrics[1]
    before = target.read_bytes()
    assert main(["eval", str(config), "evaluation.samples_per_prompt=8", "--out", str(cut)]) == 0
    assert target.read_bytes().startswith(before)
    assert len({sample["id"] for sample in read_samples(cut)}) == len(read_samples(cut)) == 5 * 8
    # Nothing is missing: nothing is loaded, and fewer draws count the first ones only.
    monkeypatch.setattr("pacs_megatron.workbench.evaluation.samplers.EmbeddedSampler.load", None)
    assert main(["eval", str(config), "--out", str(cut)]) == 0
    assert json.loads((cut / "results.json").read_text())["metrics"] == metrics[0]


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now() + timedelta(days=1)


def test_an_evaluation_goes_on_after_midnight(config, tmp_path, tiny_qwen3, monkeypatch):
    """Its template prints the date; a long problem is dropped, and counted."""
    model = tmp_path / "dated"
    shutil.copytree(tiny_qwen3, model)
    save_tokenizer(model, chat_template="{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    rows = [{"q": "x" * 1100, "a": "1"}, *({"q": f"{i} + 1", "a": str(i + 1)} for i in range(9))]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", str(config), "--model", str(model), "--out", str(tmp_path / "out")]
    words.append("evaluation.samples_per_prompt=4")
    assert main(words) == 0
    [file] = (tmp_path / "out").glob("samples-*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:10]))

    monkeypatch.setattr(sample_file, "datetime", Tomorrow)
    assert main(words) == 0
    assert sorted(file.read_bytes().splitlines(keepends=True)) == sorted(lines)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [results["rows"][name]["too_long"] for name in ("first", "second")] == [1, 0]
    assert results["metrics"]["eval/first/num_problems"] == 9


def test_a_changed_reward_file_judges_no_part_of_the_samples(config, tmp_path, capsys):
    words = ["eval", str(config), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    (tmp_path / "reward.py").write_text(REWARD.replace("3", "4"))
    assert main(words) == 2
    assert "judged with reward files=" in capsys.readouterr().err
    assert main([*words, "--rejudge"]) == 0
    labels = [
        (row["label"], row["response"], row["stop"]) for row in read_samples(tmp_path / "out")
    ]
    assert all(label == (len(text) > 4 and stop == "eos") for label, text, stop in labels)


BROKEN = "def broken(prompt, response):\n    raise OSError('no judge')\n"


def test_another_verifier_judges_the_samples_again(config, tmp_path, capsys, monkeypatch):
    assert main(["eval", str(config), "--out", str(tmp_path / "out")]) == 0
    before = read_samples(tmp_path / "out")
    (tmp_path / "reward.py").write_text(
        REWARD + "def short(prompt, response):\n    return float(len(response) < 4)\n" + BROKEN
    )
    short = f"reward.function={tmp_path / 'reward.py'}:short"
    monkeypatch.setattr("pacs_megatron.workbench.evaluation.samplers.EmbeddedSampler.load", None)
    assert main(["eval", str(config), short, "--out", str(tmp_path / "out")]) == 2
    assert "--rejudge" in capsys.readouterr().err
    results = tmp_path / "out" / "results.json"
    ours = results.read_bytes()
    results.write_text('{"results": "of another program"}')
    assert main(["eval", str(config), short, "--out", str(tmp_path / "out"), "--rejudge"]) == 2
    assert (
        "results.json exists and is not an earlier output of this command"
        in capsys.readouterr().err
    )
    assert read_samples(tmp_path / "out") == before
    results.write_bytes(ours)
    assert main(["eval", str(config), short, "--out", str(tmp_path / "out"), "--rejudge"]) == 0
    after = read_samples(tmp_path / "out")
    assert [row["response"] for row in after] == [row["response"] for row in before]
    assert [row["label"] for row in after] == [
        int(len(r["response"]) < 4 and r["stop"] == "eos") for r in before
    ]
    assert main(["eval", str(config), "--out", str(tmp_path / "new"), "--rejudge"]) == 2
    assert "does not have all samples" in capsys.readouterr().err
    broken = f"reward.function={tmp_path / 'reward.py'}:broken"
    assert main(["eval", str(config), broken, "--out", str(tmp_path / "out"), "--rejudge"]) == 1
    assert "could not be judged" in capsys.readouterr().err
    assert read_samples(tmp_path / "out") == after
    more = "evaluation.samples_per_prompt=8"
    assert main(["eval", str(config), more, "--out", str(tmp_path / "out"), "--rejudge"]) == 2
    assert "does not have all samples" in capsys.readouterr().err
    assert read_samples(tmp_path / "out") == after
    [file] = (tmp_path / "out").glob("samples-*.jsonl")
    whole = file.read_bytes()
    for name, value in (
        ("prompt_tokens", -9),
        ("prompt_tokens", 2.5),
        ("stop", "tired"),
        ("response", None),
    ):
        header, first, rest = whole.split(b"\n", 2)
        file.write_bytes(
            b"\n".join([header, json.dumps(json.loads(first) | {name: value}).encode(), rest])
        )
        assert main(["eval", str(config), "--out", str(tmp_path / "out"), "--rejudge"]) == 2
        assert ":2: not a judged sample" in capsys.readouterr().err
    header, rest = whole.split(b"\n", 1)
    for judged_by in ({}, {"judged_by": [1]}):
        changed = {
            key: value for key, value in json.loads(header).items() if key != "judged_by"
        } | judged_by
        file.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
        assert main(["eval", str(config), "--out", str(tmp_path / "out")]) == 2
        assert ":1: no header of these samples" in capsys.readouterr().err


def test_a_failed_verdict_is_judged_again_by_rejudge(config, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    words = ["eval", str(config), "--out", str(tmp_path / "out")]
    reward.write_text(REWARD.replace("return", "raise OSError('no judge'); return"))
    assert main(words) == 1
    assert "and pass --rejudge" in capsys.readouterr().err
    reward.write_text(REWARD)
    assert main([*words, "--rejudge"]) == 0
    assert all(sample["failure"] is None for sample in read_samples(tmp_path / "out"))


def test_results_of_each_model_have_a_folder_of_their_own():
    folders = [
        SimpleNamespace(path=Path("/models", name)) for name in ("a/m-3", "b/m", "c/m", "d/m")
    ]
    assert _names(folders) == ["m-3", "m", "m-4", "m-5"]


def test_the_export_of_a_pruned_checkpoint_is_evaluated(tmp_path, tiny_qwen3):
    export = tmp_path / "run" / "hf_exports" / "step_000001"
    shutil.copytree(tiny_qwen3, export)
    assert _folder_of(str(tmp_path / "run" / "checkpoints" / "step_000001")).path == export
    with pytest.raises(CheckpointError, match="no such folder"):
        _folder_of(str(tmp_path / "run" / "checkpoints" / "step_000002"))


def test_several_models_and_draws_of_each_benchmark(
    config, tmp_path, tiny_qwen3, tiny_qwen3_tied, capsys
):
    tree = json.loads(config.read_text())
    tree["evaluation"]["benchmarks"][1] |= {"samples_per_prompt": 2, "k": [2]}
    config.write_text(json.dumps(tree))
    out = tmp_path / "out"
    assert (
        main(
            [
                "eval",
                str(config),
                "--out",
                str(out),
                "--model",
                str(tiny_qwen3),
                str(tiny_qwen3_tied),
            ]
        )
        == 0
    )
    for name in (tiny_qwen3.name, tiny_qwen3_tied.name):
        results = json.loads((out / name / "results.json").read_text())
        assert len(read_samples(out / name)) == 3 * 6 + 2 * 2
        assert results["k"] == {"first": [1, 4], "second": [2]}
        assert "eval/second/pass@1" not in results["metrics"]
        assert results["metrics"]["eval/first/avg@6"] == pytest.approx(
            results["metrics"]["eval/first/pass@1"]
        )
    assert tiny_qwen3_tied.name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluation.sampling.temperature=-1"], "evaluation.sampling.temperature"),
        (["model.path=nowhere"], "nowhere: no such folder"),
        (["evaluation.sampling.max_response_tokens=4000"], "exceed the model's context of 1024"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(config, tmp_path, capsys, arguments, message):
    assert main(["eval", "--out", str(tmp_path / "out"), str(config), *arguments]) != 0
    errors = [line for line in capsys.readouterr().err.splitlines() if "Error: " in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs").exists()


def test_nothing_to_evaluate_is_an_error_with_the_place(config, tmp_path, capsys):
    tree = yaml.safe_load(config.read_text())
    del tree["evaluation"]
    config.write_text(yaml.safe_dump(tree))
    assert main(["eval", str(config)]) == 2
    assert "evaluation.benchmarks is empty" in capsys.readouterr().err


@pytest.mark.full
def test_a_run_and_its_checkpoints_in_one_call(tmp_path, capsys):
    """A checkpoint is exported once; the last one has the weights of the run's own export."""
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    assert main(["train", str(config), "parallel.tp=1", "run.nproc=1"]) == 0
    run = tmp_path / "runs" / "tiny"
    steps = [run / "checkpoints" / f"step_00000{step}" for step in (1, 2)]
    columns = "columns: {problem: problem, answer: answer}"
    words = [
        *(
            "eval",
            str(config),
            "--out",
            str(tmp_path / "out"),
            "--model",
            str(run),
            *map(str, steps),
        ),
        f"evaluation.benchmarks=[{{path: {tmp_path}/train.jsonl, name: sums, limit: 4, "
        f"{columns}}}]",
        "evaluation.sampling={max_response_tokens: 8}",
    ]
    assert main(words) == 0
    names = ("tiny", "tiny-step_000001", "tiny-step_000002")
    digests = [
        json.loads((tmp_path / "out" / name / "results.json").read_text())["weights_digest"]
        for name in names
    ]
    assert digests[0] == digests[2] != digests[1]
    written = (run / "hf_exports" / "step_000001" / "model.safetensors").stat().st_mtime_ns
    assert main(words) == 0
    assert (run / "hf_exports" / "step_000001" / "model.safetensors").stat().st_mtime_ns == written
    assert capsys.readouterr().out.count("results.json") == 6


AGENT = """
async def solve(problem, session):
    answer = await session.generate(max_tokens=4)
    if problem.problem.startswith("What is 1 "):
        raise ValueError("no luck")
    session.append(await session.call("sum", expression=problem.problem[8:-1]))
    await session.generate(max_tokens=4)
"""


@pytest.fixture
def with_agent(config, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    agent = {
        "function": f"{tmp_path / 'my_agent.py'}:solve",
        "tools": {"sum": {"kind": "calculator"}},
        "workers": 4,
        "tool_workers": 1,
    }
    tree = json.loads(config.read_text())
    tree["rollout"]["agent"] = agent
    tree["reward"]["max_failure_frac"] = 1.0
    tree["evaluation"]["sampling"] = {"max_response_tokens": 80}
    config.write_text(json.dumps(tree))
    return config


def test_several_turns_with_a_tool(with_agent, tmp_path, capsys):
    assert main(["eval", str(with_agent), "evaluation.samples_per_prompt=4"]) == 0, (
        capsys.readouterr().err
    )
    samples = read_samples(tmp_path / "runs" / "test" / "eval")
    assert len(samples) == 5 * 4
    for sample in samples:
        number = int(sample["prompt_id"].rpartition("/")[2])
        if number == 1:
            assert sample["failure"] == "agent: it raised ValueError: no luck"
            assert sample["label"] is None
            continue
        first, message, last = sample["turns"]
        assert (first["role"], message["role"], last["role"]) == (
            "assistant",
            "environment",
            "assistant",
        )
        assert message["text"].splitlines()[1].startswith(str(2 * number))
        assert sample["response"] == f"{first['text']}\n{last['text']}"
        assert sample["label"] == int(len(sample["response"]) > 3)
        [call] = first["calls"]
        assert json.loads(call["arguments"]) == {"expression": f"{number} + {number}"}

    # The file has every sample, so the same command runs no agent; another agent is another file.
    (tmp_path / "runs" / "test" / "eval" / "results.json").unlink()
    assert main(["eval", str(with_agent), "evaluation.samples_per_prompt=4"]) == 0
    assert read_samples(tmp_path / "runs" / "test" / "eval") == samples
    (tmp_path / "my_agent.py").write_text(AGENT.replace("max_tokens=4", "max_tokens=5"))
    assert main(["eval", str(with_agent), "evaluation.samples_per_prompt=4"]) == 0
    assert len(list((tmp_path / "runs" / "test" / "eval").glob("samples-*.jsonl"))) == 2
