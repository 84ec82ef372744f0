"""`submit` by the real NeMo-Run: every shipped configuration as a dry run, and jobs on a real
Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch import submit as submit_module
from pacs_megatron.launch.batch_script import Submission
from pacs_megatron.launch.submit import expand, submit
from tests.integration.slurm.conftest import (
    read_attempts,
    run_command,
    running,
    submit_by_nemo_run,
    texts_of_jobs,
    wait_for_rows,
)
from tests.support.needs import require_sglang
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "configs" / "clusters"
RUNS = [
    path
    for path in sorted((ROOT / "configs" / "runs").glob("*.yaml"))
    if "gpus_per_node" in path.read_text()
]


def make_request(config: Path, cluster: str = "local", **changes: object) -> Submission:
    options = {
        "config": config,
        "overrides": (),
        "cluster": load_cluster(CLUSTERS / f"{cluster}.yaml"),
    }
    return Submission(**(options | changes))  # type: ignore[arg-type]


def test_every_shipped_config_dry_runs(nemo_run: None, tmp_path: Path) -> None:
    for index, path in enumerate(RUNS):
        cluster = ("example-bare", "example-pyxis", "example-apptainer")[index % 3]
        texts = list(
            submit(make_request(path, cluster, overrides=(f"run.dir={tmp_path}",)), dry_run=True)
        )
        together = "\n".join(texts)
        assert f"name: {path.stem}" in texts[0]
        resources = load_config(path).config.resources
        assert f"--signal=B:USR1@{resources.signal_lead_s}" in together
        assert f"--nodes={resources.nodes + resources.rollout_nodes}\n" in together
        assert "#SBATCH --requeue" in together
        # The script of a user who submits by hand.
        assert f"\nexec bash {ROOT / 'slurm' / 'train.sbatch'} {path} " in together
        assert ("--container-image" in together) == (cluster == "example-pyxis")
        assert ("apptainer exec --nv" in together) == (cluster == "example-apptainer")
    assert not (tmp_path / RUNS[0].stem).exists()  # a dry run leaves no run folder


def test_the_quickstart_dry_runs_before_it_ran(nemo_run: None, tmp_path: Path) -> None:
    for path in sorted((ROOT / "configs" / "runs").glob("quickstart*.yaml")):
        texts = list(submit(make_request(path, overrides=(f"run.dir={tmp_path}",)), dry_run=True))
        assert texts[0].startswith(f"# {load_config(path).config.run.name}: resolved configuration")
        assert f"\nexec bash {ROOT / 'slurm' / 'train.sbatch'} " in "\n".join(texts)


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    jobs = expand(make_request(config, sweep=("objective.beta=0.5,1,2",), seeds=2))
    assert [job.name for job in jobs][:3] == [
        "tiny-beta0.5-seed5",
        "tiny-beta0.5-seed6",
        "tiny-beta1-seed5",
    ]
    assert [(job.loaded.config.run.seed, job.loaded.config.run.name) for job in jobs][-1] == (
        6,
        "tiny-beta2-seed6",
    )
    assert len({job.loaded.config.run.name for job in jobs}) == 6
    with pytest.raises(ConfigError, match=r"evaluation\.benchmarks is empty"):
        expand(make_request(config, evaluate=True))
    with pytest.raises(ConfigError, match="expected key=a,b,c"):
        expand(make_request(config, sweep=("objective.beta",)))
    with pytest.raises(ConfigError, match=r"did you mean `objective\.beta`"):
        expand(make_request(config, sweep=("objective.bet=1,2",)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sweep": ("objective.beta=1,1",)}, "two runs of this request have the name tiny-beta1;"),
        ({"sweep": ("objective.beta=1", "objective.beta=2")}, "two --sweep set objective.beta;"),
        ({"sweep": ("run.seed=1,2",), "seeds": 2}, "--sweep and --seeds both set run.seed;"),
        ({"sweep": ("run.name=a,b",)}, "runs are named by their values"),
        ({"sweep": ("objective.beta=,1",)}, "expected key=a,b,c"),
        ({"sweep": ("=1,2",)}, "expected key=a,b,c"),
        (
            {"sweep": ("objective.beta=1,2",), "convert": True},
            "--convert is for one run, not for --sweep or --seeds;",
        ),
        ({"overrides": ("run.name=a;b",)}, "run.name: expected letters"),
        (
            {"overrides": ("resources.time_limit=00:01:00",)},
            "resources.time_limit=00:01:00 is not longer",
        ),
    ],
)
def test_odd_requests_are_rejected(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    with pytest.raises(ConfigError) as caught:
        expand(make_request(config, **changes))
    assert expected in str(caught.value)


def test_commas_in_brackets_belong_to_the_value(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    jobs = expand(
        make_request(
            config, sweep=("rollout.sampling.stop=[a,b],[c]", "data.prompt_suffix='x,y',z")
        )
    )
    assert [job.loaded.config.rollout.sampling.stop for job in jobs[::2]] == [("a", "b"), ("c",)]  # type: ignore[union-attr]
    assert [job.loaded.config.data.prompt_suffix for job in jobs[:2]] == ["x,y", "z"]


def test_nothing_is_submitted_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        ConfigError, match="`sbatch` is not on PATH; submit from the cluster's login node"
    ):
        list(submit(make_request(config), dry_run=False))
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    with pytest.raises(ConfigError, match=r"model\.path=/nothere: no such folder"):
        list(submit(make_request(config, overrides=("model.path=/nothere",)), dry_run=False))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").write_text("years of work")
    for cluster in ("local", "example-pyxis"):  # a container too: its jobs are noted there
        with pytest.raises(ConfigError, match=r"runs/tiny is not a folder"):
            list(submit(make_request(config, cluster), dry_run=False))
    shutil.rmtree(tmp_path / "bin")
    shutil.rmtree(tmp_path / "runs")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_does_not_fit_is_rejected_without_force(nemo_run: None, tmp_path: Path) -> None:
    big = ROOT / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml"
    overrides = (f"run.dir={tmp_path}", "batch.tokens_per_microbatch=1000000")
    request = make_request(big, "example-bare", overrides=overrides)
    with pytest.raises(ConfigError, match=r"DOES NOT FIT: .* GiB of .* or pass --force$") as caught:
        list(submit(request, dry_run=True))
    assert str(caught.value).startswith(f"{big.stem} DOES NOT FIT")
    forced = list(submit(replace(request, force=True), dry_run=True))
    assert forced[0].startswith(f"# warning: {big.stem} DOES NOT FIT: ")


def test_a_run_that_may_not_fit_gets_a_warning(
    nemo_run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    answer = (True, "MAY NOT FIT: 70 of 80 GiB, but 90 GiB with the highest assumptions")
    monkeypatch.setattr(submit_module, "function_of", lambda place: lambda loaded: answer)
    texts = list(submit(make_request(config), dry_run=True))
    assert texts[0].startswith("# warning: tiny MAY NOT FIT: 70 of 80 GiB, but 90 GiB")
    assert "exec bash" in "".join(texts)


def test_without_nemo_run_the_message_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    with pytest.raises(
        ConfigError, match=r"pip install nemo-run==0\.11\.1 leptonai==0\.27\.0, or: sbatch"
    ):
        list(submit(make_request(config), dry_run=True))


@pytest.mark.slurm
@pytest.mark.campaign
def test_a_sweep_is_a_job_for_each_value(nemo_run: None, slurm: Slurm, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"{(CLUSTERS / 'local.yaml').read_text()}partition: debug\naccount: none\npython: "
        f"[{sys.executable}]\n"
    )
    words = ["submit", str(config), "run.nproc=2", "run.steps=1", "--cluster", str(cluster)]
    done = run_command(slurm, tmp_path, *words, "--sweep", "objective.beta=0.5,2")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = dict(re.findall(r"^(\S+): submitted train=(\d+);", done.stdout, re.MULTILINE))
    assert sorted(jobs) == ["tiny-beta0.5", "tiny-beta2"]
    assert {slurm.wait(job)["JobState"] for job in jobs.values()} == {"COMPLETED"}
    betas = {
        name: load_config(tmp_path / "runs" / name / "config.yaml").config.objective.beta
        for name in jobs
    }  # type: ignore[union-attr]
    assert betas == {"tiny-beta0.5": 0.5, "tiny-beta2": 2.0}


@pytest.mark.slurm
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.campaign)])
def test_two_nodes_signal_requeue_and_evaluation(
    nemo_run: None, slurm: Slurm, tmp_path: Path, launcher: str
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    two_nodes = ["resources.nodes=2", "run.nproc=1", "run.steps=6", "checkpoint.every=3"]
    benchmark = (
        f"evaluation.benchmarks=[{{path: {tmp_path}/train.jsonl, name: sums, columns: {{problem: "
        f"problem, answer: answer}}}}]"
    )
    sampling = "evaluation.sampling={max_response_tokens: 8}"
    jobs = submit_by_nemo_run(
        slurm, config, *two_nodes, benchmark, sampling, "--evaluate", site=f"launcher: {launcher}\n"
    )
    run_dir = tmp_path / "runs" / "tiny"
    wait_for_rows(run_dir, 2)
    # To the script, as --signal=B:USR1@300 does.
    slurm.run("scancel", "--signal=USR1", "--batch", jobs["train"])
    fields = slurm.wait(jobs["train"])
    logs = texts_of_jobs(tmp_path)
    assert fields["JobState"] == "COMPLETED", logs
    assert [row["code"] for row in read_attempts(run_dir)] == [75, 0], logs
    assert (
        "; saved; the same command continues"
        in (run_dir / "logs" / "attempt_1" / "output.log").read_text()
    )
    assert "resumed from" in (run_dir / "logs" / "attempt_2" / "output.log").read_text()
    assert slurm.wait(jobs["eval"])["JobState"] == "COMPLETED"
    assert json.loads((run_dir / "eval" / "results.json").read_text())["metrics"]
    assert os.readlink(run_dir / "logs" / "latest") == "attempt_2"


@pytest.mark.slurm
@pytest.mark.sglang
@pytest.mark.full
def test_a_run_with_a_real_sglang_server_on_a_rollout_node_is_requeued(
    nemo_run: None, slurm: Slurm, tmp_path: Path
) -> None:
    interpreter = require_sglang()
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    run_dir = tmp_path / "runs" / "tiny"
    servers = (
        f"{{python: [{interpreter}], device: cpu, max_total_tokens: 4096, start_timeout_s: 400}}"
    )
    overrides = [
        *("resources.rollout_nodes=1", "run.nproc=2", "run.steps=12"),
        *(
            "rollout=null",
            "rollout.engine=sglang",
            "rollout.dtype=fp32",
            "rollout.sync.transport=broadcast",
        ),
        "rollout.sampling={max_response_tokens: 12, stop: [a, e, i, o, u, s, t, n, r, l]}",
        f"rollout.servers={servers}",
    ]
    jobs = submit_by_nemo_run(slurm, config, *overrides)
    wait_for_rows(run_dir, 2)
    # To the script, as --signal=B:USR1@300 does: the servers must outlive the trainer's save.
    slurm.run("scancel", "--signal=USR1", "--batch", jobs["train"])
    fields = slurm.wait(jobs["train"])
    logs = texts_of_jobs(tmp_path)
    assert fields["JobState"] == "COMPLETED", logs
    attempts = read_attempts(run_dir)
    assert [row["code"] for row in attempts] == [75, 0], logs
    assert 2 <= attempts[0]["end_step"] == attempts[1]["begin_step"] < 12
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()] == list(
        range(1, 13)
    )
    deadline = time.monotonic() + 600
    while (left := running(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.slurm
@pytest.mark.sglang
@pytest.mark.full
@pytest.mark.parametrize("transport", ["ipc", pytest.param("disk", marks=pytest.mark.campaign)])
def test_colocated_servers_on_two_nodes(
    nemo_run: None, slurm: Slurm, tmp_path: Path, transport: str
) -> None:
    """Each trainer node starts its own server; without GPUs the release of memory is a request
    without effect. With ipc each rank sends to the server of its own node.
    """
    interpreter = require_sglang()
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    run_dir = tmp_path / "runs" / "tiny"
    start = "count: 2, colocated: true, max_total_tokens: 4096, start_timeout_s: 600"
    overrides = [
        *("resources.nodes=2", "run.nproc=1", "run.steps=2"),
        *(
            "rollout=null",
            "rollout.engine=sglang",
            "rollout.dtype=fp32",
            f"rollout.sync.transport={transport}",
            "rollout.sync.verify=full",
        ),
        "rollout.sampling={max_response_tokens: 12, stop: [a, e, i, o, u, s, t, n, r, l]}",
        f"rollout.servers={{python: [{interpreter}], device: cpu, {start}}}",
    ]
    jobs = submit_by_nemo_run(slurm, config, *overrides)
    fields = slurm.wait(jobs["train"])
    logs = texts_of_jobs(tmp_path)
    assert fields["JobState"] == "COMPLETED", logs
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()] == [1, 2]
    servers = run_dir / "logs" / "latest" / "servers"
    published = {path.stem: path.read_text().split() for path in sorted(servers.glob("*.urls"))}
    assert [rank for _, rank in published.values()] == ["0", "1"]
    assert list(published) == ["n1", "n2"]
    assert len({url for url, _ in published.values()}) == 2
    # Both received requests: the start, the weights of every step, and the release before each
    # training step.
    senders = {"ipc": 2, "disk": 1}[transport]
    for rank in range(senders):
        text = (run_dir / "logs" / f"rank{rank}.log").read_text()
        assert f"bytes to {2 // senders} servers" in text
    deadline = time.monotonic() + 600
    while (left := running(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.full
def test_jobs_that_follow_a_run_depend_on_it_and_on_each_other(
    nemo_run: None, tmp_path: Path, tiny_qwen3: Path
) -> None:
    config = write_tiny_run(tmp_path, tiny_qwen3)
    later = (("eval", ("eval", "a b.yaml")), ("diversity", ("diversity", "run")))
    text = "\n".join(submit(make_request(config, later=later), dry_run=True))
    assert re.findall(r"(\S+) starts after (\S+)", text) == [
        ("eval", "train"),
        ("diversity", "eval"),
    ]
    assert "slurm/eval.sbatch 'a b.yaml'" in text
    assert "slurm/command.sbatch diversity run" in text
    alone = "\n".join(submit(make_request(config, later=later, train=False), dry_run=True))
    assert re.findall(r"(\S+) starts after (\S+)", alone) == [("diversity", "eval")]
    assert "train.sbatch" not in alone
