"""The command line: parsing, errors in one line, and speed."""

import argparse
import contextlib
import errno
import importlib
import inspect
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.cli import build_parser, main
from pacs_megatron.launch.verbs import function_of
from tests.support.fuzz import fuzz
from tests.support.messages import error_lines
from tests.support.run_files import BASE

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "runs").glob("*.yaml"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(BASE)
    return "run.yaml"


def test_config_show(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", config, "run.steps=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  #") for line in lines if line.startswith("run.steps")] == [
        [next(line for line in lines if line.startswith("run.steps")).split("  #")[0], " override"]
    ]
    assert any(
        line.startswith("objective.beta = 2.0 ") and line.endswith("# run.yaml:8") for line in lines
    )
    assert any(
        line.startswith("objective.clip_grad = 0.0 ") and line.endswith("# default")
        for line in lines
    )


def test_printed_files_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a run has escapes, which a program of the run wrote."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("one\n\x1b[2J\x9btwo\tthree\u202e\n")
    assert main(["logs", str(tmp_path)]) == 0
    assert "one\n\\x1b[2J\\x9btwo\tthree\\u202e\n" in capsys.readouterr().out


@pytest.mark.parametrize("run", SHIPPED, ids=lambda path: path.stem)
def test_config_show_of_shipped_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    has_tools = "tools.calculator" in shown or "tools:" not in run.read_text()
    assert "run.name = " in shown and has_tools


def test_overrides_may_follow_options(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "config",
                "explain",
                config,
                "batch.updates_per_step=3",
                "--ranks",
                "4",
                "parallel.tp=2",
            ]
        )
        == 0
    )
    assert "data-parallel replicas" in capsys.readouterr().out
    for words in (["parallel.tp=2", "--rank", "4", "--nosuch=3"], ["--ranks", "4", "nosuch"]):
        assert main(["config", "explain", config, *words]) == 2
        error = capsys.readouterr().err
        assert "unrecognized arguments" in error
        assert "options of a run are written as key=value" in error


def test_config_explain(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "config",
                "explain",
                config,
                "batch.updates_per_step=3",
                "parallel.tp=2",
                "run.nproc=4",
            ]
        )
        == 0
    )
    values = {
        line.split("  ")[0].strip(): line.split("=")[0].split("  ")[-2].strip()
        for line in capsys.readouterr().out.splitlines()
    }
    assert values["ranks"] == "4"
    assert values["data-parallel replicas"] == "2"
    assert values["samples a step"] == "32"
    assert values["samples an update"] == "8 or 12"
    assert values["updates in the run"] == "30"
    assert values["longest sample"] == "1,024 tokens"
    assert values["longest samples in a micro-batch"] == "2"


def test_config_explain_rejects_ranks_that_do_not_factor(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "explain", config, "parallel.tp=2", "--ranks", "3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: 3 ranks are not a multiple of")
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "-1", "many", "1.0", "1e9", "9" * 5000, ""])
def test_a_count_is_a_positive_integer(
    config: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["config", "explain", config, "--ranks"],
        ["logs", "x", "--lines"],
        ["logs", "x", "--attempt"],
    ):
        assert main([*command, number]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"ConfigError: argument {command[-1]}: '{number[:40]}', expected an integer of at "
            "least 1"
        )
        assert error.count("\n") == 1


def test_an_error_of_the_system_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a" * 300
    assert main(["export", name]) == 1
    text = capsys.readouterr().err
    assert text.startswith("OSError: aaa")
    assert text.endswith("File name too long; correct the path or its permissions\n")
    assert text.count("\n") == 1


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert {"run", "objective", "include"} <= set(schema["properties"])
    described = schema["$defs"]["BatchOptions"]["properties"]["prompts_per_step"]
    assert "one rollout batch" in described["description"]


def test_an_error_is_one_line_and_a_code(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "optimizer.lrr=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == "ConfigError: unknown key `optimizer.lrr`; did you mean `optimizer.lr`? (override)\n"
    )


def test_every_verb_has_help() -> None:
    verbs = [
        ["train"],
        ["eval"],
        ["export"],
        ["data", "preview"],
        ["config", "show"],
        ["convert", "verify"],
        ["doctor"],
    ]
    for verb in verbs:
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([*verb, "--help"])
        assert caught.value.code == 0


def verbs_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    groups = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    for group in groups:
        for inner in group.choices.values():
            yield from verbs_of(inner)
    if not groups:
        yield parser


def test_every_verb_calls_a_function_that_takes_its_arguments() -> None:
    verbs = list(verbs_of(build_parser()))
    assert len(verbs) > 20
    for parser in verbs:
        options = {action.dest: None for action in parser._actions if action.dest != "help"}
        inspect.signature(function_of(parser.get_default("place"))).bind(**options)


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")]
)
def test_idle_openmp_threads_of_a_verb_do_not_spin(own: dict[str, str], expected: str) -> None:
    """The real libgomp of torch prints what it read."""
    code = (
        "from pacs_megatron.runtime.command_line import run_command; run_command(lambda: "
        "__import__('torch') and 0)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environ | own | {"OMP_DISPLAY_ENV": "TRUE"},
    )
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr


def test_no_command_line_imports_torch_before_it_runs() -> None:
    code = (
        "import sys, pacs_megatron.cli, pacs_megatron.launch.job, pacs_megatron.launch.serve; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "False\n"


def test_a_closed_pipe_is_quiet(config: str) -> None:
    command = f"{sys.executable} -m pacs_megatron config schema | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "ConfigError: argument <verb>: invalid choice: 'trian'"),
        (["submit", "run.yaml"], "ConfigError: the following arguments are required: --cluster"),
        (
            ["logs", "run", "--lines", "many"],
            "ConfigError: argument --lines: 'many', expected an integer of at least 1",
        ),
        (
            ["config", "show", "run.yaml", "--nosuch"],
            "ConfigError: unrecognized arguments: --nosuch",
        ),
    ],
)
def test_a_usage_error_is_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("trian run.yaml", "train"),
        ("statsu run", "status"),
        ("convert to-megatrn --hf a --out b", "to-megatron"),
        ("preview run.yaml", "data preview"),
        ("explain run.yaml", "config explain"),
        ("to-hf --out b", "convert to-hf"),
        ("resume run.yaml", "train, which also resumes"),
        ("plan run.yaml --serach", "--search"),
        ("plan run.yaml run.steps=1 --local-layers --treace", "--trace"),
        ("data preview run.yaml --row=3 --rwos=3", "--rows"),
        ("eval run.yaml --modle=x", "--model"),
        ("paper table-2 --scale laptopp", "laptop"),
        ("plan pacs-qwen3-8b-1n8g-tp4", "pacs-qwen3-8b-1n8g-tp2"),
        ("submit run.yaml --cluster example-bar", "example-bare"),
        ("plan run.ymal", "run.yaml"),
        ("plan rnu.yaml", "run.yaml"),
        ("config show run.yaml objective.name=GRPO", "grpo"),
        ("status runs/pcas", "pacs"),
        ("compare runs/pcas", "pacs"),
        ("export runs/pcas", "pacs"),
    ],
)
def test_an_error_names_the_nearest_word(
    words: str, meant: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/pacs").mkdir(parents=True)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert f"did you mean {meant}?" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["status", "logs", "export", "compare"])
def test_a_folder_of_runs_is_named_with_its_runs(
    verb: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text(BASE)
    assert main([verb, "runs"]) == 2
    assert "it has the runs a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", [["status"], ["logs"], ["cancel"], ["export"], ["train"], ["config", "show"], ["plan"]]
)
@pytest.mark.parametrize(
    "name", ["a\0b", "\udcff", "a" * 300, "/dev/null/x", "a/" * 3000, "", "\x1b[2J"]
)
def test_odd_paths_are_one_line(
    verb: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, name]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(error_lines(captured.err)) == 1
    assert (
        "Traceback" not in captured.err
        and "crash" not in captured.err
        and "\x1b" not in captured.err
    )


def test_a_bug_is_one_line_with_a_report(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def show(**_options: object) -> str:
        raise BadError

    monkeypatch.setattr("pacs_megatron.config.explain.show", show)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["config", "show", config, "rollout.api_key_env=SECRET_NAME"]
    monkeypatch.setattr(sys, "argv", ["pacs-megatron", *words[:3], "run.seed=3", "--api-token=abc"])
    assert main(words[:3]) == 1
    line = capsys.readouterr().err
    assert line.startswith("InternalError: BadError: ") and line.count("\n") == 1
    [report] = tmp_path.glob("pacs-megatron-crash-*.txt")
    assert str(report) in line
    text = report.read_text()
    assert (
        "Traceback" in text
        and "raise BadError" in text
        and "pydantic 2" in text
        and "run.seed=3" in text
    )
    assert "abc" not in text
    assert report.stat().st_mode & 0o777 == 0o600


def test_a_process_without_output_or_folder_is_one_line(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", None)
        assert main(["config", "show", config]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: standard output is closed; redirect it to a file or to /dev/null\n"
    )
    folder = Path("gone").absolute()
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["config", "show", config]) == 2
    assert (
        capsys.readouterr().err
        == "ConfigError: the working directory was removed; change to another one\n"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ImportError("numpy is\nbroken"),
            "EnvironmentError: ImportError: numpy is broken; check the installation",
        ),
        (MemoryError(), "EnvironmentError: MemoryError: ; check the installation (`make install`)"),
        (
            OSError(12, "Cannot allocate memory"),
            "EnvironmentError: OSError: [Errno 12] Cannot allocate memory; check the",
        ),
        (OSError(errno.EFBIG, "File too large"), "OSError: File too large; free some space"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "FileNotFoundError: No usable temporary directory found in ['/tmp']; correct the path",
        ),
    ],
)
def test_faults_of_the_host_are_one_line(
    config: str,
    error: Exception,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def show(**_options: object) -> str:
        raise error

    monkeypatch.setattr("pacs_megatron.config.explain.show", show)
    assert main(["config", "show", config]) == 1
    found = capsys.readouterr().err
    assert found.startswith(line) and found.count("\n") == 1


VERBS = (
    "config show",
    "config explain",
    "data preview",
    "status",
    "logs",
    "plan",
    "export",
    "cancel",
    "convert to-hf",
)
OPTIONS = ("--ranks", "--rows", "--json", "--lines", "--attempt", "--step", "--out", "--checkpoint")
WORDS = st.sampled_from(
    (
        *OPTIONS,
        "run.steps=",
        "=",
        "-",
        "--",
        "-1",
        "/",
        ".",
        "..",
        "[",
        "\udcff",
        "a\0b",
        "9" * 5000,
    )
)


@pytest.fixture(scope="module")
def imported() -> None:
    """Imports are no work of an input."""
    for name in (
        "convert.convert",
        "convert.logits",
        "data",
        "launch.runs",
        "workbench.evaluation.preview",
        "workbench.plan.command",
    ):
        importlib.import_module(f"pacs_megatron.{name}")


@fuzz
@given(
    verb=st.sampled_from(VERBS),
    words=st.lists(
        WORDS | st.text(max_size=12) | st.from_regex(r"[a-z]+\.[a-z_]+=.{0,12}", fullmatch=True),
        max_size=5,
    ),
)
def test_any_words_are_a_command_or_one_line(imported: None, verb: str, words: list[str]) -> None:
    """Without a run folder or a configuration in the working directory, so nothing is started or
    written.
    """
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([*verb.split(), *words])
        except SystemExit as ended:
            code = ended.code
    if code:
        text = error.getvalue()
        assert text.count("\n") == 1 and "InternalError" not in text and "Error: " in text, text


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "<&- >&- 2>&-", "2> >(exit)"])
def test_a_lost_standard_error_changes_no_exit_code(redirect: str, tmp_path: Path) -> None:
    for words in ("trian", "train nowhere.yaml"):
        command = f"{sys.executable} -m pacs_megatron {words} {redirect}"
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        assert (
            subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environ, check=False
            ).returncode
            == 2
        )


def test_processes_of_a_command_without_standard_error_have_one(tmp_path: Path) -> None:
    """A file that they open next would receive their errors, or their errors would be lost with an
    exception.
    """
    child = "import os, sys; os.fstat(2); print(open('/dev/null').fileno() > 2)"
    code = (
        "from pacs_megatron.runtime.command_line import run_command; import subprocess, sys; "
        f"sys.exit(run_command(lambda: subprocess.call([sys.executable, '-c', {child!r}])))"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = ["bash", "-c", f"{shlex.join([sys.executable, '-c', code])} 2>&-"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_python_without_assertions_is_one_line(config: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONOPTIMIZE": "1"}
    command = [sys.executable, "-m", "pacs_megatron", "config", "show", config]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("ConfigError: PYTHONOPTIMIZE and -O"), (
        done.stderr
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "train --help", "--version", "config schema"])
def test_output_to_a_full_disk_is_one_line(words: str, unbuffered: str) -> None:
    environ = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONUNBUFFERED": unbuffered,
    }
    command = ["bash", "-c", f"{sys.executable} -m pacs_megatron {words} > /dev/full"]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "OSError: No space left on device; free some space\n",
    )


def test_a_library_that_rejects_a_variable_is_one_line(config: str) -> None:
    environ = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HUB_DOWNLOAD_TIMEOUT": "soon",
    }
    command = [sys.executable, "-m", "pacs_megatron", "fetch", config, "model.path=some/model"]
    done = subprocess.run(
        command, env=environ | {"HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        "EnvironmentError: ValueError: invalid literal for int() with base 10: 'soon'; check"
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LOGLEVEL", "chatty", "LOGLEVEL='chatty': torch reads this variable; unset it"),
        ("HF_TOKEN", "hf_secret\n", "HF_TOKEN contains a line end"),
        ("HUGGING_FACE_HUB_TOKEN", "hf_secret\r", "HUGGING_FACE_HUB_TOKEN contains a line end"),
    ],
)
def test_variables_that_end_a_library_later_are_named(
    name: str,
    value: str,
    message: str,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["config", "show", config]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "hf_secret" not in shown and shown.count("\n") == 1
    monkeypatch.setenv(name, "DEBUG")
    assert main(["config", "show", config]) == 0
