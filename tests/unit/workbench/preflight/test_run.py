"""Results of `preflight` on good and unusual hosts, for servers that start, and for several ranks
that compare.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.reward_options import FormatReward, MathReward
from pacs_megatron.errors import PacsError
from pacs_megatron.workbench.evaluation.preview import Unverified
from pacs_megatron.workbench.plan.plan import make_plan
from pacs_megatron.workbench.preflight import doctor, quota
from pacs_megatron.workbench.preflight import host as preflight_host
from pacs_megatron.workbench.preflight import run as preflight
from pacs_megatron.workbench.preflight.check import Check
from pacs_megatron.workbench.preflight.ranks import run_everywhere, run_rank_checks
from pacs_megatron.workbench.preflight.run import planned_ending_s, run_preflight
from pacs_megatron.workbench.preflight.servers import (
    EXPECTED,
    NCCL_CODE,
    check_compilers,
    check_nccl,
)
from tests.support.ranks import run_ranks
from tests.support.servers.fake_sglang import FakeSglang
from tests.support.tiny_models import CHAT_TEMPLATE, PAD, make_tiny_qwen3, save_tokenizer
from tests.support.tiny_run import with_agent, write_tiny_run

ROOT = Path(__file__).parents[4]
SERVER = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--port" not in sys.argv:
    print("{version}")
    sys.exit()
PORT = int(sys.argv[sys.argv.index("--port") + 1])


class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({{"weight_version": "default"}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({answer})

    def log_message(self, *args):
        pass


HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
ANSWER = '{"text": "a", "meta_info": {"id": "1"}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "NCCL_", "GLOO_", "MASTER_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


def find(checks: list[Check], key: str) -> Check:
    (found,) = [check for check in checks if check.key == key]
    return found


# --------------------------------------------------------------------------------------------------
# servers
def with_server(
    folder: Path, model: Path, *, version: str = "0.5.23", answer: str = ANSWER
) -> tuple[Path, list[str]]:
    """(configuration, overrides) of a run whose server is a small stand-in."""
    python = folder / "python"
    python.write_text(SERVER.format(python=sys.executable, version=version, answer=answer))
    python.chmod(0o755)
    overrides = [
        "rollout=null",
        "rollout.engine=sglang",
        "rollout.sampling.max_response_tokens=8",
        "rollout.sync.transport=disk",
        "rollout.servers.device=cpu",
        f"rollout.servers.python=[{python}]",
    ]
    return write_tiny_run(folder, model), overrides


def test_a_server_is_started_used_and_ended(tmp_path: Path, model: Path) -> None:
    config, overrides = with_server(tmp_path, model)
    checks = run_preflight(config, overrides)
    assert not [str(check) for check in checks if check.level == "fail"]
    found = find(checks, "rollout.servers")
    assert (
        found.level == "ok"
        and "started in" in found.message
        and "weight version default" in found.message
    )
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]


def test_skipped_servers_are_reported(tmp_path: Path, model: Path) -> None:
    config, overrides = with_server(tmp_path, model)
    found = find(run_preflight(config, overrides, start_servers=False), "rollout.servers")
    assert found.level == "warn" and "--skip-servers" in found.message


def test_another_version_and_a_server_that_is_none(tmp_path: Path, model: Path) -> None:
    config, overrides = with_server(
        tmp_path, model, version="0.4.1", answer='{"detail": "not found"}'
    )
    checks = run_preflight(config, overrides)
    assert find(checks, "rollout.servers.python").level == "warn"
    assert find(checks, "rollout.servers").level == "fail"
    assert "is it SGLang?" in find(checks, "rollout.servers").message


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21"])
def test_retract_needs_a_server_that_flushes_beside_waiting_requests(
    tmp_path: Path, model: Path, version: str
) -> None:
    """SGLang 0.5.20 rejects `/flush_cache` while retracted requests wait (scheduler.py:4825)."""
    config, overrides = with_server(tmp_path, model, version=version)
    checks = run_preflight(config, [*overrides, "rollout.sync.pause=retract"], start_servers=False)
    found = [str(check) for check in checks if check.key == "rollout.sync.pause"]
    assert len(found) == (version == "0.5.20")
    assert all("sglang 0.5.20 keeps its cache" in text for text in found)


@pytest.mark.parametrize("length", [136 + 1, 136 + 2])
def test_a_running_server_with_a_short_context_is_named(
    tmp_path: Path, model: Path, length: int
) -> None:
    """The run has prompts of 128 tokens and responses of 8."""
    with FakeSglang() as server:
        server.context = length
        overrides = [
            "rollout=null",
            "rollout.engine=sglang",
            "rollout.sampling.max_response_tokens=8",
            "rollout.sync.transport=disk",
            f"rollout.urls=[{server.url}]",
        ]
        found = find(run_preflight(write_tiny_run(tmp_path, model), overrides), "rollout.urls")
    assert found.level == ("fail" if length < 138 else "ok"), found
    if length < 138:
        assert "context or KV cache of 137 tokens" in found.message
        assert "at least 138" in found.message


@pytest.mark.parametrize("missing", ["ninja", "nvcc", "c++", ""])
def test_compilers_are_searched_as_the_server_searches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """`ninja` beside the interpreter, `nvcc` in CUDA_HOME, `c++` on PATH."""
    environment = tmp_path / "environment"
    system = tmp_path / "system"
    cuda = tmp_path / "cuda"
    for path in (environment / "ninja", cuda / "bin" / "nvcc", system / "c++"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name != missing:
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
    (environment / "python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setenv("PATH", str(system))
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    found = check_compilers((str(environment / "python"),))
    assert found.level == ("fail" if missing else "ok"), found
    assert found.message.startswith(f"{missing} not found" if missing else "ninja, nvcc and c++")


@pytest.mark.parametrize("file", ["sglang.lock", "sglang-gpu.txt"])
def test_locks_documents_and_preflight_name_one_sglang(file: str) -> None:
    """The one that requires the torch of base.lock on Python 3.12, and so its NCCL."""
    root = Path(__file__).parents[4]
    text = (root / "requirements" / file).read_text()
    assert f"\nsglang=={EXPECTED}\n" in text
    base = (root / "requirements" / "base.lock").read_text()
    torch_lines = re.findall(r"^torch==.*$", base, re.MULTILINE)
    if file == "sglang.lock":
        assert re.findall(r"^torch==.*$", text, re.MULTILINE) == torch_lines

    (torch,) = re.findall(r'^torch==(\S+); python_version >= "3.12"$', base, re.MULTILINE)
    documents = (root / "docs" / "compatibility.md").read_text()
    assert f"| SGLang {EXPECTED} | torch {torch}," in documents
    if file == "sglang-gpu.txt":
        assert f"torch {torch}" in text
        assert f"requirements/{file}" in (root / "docs" / "operations.md").read_text()


# --------------------------------------------------------------------------------------------------
# ranks
def test_ranks_agree_and_measure(tmp_path: Path, model: Path) -> None:
    config = write_tiny_run(tmp_path, model)
    found = run_ranks(lambda _rank, _world: run_everywhere(config, []), 2, init_process_group=False)
    assert found[1] == []
    assert not [str(check) for check in found[0] if check.level == "fail"]
    levels = {check.key: check.level for check in found[0]}
    for key in ("versions", "GPUs", "model.path", "run.dir", "clocks", "network"):
        assert levels[key] == "ok"
    assert not list(tmp_path.glob(".pacs-try-*"))


@pytest.mark.full
def test_ranks_on_hosts_that_differ(tmp_path: Path, model: Path) -> None:
    """Each rank in a folder of its own stands for a node that shares nothing with the other."""

    def on_rank(rank: int, _world: int) -> list[str]:
        host = tmp_path / f"host{rank}"
        host.mkdir()
        mine = make_tiny_qwen3(host / "model")
        if rank:
            (mine / "chat_template.jinja").write_text("{{ messages }}")
        os.chdir(host)
        config = write_tiny_run(host, mine)
        config.write_text(config.read_text().replace(str(host), "."))
        return [str(check) for check in run_rank_checks(config, []) if check.level == "fail"]

    found = run_ranks(on_rank, 2, init_process_group=False)
    assert [line.split(":")[0] for line in found[0]] == ["fail  model.path", "fail  run.dir"]
    assert "differs on ranks [1]" in found[0][0] and "ranks [1] do not see" in found[0][1]
    assert found[1] == []


def test_a_layout_that_does_not_fit_the_ranks_is_one_line(tmp_path: Path, model: Path) -> None:
    config = write_tiny_run(tmp_path, model)
    found = run_ranks(lambda *_: run_rank_checks(config, []), 1, init_process_group=False)
    assert [check.level for check in found[0]] == ["fail"] and "not a multiple of" in found[0][
        0
    ].message


# --------------------------------------------------------------------------------------------------
# host
def test_requirements_are_this_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(doctor.version_problems())
    lines = ["torch>=99", "no-such-package-at-all>=1", "torch<1; extra == 'gpu'", "numpy>=2"]
    monkeypatch.setattr(doctor, "requires", lambda _name: lines)
    found = list(doctor.version_problems())
    assert [(check.level, check.key) for check in found] == [
        ("fail", "torch"),
        ("fail", "no-such-package-at-all"),
    ]


@pytest.mark.parametrize(
    ("driver", "visible", "key", "fix"),
    [
        (False, None, "resources.gpus_per_node", "inside the job"),
        (True, "", "resources.gpus_per_node", "unset CUDA_VISIBLE_DEVICES"),
        (True, None, "CUDA", "install torch for your CUDA"),
    ],
)
def test_why_there_is_no_gpu(
    driver: bool,
    visible: str | None,
    key: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n"
    )
    monkeypatch.setattr(
        preflight_host, "DRIVER_FILES", (tmp_path if driver else tmp_path / "none",)
    )
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = preflight_host._no_gpu(8)
    assert found.key == key and fix in found.fix and found.level == ("fail" if driver else "warn")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ib", ["ib0", "ib1"]),
        ("ib1,eth", ["eth0", "ib1"]),
        ("=ib", []),
        ("=ib0", ["ib0"]),
        ("^ib,lo", ["eth0"]),
        ("^=ib0", ["eth0", "ib1", "lo"]),
    ],
)
def test_names_as_nccl_reads_them(value: str, expected: list[str]) -> None:
    assert preflight_host._matches(value, ["eth0", "ib0", "ib1", "lo"]) == expected


def test_an_interface_that_is_down(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = SimpleNamespace(isup=True)
    down = SimpleNamespace(isup=False)
    monkeypatch.setattr(preflight_host.psutil, "net_if_stats", lambda: {"ib0": down, "eth0": up})
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    loaded = load_config(write_tiny_run(tmp_path, model))
    found = {check.key: check.level for check in preflight_host.check_network_settings(loaded)}
    assert found == {"GLOO_SOCKET_IFNAME": "ok", "NCCL_SOCKET_IFNAME": "fail"}


def test_quotas_of_lustre_and_of_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "home"
    folder.mkdir()

    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def mounted(device: str, kind: str) -> None:
        root = SimpleNamespace(device="overlay", mountpoint="/", fstype="overlay")
        own = SimpleNamespace(device=device, mountpoint=str(folder), fstype=kind)
        monkeypatch.setattr(quota.psutil, "disk_partitions", lambda all: [root, own])

    mounted("mds@tcp:/fs", "lustre")
    program(
        "lfs",
        f'[ "$3" = -u ] && echo "{folder} 600 1000 2000 - 5 0 0 -" || echo "{folder} 0 0 0 - 0 0 '
        '0 -"',
    )
    found, unknown = quota.free_space(folder)
    assert unknown is None
    assert [room.source for room in found] == [
        "free space",
        "lfs quota -u",
    ]  # the group has no limit
    assert found[1].num_bytes == 400 * 1024 and found[1].num_files == float("inf")

    mounted("server:/export/home", "nfs4")
    program(
        "quota",
        "echo 'Disk quotas for user bob (uid 7):'\necho 'server:/export/home 900* 800 1000 7days "
        "3 10 0 0'",
    )
    (over,) = quota.free_space(folder)[0][1:]
    assert over.num_bytes == 0 and over.num_files == 7

    (tmp_path / "quota").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no installed tool reads the quota" in str(quota.free_space(folder)[1])


def test_what_a_cluster_file_names(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(
        f"name: x\nscratch: {tmp_path}\nnetwork_interface: nothere0\n"
        "container: {runtime: apptainer, image: /no/such.sif, mounts: [/no/such/folder]}\n"
    )
    found = {check.key: check.level for check in preflight_host.check_cluster(file)}
    assert found == {
        "scratch": "ok",
        "network_interface": "warn",
        "container.image": "fail",
        "container.mounts": "warn",
    }
    file.write_text("name: x\nscratchh: /tmp\n")
    (wrong,) = preflight_host.check_cluster(file)
    assert wrong.level == "fail" and "did you mean `scratch`" in wrong.message


def test_offline_ends_with_its_block() -> None:
    import datasets
    from huggingface_hub import constants as hub

    before = hub.HF_HUB_OFFLINE
    with preflight.offline():
        assert hub.is_offline_mode() and datasets.config.HF_HUB_OFFLINE
    assert hub.HF_HUB_OFFLINE == before == datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "runs").glob("*g-*.yaml")), ids=lambda path: path.stem
)
def test_shipped_runs_are_signalled_in_time(path: Path) -> None:
    loaded = load_config(path)
    plan = make_plan(loaded)
    (found,) = preflight._signal(loaded, plan)
    assert found.level == "ok", str(found)
    updates = next(phase.seconds for phase in plan.phases if phase.name == "updates")
    assert planned_ending_s(plan) > updates / loaded.config.batch.updates_per_step


def test_the_command_prints_json_and_returns_an_exit_code(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pacs_megatron.cli import main

    config = write_tiny_run(tmp_path, model)
    assert main(["preflight", str(config), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["level"] for row in rows} <= {"ok", "warn"} and {"key", "message", "fix"} <= set(
        rows[0]
    )
    assert main(["preflight", str(config), "parallel.tp=8"]) == 2
    assert "parallel.tp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "level", "text"),
    [
        ("2.13.0 2.29.7", "2.13.0 2.29.7", "ok", "NCCL 2.29.7 (torch 2.13.0) in the trainer"),
        (
            "2.13.0 2.29.7",
            "2.14.1 2.30.7",
            "fail",
            "NCCL 2.30.7 (torch 2.14.1) in the servers: NCCL rejects",
        ),
        ("2.13.0 2.29.7", "", "warn", "NCCL of the servers is unknown"),
    ],
)
def test_a_broadcast_needs_the_same_nccl_on_both_sides(
    tmp_path: Path, ours: str, theirs: str, level: str, text: str
) -> None:
    sides = []
    for name, words in (("ours", ours), ("theirs", theirs)):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {words}\n")
        program.chmod(0o755)
        sides.append((str(program),))
    check = check_nccl(*sides)
    assert check.level == level
    assert text in check.message
    assert level != "fail" or "transport=disk" in check.fix


def test_the_nccl_of_a_cpu_build_is_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NCCL_CODE], capture_output=True, text=True, check=True
    )
    torch_version, nccl = done.stdout.split()
    assert torch_version.startswith("2.")
    assert nccl == "none" or nccl[0].isdecimal()


MATH = MathReward(name="math", max_failure_frac=0.05)


def unverified(count: int, *, failed: bool) -> list[Unverified]:
    return [Unverified(f"train/{n}", "12 500", "not read", failed) for n in range(count)]


def test_gold_answers_that_cannot_be_judged_are_an_error_above_the_runs_limit() -> None:
    preflight._check_unverified(MATH, unverified(5, failed=True), 100)
    with pytest.raises(PacsError, match="fails on 6 of 100 gold answers"):
        preflight._check_unverified(MATH, unverified(6, failed=True), 100)
    preflight._check_unverified(MATH, unverified(99, failed=False), 100)
    with pytest.raises(PacsError, match="fails on 100 of 100 gold answers"):
        preflight._check_unverified(MATH, unverified(100, failed=False), 100)


def test_gold_answers_that_do_not_verify_are_a_warning() -> None:
    assert preflight._doubtful(MATH, unverified(5, failed=False), 100) == ""
    assert "12 500" in preflight._doubtful(MATH, unverified(6, failed=False), 100)
    form = FormatReward(name="format", pattern="x")
    assert preflight._doubtful(form, unverified(50, failed=False), 100) == ""
    assert "12 500" in preflight._doubtful(form, unverified(51, failed=False), 100)


# --------------------------------------------------------------------------------------------------
# tokens and data
def with_tokenizer(folder: Path, template: str, eos: str) -> Path:
    model = make_tiny_qwen3(folder / "model", eos_token_id=256)
    tokenizer = save_tokenizer(model, chat_template=template)
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(model)
    return model


def test_a_template_that_closes_turns_with_another_token(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path, CHAT_TEMPLATE, PAD)
    checks = run_preflight(write_tiny_run(tmp_path, model))
    assert "stops at 256, 258" in find(checks, "model.path (tokenizer)").message
    found = find(checks, "model.path (stop tokens)")
    assert found.level == "warn" and "closes a turn with '<|im_end|>' (258)" in found.message


def test_a_template_that_closes_no_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    model = with_tokenizer(tmp_path, template, PAD)
    found = find(run_preflight(write_tiny_run(tmp_path, model)), "model.path (stop tokens)")
    assert "with no token; demonstrations end with '<|endoftext|>' (256)" in found.message


LAST_ANSWER_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_an_agent_with_a_template_that_changes_earlier_turns(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path, LAST_ANSWER_THINKS, PAD)
    path = with_agent(write_tiny_run(tmp_path, model))
    checks = run_preflight(path)
    assert find(checks, "rollout.agent (markers of messages)").level == "ok"
    assert "tools: calculate (calculator)" in find(checks, "rollout.agent").message

    checks = run_preflight(path, ["rollout.agent.turn_markers=null"])
    found = find(checks, "rollout.agent (markers of messages)")
    assert found.level == "fail" and "changes the text of earlier turns" in found.message
    assert "set rollout.agent.turn_markers" in found.message

    (tmp_path / "my_agent.py").write_text("async def solve(problem):\n    return\n")
    found = find(run_preflight(path), "rollout.agent")
    assert found.level == "fail" and "cannot be called as solve(problem, session)" in found.message


def test_notices_about_the_data_are_warnings(tmp_path: Path, model: Path) -> None:
    path = write_tiny_run(tmp_path, model)
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text() + json.dumps({"problem": "0 + 1 = ?", "answer": "2"}) + "\n")
    checks = run_preflight(path)
    found = [check.message for check in checks if check.key == "data.train.path (rows)"]
    assert len(found) == 2 and "repeat an earlier one" in found[0]
    assert "have different answers" in found[1]
    assert find(checks, "data.train.path").level == "ok"


def test_too_many_long_prompts_fail(tmp_path: Path, model: Path) -> None:
    path = write_tiny_run(tmp_path, model)
    file = tmp_path / "train.jsonl"
    rows = [json.dumps({"problem": "x" * 200, "answer": "1"}) + "\n"] * 2
    file.write_text(file.read_text() + "".join(rows))
    found = find(run_preflight(path), "data.train.path")
    assert found.level == "fail" and "2 of 18 rows are dropped" in found.message
