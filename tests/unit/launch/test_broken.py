"""Broken configurations and environments: `preflight` names key and fix of each, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pacs_megatron.config import load_config
from pacs_megatron.launch.train import run_train
from pacs_megatron.preflight import quota
from pacs_megatron.preflight.run import render, run_preflight
from tests.support.tiny_models import make_tiny_qwen3, save_tokenizer
from tests.support.tiny_run import write_tiny_run

Breaker = Callable[[Path], None]
BENCHMARK = "evaluation.benchmarks=[{path: x.jsonl, name: x, preset: aime}]"
GPUS = ["resources.gpus_per_node=8", "resources.gpu=h100", "parallel.tp=2"]
SGLANG = [
    "rollout=null",
    "rollout.engine=sglang",
    "rollout.sampling.max_response_tokens=8",
    "rollout.sync.transport=disk",
]
CPU_SERVER = [*SGLANG, "rollout.servers.device=cpu"]


def no(_folder: Path) -> None:
    """The environment is sound; the overrides are not."""


def truncate(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop(name: str) -> Breaker:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Breaker:
    def breaker(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return breaker


def edit_config(**changes: object) -> Breaker:
    def breaker(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return breaker


def no_template(folder: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).unlink(missing_ok=True)
    save_tokenizer(folder / "model", chat_template=None)


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Breaker:
    def breaker(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {name: change(tensors.get(name, torch.zeros(1)))}, file)

    return breaker


def larger_tokenizer(folder: Path) -> None:
    tokenizer = save_tokenizer(folder / "model")
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(100)])
    tokenizer.save_pretrained(folder / "model")


def broken_checkpoint(folder: Path) -> None:
    write("runs/tiny/checkpoints/step_000003/manifest.json", "{")(folder)


def earlier_run(folder: Path) -> None:
    config = load_config(folder / "run.yaml").to_yaml()
    write("runs/tiny/config.yaml", config)(folder)


def run_dir_is_a_file(folder: Path) -> None:
    (folder / "runs").write_text("")


def slow_updates(folder: Path) -> None:
    row = {"step": 1, "time/update_s": 1000.0, "time/checkpoint_s": 100.0}  # two updates a step
    write("runs/tiny/metrics.jsonl", json.dumps(row) + "\n")(folder)


def fake_program(name: str, text: str) -> Breaker:
    """An executable in the run's folder; CASES name it by ./name, or ENVIRONMENT puts the folder on PATH."""

    def breaker(folder: Path) -> None:
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{device}", mounted_on(folder)))
        path.chmod(0o755)

    return breaker


def mounted_on(folder: Path) -> str:
    mount = quota.find_mount(folder)
    assert mount is not None
    return mount.device


def bad_server(behaviour: str) -> Breaker:
    """An interpreter that has the right sglang, whose server does not come up."""
    return fake_program("python", f'#!/bin/sh\nif [ "$1" = -c ]; then echo 0.5.23; exit 0; fi\n{behaviour}\n')


CASES: dict[str, tuple[Breaker, list[str], str, str]] = {
    # name: (what breaks the environment, overrides, key, a part of the fix)
    "unknown key": (no, ["optimizer.lrr=1"], "optimizer.lrr", "did you mean `optimizer.lr`"),
    "wrong section": (no, ["batch.beta=1"], "batch.beta", "did you mean `objective.beta`"),
    "other strategy's key": (no, ["objective.clip_low=0.1"], "objective.clip_low", "remove the key"),
    "wrong type": (no, ["run.steps='10'"], "run.steps", "remove the quotes"),
    "out of range": (no, ["optimizer.lr=0"], "optimizer.lr", "expected greater than 0"),
    "not a number": (no, ["optimizer.lr=.nan"], "optimizer.lr", "finite"),
    "misspelt choice": (no, ["precision.dtype=bf61"], "precision.dtype", "did you mean bf16"),
    "unknown strategy": (no, ["reward.name=maths", "reward.function=null"], "reward.name", "did you mean math"),
    "ranks do not factor": (no, ["run.nproc=3"], "run.nproc", "3 ranks do not factor"),
    "tp and heads": (no, ["parallel.tp=8"], "parallel.tp", "use one of 1, 2"),
    "tp and odd ffn": (edit_config(intermediate_size=127), [], "parallel.tp", "use 1"),
    "pp and layers": (no, ["parallel.tp=1", "parallel.pp=4"], "parallel.pp", "make it one of 1, 2"),
    "vpp without pp": (no, ["parallel.vpp=2"], "parallel.vpp", "raise parallel.pp"),
    "ep on a dense model": (no, ["parallel.ep=2", "run.nproc=4"], "parallel.ep", "set parallel.ep=1"),
    "sequence parallel alone": (no, ["parallel.tp=1", "parallel.sequence_parallel=true"], "parallel.sequence_parallel", "raise parallel.tp"),
    "budget too small": (no, ["batch.tokens_per_microbatch=100"], "batch.tokens_per_microbatch", "use at least 140"),
    "more updates than prompts": (no, ["batch.updates_per_step=5"], "batch.updates_per_step", "use at most 4"),
    "no siblings": (no, ["batch.samples_per_prompt=1"], "batch.samples_per_prompt", "use at least 2"),
    "fewer samples than replicas": (no, ["run.nproc=20", "batch.prompts_per_step=2", "parallel.tp=1", "batch.updates_per_step=1"], "batch.prompts_per_step", "use fewer ranks"),
    "fp8 in fp32": (no, ["precision.fp8.recipe=delayed"], "precision.dtype", "set precision.dtype=bf16"),
    "fp8 on CPU": (no, ["precision={dtype: bf16, fp8: {recipe: delayed}}"], "precision.fp8", "set it or remove fp8"),
    "fp8 on an A100": (no, [*GPUS, "resources.gpu=a100", "precision={dtype: bf16, fp8: {recipe: delayed}}"], "precision.fp8", "use h100, h200 or b200"),
    "GPUs without a name": (no, ["resources.gpus_per_node=8"], "resources.gpu", "name the GPU"),
    "nproc beside GPUs": (no, [*GPUS, "run.nproc=2"], "run.nproc", "remove it"),
    "rollout nodes for the embedded engine": (no, [*GPUS, "resources.rollout_nodes=1"], "resources.rollout_nodes", "set 0"),
    "more servers than GPUs": (no, [*GPUS, *SGLANG, "rollout.servers={python: [python], count: 9, visible_devices: [a,b,c,d,e,f,g,h,i]}"], "rollout.servers.count", "use at most 8 servers"),
    "colocated on two nodes, odd": (no, [*GPUS, *SGLANG, "resources.nodes=2", "rollout.servers={python: [python], colocated: true}"], "rollout.servers.count", "use a multiple of 2"),
    "colocated on two nodes by broadcast": (no, [*GPUS, *SGLANG, "rollout.sync.transport=broadcast", "resources.nodes=2", "rollout.servers={python: [python], colocated: true, count: 2}"], "rollout.sync.transport", "use disk"),
    "colocated on two nodes, named GPUs": (no, [*GPUS, *SGLANG, "resources.nodes=2", "rollout.servers={python: [python], colocated: true, count: 2, visible_devices: ['0', '1']}"], "rollout.servers.visible_devices", "set it to []"),
    "ipc across nodes": (
        no,
        [*GPUS, *SGLANG, "rollout.sync.transport=ipc", "resources.rollout_nodes=1", "rollout.servers={python: [python]}"],
        "rollout.sync.transport",
        "use broadcast or disk",
    ),
    "servers and urls": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.urls=['http://x:1']"], "rollout", "exactly one of `urls` and `servers`"),
    "no SGLang there": (no, [*CPU_SERVER, "rollout.servers.python=[/nothere/python]"], "rollout.servers.python", "name an existing interpreter"),
    "context too short": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.servers.context_length=100"], "rollout.servers.context_length", "use at least 136"),
    "key variable unset": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.api_key_env=PACS_NO_SUCH_KEY"], "rollout.api_key_env", "export it"),
    "sft needs demonstrations": (no, ["objective.name=sft"], "rollout.engine", "rollout.engine=demonstrations"),
    "no verifier": (no, ["reward=null"], "reward", "add reward.name"),
    "benchmarks without sampling": (no, [BENCHMARK], "evaluation.sampling", "add max_response_tokens"),
    "preset and columns": (no, ["data.train.preset=gsm8k"], "data.train", "set one"),
    "warm-up longer than the run": (no, ["optimizer.schedule=linear", "optimizer.warmup_updates=4"], "optimizer.warmup_updates", "use less than 4"),
    "model missing": (lambda folder: shutil.rmtree(folder / "model"), [], "model.path", "pacs-megatron fetch"),
    "weights missing": (drop("model/model.safetensors"), [], "model.path", "safetensors"),
    "weights truncated": (truncate, [], "model.path", "model.safetensors"),
    "unsupported family": (edit_config(model_type="mamba"), [], "model.path", "supported: "),
    "tokenizer missing": (drop("model/tokenizer.json"), [], "model.path (tokenizer)", "needs tokenizer.json"),
    "no chat template": (no_template, [], "model.path (tokenizer)", "instruct model"),
    "data missing": (drop("train.jsonl"), [], "data.train.path", "train.jsonl"),
    "data empty": (write("train.jsonl", ""), [], "data.train.path", "train.jsonl"),
    "data without a column": (no, ["data.train.columns.answer=solution"], "data.train.path", "solution"),
    "malformed line": (write("train.jsonl", '{"problem": "1", "answer": "1"}\n{"problem": \n'), [], "data.train.path", "train.jsonl:2"),
    "prompts too long": (no, ["data.max_prompt_tokens=3"], "data.train.path", "data.max_prompt_tokens"),
    "too few prompts": (no, ["batch.prompts_per_step=17"], "data.train.path", "lower it"),
    "reward file missing": (drop("reward.py"), [], "reward", "reward.py"),
    "reward pattern": (no, ["reward={name: format, pattern: '('}"], "reward", "pattern"),
    "answers that never verify": (write("train.jsonl", '{"problem": "1", "answer": "many"}\n' * 8), ["reward={name: arithmetic}", "batch.prompts_per_step=1", "batch.updates_per_step=1"], "reward", "data.train.preset or columns"),
    "run.dir is a file": (run_dir_is_a_file, [], "run.dir", "name a folder"),
    "damaged checkpoint": (broken_checkpoint, [], "checkpoint", "resume from the one before"),
    "another run's folder": (earlier_run, ["run.seed=6"], "run.name", "choose another run.name"),
    "more samples than memory": (no, ["batch.prompts_per_step=16", "batch.samples_per_prompt=2000000000"], "memory", "lower batch.prompts_per_step"),
    "signal too late": (slow_updates, [], "resources.signal_lead_s", "use at least 1200"),
    "time limit too short": (slow_updates, ["resources.time_limit=00:04:00"], "resources.time_limit", "raise it"),
    "data that was not fetched": (no, ["data.train.columns=null", "data.train.preset=gsm8k", "data.train.path=nobody/nothing"], "data.train.path", "pacs-megatron fetch"),
    "model that was not fetched": (no, ["model.path=nobody/nothing"], "model.path", "pacs-megatron fetch"),
    "damaged converted model": (write("model/manifest.json", "{"), [], "model.path", "manifest.json"),
    "run.dir is not writable": (no, ["run.dir=/proc/none"], "run.dir", "choose another folder"),
    "scratch below a file": (no, [], "TMPDIR", "name a folder"),
    "quota used up": (fake_program("quota", "#!/bin/sh\necho '{device} 5000* 4000 5000 0 10 0 0 0'\n"), [], "checkpoint.keep_last", "make room"),
    "no files left": (fake_program("quota", "#!/bin/sh\necho '{device} 5 0 0 0 10 0 11 0'\n"), [], "checkpoint.keep_last", "1 files left"),
    "port taken": (no, [], "MASTER_PORT", "export another MASTER_PORT"),
    "no port at all": (no, [], "MASTER_PORT", "from 1024 to 65535"),
    "interface that is not there": (no, [], "NCCL_SOCKET_IFNAME", "network_interface"),
    "loopback between nodes": (no, [*GPUS, "resources.nodes=2"], "GLOO_SOCKET_IFNAME", "reaches the other nodes"),
    "adapter that is not there": (no, [], "NCCL_IB_HCA", "/sys/class/infiniband"),
    "a job without GPUs": (no, GPUS, "resources.gpus_per_node", "ask Slurm for GPUs"),
    "fp8 without Transformer Engine": (no, [*GPUS, "precision={dtype: bf16, fp8: {recipe: delayed}}"], "precision.fp8", "slurm/container"),
    "broadcast from another host's address": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.sync.transport=broadcast", "rollout.sync.host=203.0.113.9"], "rollout.sync.host", "ip addr"),
    "nobody answers at the url": (no, [*SGLANG, "rollout.urls=['http://127.0.0.1:9']"], "rollout.urls", "correct the address"),
    "server that ends": (bad_server("echo out of memory; exit 3"), [*CPU_SERVER, "rollout.servers.python=[./bin/python]"], "rollout.servers", "out of memory"),
    "server that never answers": (bad_server("exec sleep 60"), [*CPU_SERVER, "rollout.servers.python=[./bin/python]", "rollout.servers.start_timeout_s=1"], "rollout.servers", "start_timeout_s"),
    "a run's name that leaves the folder": (no, ["run.name=../other"], "run.name", "rename it"),
    "time limit below the signal": (no, ["resources.time_limit=00:05:00"], "resources.time_limit", "raise it"),
    "longer than the model's positions": (no, ["rollout.sampling.max_response_tokens=1000", "batch.tokens_per_microbatch=2000"], "rollout.sampling.max_response_tokens", "lower one of them"),
    "server tp and heads": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.servers.tp=3"], "rollout.servers.tp", "use one of 1, 2, 4"),
    "server larger than a node": (no, [*GPUS, *SGLANG, "rollout.servers={python: [python], tp: 16}"], "rollout.servers.tp", "use rollout.servers.tp of at most 8"),
    "evaluation longer than the context": (no, [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.servers.context_length=200", BENCHMARK, "evaluation.sampling={max_response_tokens: 100}"], "rollout.servers.context_length", "use at least 228"),
    "path that is too long": (no, [f"model.path={'a' * 300}"], "model.path", "correct the path"),
    "config.json of another width": (edit_config(hidden_size=128), [], "model.path", "download it again"),
    "config.json of fewer words": (edit_config(vocab_size=100), [], "model.path", "different models"),
    "integer weights": (change_tensor("model.embed_tokens.weight", lambda tensor: tensor.to(torch.int8)), [], "model.path", "dequantise the model"),
    "weights of another architecture": (change_tensor("model.layers.9.mlp.up_proj.weight", lambda _: torch.zeros(2, 2)), [], "model.path", "of another architecture"),
    "weights are a pointer of Git LFS": (write("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n"), [], "model.path", "download it again"),
    "stop token beyond the vocabulary": (write("model/generation_config.json", '{"eos_token_id": 99999}'), [], "model.path (tokenizer)", "tokenizer that belongs to the model"),
    "tokenizer of a larger model": (larger_tokenizer, [], "model.path (tokenizer)", "tokenizer that belongs to the model"),
    "template that raises": (write("model/chat_template.jinja", '{{ raise_exception("no") }}'), [], "data.train.path", "repair the template"),
    "template that writes nothing": (write("model/chat_template.jinja", '{{ "" }}'), [], "data.train.path", "repair chat_template.jinja"),
    "data that is no JSON": (write("train.jsonl", "hello\n"), [], "data.train.path", "correct it"),
    "data of lists": (write("train.jsonl", "[1]\n"), [], "data.train.path", "expected an object"),
    "data of another kind": (write("train.csv", "problem,answer\n1,2\n"), ["data.train.path=train.csv"], "data.train.path", "expected .json"),
    "empty answers": (write("train.jsonl", '{"problem": "1", "answer": ""}\n'), [], "data.train.path", "correct or remove the row"),
    "reward that raises": (write("reward.py", "def reward(p, r):\n    raise ValueError('boom\\nmore')\n"), [], "reward", "raised ValueError: boom"),
    "reward without a number": (write("reward.py", "def reward(p, r):\n    pass\n"), [], "reward", "returned NoneType, expected a float"),
    "reward that is no number": (write("reward.py", "def reward(p, r):\n    return float('nan')\n"), [], "reward", "the reward is nan"),
    "reward that hangs": (write("reward.py", "import time\ndef reward(p, r):\n    time.sleep(99)\n"), ["reward.timeout_s=0.2"], "reward", "no verdict within 0.2 s"),
    "reward that ends its process": (write("reward.py", "import os\ndef reward(p, r):\n    os._exit(3)\n"), [], "reward", "the worker died (exit code 3)"),
    "reward of another name": (write("reward.py", "x = 1\n"), [], "reward", "has no 'reward'"),
    "reward that cannot be imported": (write("reward.py", "import nosuchmodule\n"), [], "reward", "must be importable"),
    "run's folder is a file": (write("runs/tiny", ""), [], "run.dir", "name a folder"),
    "checkpoints are a file": (write("runs/tiny/checkpoints", ""), [], "checkpoint", "move it away"),
    "run's config.yaml is damaged": (write("runs/tiny/config.yaml", "{"), [], "run.name", "fix the line"),
    "scratch that is not there": (no, [], "TMPDIR", "make it, or set TMPDIR"),
    "url that is none": (no, [*SGLANG, "rollout.urls=[nourl]"], "rollout.urls", "http://<host>:<port>"),
    "interpreter that cannot run": (write("bin/python", ""), [*CPU_SERVER, "rollout.servers.python=[./bin/python]"], "rollout.servers.python", "name an existing interpreter"),
    "odd time limit": (no, ["resources.time_limit=4h"], "resources.time_limit", "pattern"),
}  # fmt: skip
# Variables of these cases; {folder} is the run's folder, {port} one that is taken.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "scratch that is not there": {"TMPDIR": "{folder}/nothere"},
    "scratch below a file": {"TMPDIR": "{folder}/train.jsonl/x"},
    "quota used up": {"PATH": "{folder}/bin:" + os.environ["PATH"]},
    "no files left": {"PATH": "{folder}/bin:" + os.environ["PATH"]},
    "port taken": {"MASTER_PORT": "{port}"},
    "no port at all": {"MASTER_PORT": "http"},
    "interface that is not there": {"SLURM_JOB_ID": "1", "NCCL_SOCKET_IFNAME": "ib9"},
    "loopback between nodes": {"GLOO_SOCKET_IFNAME": "lo"},
    "adapter that is not there": {"SLURM_JOB_ID": "1", "NCCL_IB_HCA": "mlx9_0:1"},
    "a job without GPUs": {"SLURM_JOB_ID": "1"},
    "fp8 without Transformer Engine": {"SLURM_JOB_ID": "1"},
    "broadcast from another host's address": {"SLURM_JOB_ID": "1"},
}
NEED_A_HOST_WITHOUT_GPU = ("a job without GPUs", "fp8 without Transformer Engine")


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture(autouse=True)
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts the tests: no job's variables."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "NCCL_", "GLOO_", "MASTER_", "HF_HUB_OFFLINE")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that preflight passes."""
    folder = tmp_path_factory.mktemp("sound")
    write_tiny_run(folder, make_tiny_qwen3(folder / "model"))
    return folder


def copy(sound: Path, folder: Path) -> Path:
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    config = folder / "run.yaml"
    config.write_text(config.read_text().replace(str(sound), str(folder)))
    return config


def files(folder: Path) -> set[str]:
    # Reading a plug-in or a parquet file may leave caches of Python or of the library.
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in str(path)}


def test_the_sound_run_passes(sound: Path, tmp_path: Path) -> None:
    checks = run_preflight(copy(sound, tmp_path))
    assert not [str(check) for check in checks if check.level == "fail"]
    rows = json.loads(render(checks, as_json=True))
    assert {row["level"] for row in rows} <= {"ok", "warn"}


def test_there_are_at_least_forty() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("name", list(CASES))
def test_broken(name: str, sound: Path, tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    breaker, overrides, key, fix = CASES[name]
    if name in NEED_A_HOST_WITHOUT_GPU and torch.cuda.is_available():
        pytest.skip("this host has GPUs")
    config = copy(sound, tmp_path)
    monkeypatch.chdir(tmp_path)
    for variable, value in ENVIRONMENT.get(name, {}).items():
        monkeypatch.setenv(variable, value.format(folder=tmp_path, port=taken_port))
    breaker(tmp_path)
    before = files(tmp_path)
    fails = [str(check) for check in run_preflight(config, overrides) if check.level == "fail"]
    assert any(key in line and fix in line for line in fails), "\n".join(fails) or "nothing failed"
    assert not [line for line in fails if "\n" in line]
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["unknown key", "tp and heads", "ranks do not factor", "unsupported family", "pp and layers"]
)
def test_train_refuses_too_before_anything_starts(
    name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pacs_megatron.errors import PacsError

    breaker, overrides, _, fix = CASES[name]
    config = copy(sound, tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    breaker(tmp_path)
    before = files(tmp_path)
    with pytest.raises(PacsError) as caught:
        run_train(config, overrides)
    assert fix in str(caught.value)
    assert files(tmp_path) == before


def test_what_a_lost_node_cut_off_is_no_obstacle(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy(sound, tmp_path)
    monkeypatch.chdir(tmp_path)
    write("runs/tiny/metrics.jsonl", '{"step": 1, "time/update_s": 0.5}\n[1]\n{"step": 2, "ti')(tmp_path)
    (tmp_path / "runs/tiny/checkpoints/step_000009").mkdir(parents=True)  # without its manifest
    (tmp_path / "runs/tiny/checkpoints/step_000008.partial").mkdir()
    checks = run_preflight(config)
    assert not [str(check) for check in checks if check.level == "fail"]
    assert "has no whole checkpoint: the run starts" in "\n".join(map(str, checks))


def test_what_a_reward_prints_stays_out_of_the_report(sound: Path, tmp_path: Path) -> None:
    config = copy(sound, tmp_path)
    write("reward.py", 'print("noise")\ndef reward(p, r):\n    print("noise")\n    return 1.0\n')(tmp_path)
    command = [sys.executable, "-m", "pacs_megatron", "preflight", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["key"]: row["message"] for row in json.loads(done.stdout)}[
        "reward"
    ] == "custom accepts 16 of 16 gold answers"
    assert "noise" in done.stderr
