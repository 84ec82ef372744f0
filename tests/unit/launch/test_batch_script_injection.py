"""No string of a run, a cluster or a sweep is executed: by `submit`, by its dry run, or by the
scripts that it writes.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import ClusterConfig, ContainerOptions, load_cluster
from pacs_megatron.config.messages import all_keys
from pacs_megatron.errors import ConfigError, PacsError
from pacs_megatron.launch.batch_script import Submission, job_lines, train_arguments
from pacs_megatron.launch.submit import expand, submit
from tests.support.fuzz import NUM_INPUTS, fuzz
from tests.support.messages import error_lines
from tests.support.needs import require_nemo_run
from tests.support.run_files import BASE

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
SGLANG = [
    "rollout={engine: sglang, sampling: {max_response_tokens: 512}, sync: {transport: disk},"
    " servers: {python: [python], device: cpu}}"
]
COMMANDS = [
    "$(touch {0})",
    "'; touch {0}; '",
    "`touch {0}`",
    ";touch {0};",
    "\ntouch {0}\n",
    '"; touch {0}; "',
    "|touch {0}",
    "&&touch {0}&",
    "a b>{0}",
    "${{IFS}}$(touch {0})",
    "\\'$(touch {0})\\",
    "é $(touch {0}) 名",
    "'$(touch {0})'",
    "--help;touch {0}",
]


class Sandbox:
    """A folder with a run, and stand-ins for Slurm's programs and for the interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "CANARY"
        self.config = folder / "run.yaml"
        self.config.write_text(BASE)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        """words of each srun, one file a call"""
        self.calls.mkdir()
        programs = dict.fromkeys(("sbatch", "squeue", "module", "source"), "")
        programs["srun"] = f'printf "%s\\n" "$@" >"{self.calls}/$$"'
        programs["scontrol"] = "echo n1"
        # The answers of `launch.job` to scripts of slurm/.
        programs["python"] = f"""case " $* " in
*" describe "*) cat "{folder}/description" ;;
*" begin "*) echo "{folder}" ;;
esac"""
        for name, text in programs.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.bin / name).chmod(0o755)
        description = {"TRAIN_NODES": 1, "ROLLOUT_NODES": 0, "RANKS_PER_NODE": 1}
        description |= {"MAX_ATTEMPTS": 3, "RUN_DIR": folder}
        lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in description.items()]
        (folder / "description").write_text("".join(lines))

    def cluster(self, **changes: object) -> ClusterConfig:
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"name": "x", **changes}, allow_unicode=True))
        return load_cluster(path)

    def scripts(
        self, overrides: Sequence[str], cluster: ClusterConfig, sweep: Sequence[str] = ()
    ) -> list[str]:
        request = Submission(
            config=self.config, overrides=tuple(overrides), cluster=cluster, convert=True
        )
        texts = list(submit(request, dry_run=True))
        if sweep:
            texts += submit(replace(request, convert=False, sweep=tuple(sweep)), dry_run=True)
        return [
            text.partition("\n")[2] for text in texts if text.partition("\n")[2].startswith("#!")
        ]

    def execute(self, scripts: Sequence[str]) -> None:
        for script in scripts:
            path = self.folder / "script.sh"
            path.write_text(script)
            subprocess.run(
                ["bash", str(path)],
                capture_output=True,
                timeout=60,
                check=False,
                cwd=self.folder,
                env={
                    "PATH": f"{self.bin}:/usr/bin:/bin",
                    "SLURM_JOB_ID": "1",
                    "SLURM_JOB_NAME": "x",
                    "SLURM_JOB_NUM_NODES": "1",
                    "SLURM_JOB_NODELIST": "n1",
                },
            )


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    require_nemo_run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMORUN_HOME", raising=False)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO()
    )  # its tunnel reads it, which pytest's own rejects
    return Sandbox(tmp_path)


def text_keys() -> dict[str, set[str]]:
    """All keys of a run whose value contains free text -> forms of the value by the key's type.

    `submit` rejects a run with an agent.
    """
    keys: dict[str, set[str]] = {}
    for key, _, field in all_keys():
        kind = str(field.annotation)
        if "str" not in kind or key.startswith("rollout.agent"):
            continue
        form = "{}"
        if "tuple[" in kind:
            form = "[{}]"
        if "dict[" in kind:
            form = "{{x: {}}}"
        keys.setdefault(key, set()).add(form)
    return keys


def accepted(sandbox: Sandbox, base: Sequence[str], payload: str) -> list[str]:
    """Overrides that put `payload` at each key that accepts it."""
    found: list[str] = []
    value = json.dumps(payload)
    for key, forms in text_keys().items():
        for form in sorted(forms):
            text = f"{key}={form.format(value)}"
            if loads(sandbox, [*base, text]):
                found.append(text)
                break
    return together(sandbox, base, found)


def together(sandbox: Sandbox, base: Sequence[str], texts: list[str]) -> list[str]:
    """Those of `texts` that a run accepts together: a text may be the name of another data set."""
    if not texts or loads(sandbox, [*base, *texts]):
        return texts
    if len(texts) == 1:
        return []
    middle = len(texts) // 2
    first = together(sandbox, base, texts[:middle])
    return first + together(sandbox, [*base, *first], texts[middle:])


def loads(sandbox: Sandbox, overrides: Sequence[str]) -> bool:
    """Whether the configuration is accepted; otherwise its error is one line."""
    try:
        load_config(sandbox.config, overrides)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def accepted_cluster(sandbox: Sandbox, payload: str) -> ClusterConfig:
    """A cluster with `payload` at each key that accepts it.

    `setup` is shell by definition and left out.
    """
    found: dict[str, object] = {}
    for name in ClusterConfig.model_fields:
        for value in (
            payload,
            ["python", payload],
            {"X": payload},
            {"runtime": "pyxis", "image": payload},
        ):
            if name == "setup":
                continue
            try:
                sandbox.cluster(**{**found, name: value})
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                continue
            found[name] = value
            break
    return sandbox.cluster(**found)


def check(sandbox: Sandbox, payload: str) -> int:
    """Submit and execute with `payload` in every string; returns the number of strings that accept
    it.
    """
    overrides = accepted(sandbox, [], payload)
    cluster = accepted_cluster(sandbox, payload)
    sweep = [f"data.prompt_suffix={json.dumps(payload)},other"]
    try:
        sandbox.execute(sandbox.scripts(overrides, cluster, sweep))
    except PacsError as error:
        assert len(str(error).splitlines()) == 1
        # NeMo-Run cannot contain such a run.dir: without it everything else is in the scripts.
        overrides = [text for text in overrides if not text.startswith("run.dir=")]
        sandbox.execute(sandbox.scripts(overrides, cluster, sweep))
    assert not sandbox.canary.exists(), payload
    return len(overrides)


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_no_command_is_executed(sandbox: Sandbox, command: str) -> None:
    check(sandbox, command.format(sandbox.canary))


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS[2:])
def test_no_other_command_is_executed(sandbox: Sandbox, command: str) -> None:
    check(sandbox, command.format(sandbox.canary))


def test_the_check_sees_an_execution(sandbox: Sandbox) -> None:
    """Without quotes the canary appears, and most strings accept a command."""
    payload = COMMANDS[0].format(sandbox.canary)
    assert len(accepted(sandbox, SGLANG, payload)) > 8
    sandbox.execute([f"#!/bin/bash\necho {payload}\n"])
    assert sandbox.canary.exists()


# A dry run takes seconds.
@partial(fuzz, num_inputs=NUM_INPUTS // 20)
@pytest.mark.timeout(1800)
@given(
    payload=st.text(
        alphabet=st.sampled_from(list("$();|&<>\"'`\\\n\t *?[]{}~#!%=-a/é名\u202e")),
        min_size=1,
        max_size=40,
    )
)
def test_any_text_in_every_string(sandbox: Sandbox, payload: str) -> None:
    check(sandbox, f"{payload}$(touch {sandbox.canary}){payload}")


@pytest.mark.parametrize("base", [[], SGLANG], ids=["embedded", "sglang"])
def test_shellcheck_on_generated_scripts(sandbox: Sandbox, base: list[str]) -> None:
    assert SHELLCHECK.exists(), "make install-dev"
    payload = f"'$(touch {sandbox.canary})\" `x`"
    cluster = sandbox.cluster(
        python=["python", payload],
        env={"A": payload},
        scratch=f"/{payload}",
        modules=["cuda/12.9"],
        account="me",
    )
    overrides = [
        *base,
        f"data.prompt_suffix={json.dumps(payload)}",
        f"model.path={json.dumps(payload)}",
    ]
    if base:
        overrides += ["resources.rollout_nodes=1", "rollout.sync.transport=broadcast"]
        overrides += [
            "resources.gpus_per_node=8",
            "resources.gpu=h100",
            "rollout.servers.device=cuda",
        ]
    request = Submission(config=sandbox.config, overrides=tuple(overrides), cluster=cluster)
    (job,) = expand(request)
    path = sandbox.folder / "own.sh"
    path.write_text(f"#!/bin/bash\n{job_lines(cluster, train_arguments(job, request))}\n")
    done = subprocess.run(
        [SHELLCHECK, "--exclude=SC2016", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    for script in sandbox.scripts(overrides, cluster):
        path.write_text(script)
        # NeMo-Run's own lines have warnings.
        done = subprocess.run(
            [SHELLCHECK, "--severity=error", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_every_word_reaches_srun_as_it_is_written(sandbox: Sandbox) -> None:
    """The body of a job by hand reads them from variables of the site."""
    odd = 'it\'s $(a) "b"  *'
    cluster = sandbox.cluster(
        python=["python", odd],
        srun_args=[f"--comment={odd}"],
        cpu_bind="map_ldom:0",
        container={"runtime": "pyxis", "image": odd, "mounts": ["/a b:/c"]},
        env={"A": odd},
    )
    overrides = (f"data.prompt_suffix={json.dumps(odd)}",)
    request = Submission(config=sandbox.config, overrides=overrides, cluster=cluster)
    (job,) = expand(request)
    for arguments in (train_arguments(job, request), ["eval", "run.yaml", odd], ["diversity", odd]):
        lines = job_lines(cluster, arguments)
        sandbox.execute([f"#!/bin/bash\n{lines}\necho not reached >{sandbox.folder}/reached\n"])
        [call] = sandbox.calls.iterdir()
        words = call.read_text().splitlines()
        call.unlink()
        at = words.index("-m")
        assert words[at - 7 : at] == [
            "--cpu-bind=map_ldom:0",
            f"--container-image={odd}",
            f"--container-workdir={sandbox.folder}",
            "--container-mounts=/a b:/c",
            f"--comment={odd}",
            "python",
            odd,
        ]
        assert words[at:] == ["-m", "pacs_megatron", *arguments]
    assert not (sandbox.folder / "reached").exists()


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def dry_run(sandbox: Sandbox, *words: str) -> subprocess.CompletedProcess[str]:
    for name in ("home", "tmp"):
        (sandbox.folder / name).mkdir(exist_ok=True)
    sandbox.cluster()
    return subprocess.run(
        [
            *(sys.executable, "-m", "pacs_megatron", "submit", "run.yaml", "--dry-run"),
            *("--cluster", "cluster.yaml", *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=sandbox.folder,
        env={
            **os.environ,
            "HOME": str(sandbox.folder / "home"),
            "TMPDIR": str(sandbox.folder / "tmp"),
        },
    )


def test_a_dry_run_writes_to_standard_output_only(sandbox: Sandbox) -> None:
    dry_run_folders = ("home", "tmp")
    for name in dry_run_folders:
        (sandbox.folder / name).mkdir()
    sandbox.cluster()
    before = tree(sandbox.folder)
    done = dry_run(sandbox, "--convert")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH" in done.stdout and "/tmp/pacs-submit" not in done.stdout
    assert f"{sandbox.folder}/runs/.nemo_run/experiments/demo" in done.stdout
    assert tree(sandbox.folder) == before


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=runs/q$(touch CANARY)",
        "run.dir=runs/q;touch CANARY",
        'run.dir="runs/q\\ntouch CANARY"',
        "run.dir=a b",
    ],
)
def test_a_folder_that_nemo_run_cannot_contain_is_rejected(sandbox: Sandbox, override: str) -> None:
    for name in ("home", "tmp"):
        (sandbox.folder / name).mkdir()
    sandbox.cluster()
    before = tree(sandbox.folder)
    done = dry_run(sandbox, override)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = error_lines(done.stderr)
    assert "run.dir" in line
    assert tree(sandbox.folder) == before


def test_a_folder_name_that_nemo_run_replaces_is_rejected(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="NeMo-Run replaces /nemo_run in scripts"):
        sandbox.scripts(["model.path=/data/nemo_run/model"], sandbox.cluster())


def test_container_options_are_covered() -> None:
    assert set(ContainerOptions.model_fields) == {"runtime", "image", "mounts"}


def test_too_many_runs_are_rejected(sandbox: Sandbox) -> None:
    request = Submission(
        config=sandbox.config, overrides=(), cluster=sandbox.cluster(), seeds=1_000_000
    )
    with pytest.raises(ConfigError, match="give 1000000 runs, but one request submits at most 256"):
        expand(request)
