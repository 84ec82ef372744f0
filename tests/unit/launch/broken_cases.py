"""Broken configurations and environments: what breaks each, the key that preflight names and a part
of the fix.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pacs_megatron.config import load_config
from pacs_megatron.workbench.preflight import quota
from tests.support.tiny_models import save_tokenizer

Breaker = Callable[[Path], None]
PPO = ["objective={name: ppo}"]
GPUS = ["resources.gpus_per_node=8", "resources.gpu=h100", "parallel.tp=2"]


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


def earlier_critic(folder: Path) -> None:
    write("runs/tiny/config.yaml", load_config(folder / "run.yaml", PPO).to_yaml())(folder)


def run_dir_is_a_file(folder: Path) -> None:
    (folder / "runs").write_text("")


def slow_updates(folder: Path) -> None:
    row = {"step": 1, "time/update_s": 1000.0, "time/checkpoint_s": 100.0}  # two updates a step
    write("runs/tiny/metrics.jsonl", json.dumps(row) + "\n")(folder)


def fake_program(name: str, text: str) -> Breaker:
    """An executable in the run's folder; CASES name it by ./name, or ENVIRONMENT puts the folder on
    PATH.
    """

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
    return fake_program(
        "python", f'#!/bin/sh\nif [ "$1" = -c ]; then echo 0.5.23; exit 0; fi\n{behaviour}\n'
    )


@dataclass(frozen=True)
class Case:
    """One broken run. `{folder}` in `env` is the run's parent folder, `{port}` a port in use."""

    name: str
    overrides: Sequence[str] = ()
    key: str = field(kw_only=True)
    fix: str = field(kw_only=True)
    breaks: Breaker = field(default=no, kw_only=True)
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    needs_no_gpu: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.name


MODEL = [
    Case(
        "model missing",
        key="model.path",
        fix="pacs-megatron fetch",
        breaks=lambda folder: shutil.rmtree(folder / "model"),
    ),
    Case(
        "weights missing",
        key="model.path",
        fix="safetensors",
        breaks=drop("model/model.safetensors"),
    ),
    Case("weights truncated", key="model.path", fix="model.safetensors", breaks=truncate),
    Case(
        "unsupported family",
        key="model.path",
        fix="supported: ",
        breaks=edit_config(model_type="mamba"),
    ),
    Case(
        "tokenizer missing",
        key="model.path (tokenizer)",
        fix="needs tokenizer.json",
        breaks=drop("model/tokenizer.json"),
    ),
    Case(
        "no chat template", key="model.path (tokenizer)", fix="instruct model", breaks=no_template
    ),
    Case(
        "model that was not fetched",
        ["model.path=nobody/nothing"],
        key="model.path",
        fix="pacs-megatron fetch",
    ),
    Case(
        "damaged converted model",
        key="model.path",
        fix="manifest.json",
        breaks=write("model/manifest.json", "{"),
    ),
    Case(
        "path that is too long",
        [f"model.path={'a' * 300}"],
        key="model.path",
        fix="correct the path",
    ),
    Case(
        "config.json of another width",
        key="model.path",
        fix="different models",
        breaks=edit_config(hidden_size=128),
    ),
    Case(
        "config.json of fewer words",
        key="model.path",
        fix="different models",
        breaks=edit_config(vocab_size=100),
    ),
    Case(
        "integer weights",
        key="model.path",
        fix="dequantise the model",
        breaks=change_tensor("model.embed_tokens.weight", lambda tensor: tensor.to(torch.int8)),
    ),
    Case(
        "weights of another architecture",
        key="model.path",
        fix="of different archit",
        breaks=change_tensor("model.layers.9.mlp.up_proj.weight", lambda _: torch.zeros(2, 2)),
    ),
    Case(
        "weights are a pointer of Git LFS",
        key="model.path",
        fix="download it again",
        breaks=write(
            "model/model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n",
        ),
    ),
    Case(
        "stop token beyond the vocabulary",
        key="model.path (tokenizer)",
        fix="use the model's own tokenizer",
        breaks=write("model/generation_config.json", '{"eos_token_id": 99999}'),
    ),
    Case(
        "tokenizer of a larger model",
        key="model.path (tokenizer)",
        fix="use the model's own tokenizer",
        breaks=larger_tokenizer,
    ),
]

DATA = [
    Case("data missing", key="data.train.path", fix="train.jsonl", breaks=drop("train.jsonl")),
    Case("data empty", key="data.train.path", fix="train.jsonl", breaks=write("train.jsonl", "")),
    Case(
        "data without a column",
        ["data.train.columns.answer=solution"],
        key="data.train.path",
        fix="solution",
    ),
    Case(
        "malformed line",
        key="data.train.path",
        fix="train.jsonl:2",
        breaks=write("train.jsonl", '{"problem": "1", "answer": "1"}\n{"problem": \n'),
    ),
    Case(
        "prompts too long",
        ["data.max_prompt_tokens=3"],
        key="data.train.path",
        fix="data.max_prompt_tokens",
    ),
    Case("too few prompts", ["batch.prompts_per_step=17"], key="data.train.path", fix="lower it"),
    Case(
        "data that was not fetched",
        ["data.train.columns=null", "data.train.preset=gsm8k", "data.train.path=nobody/nothing"],
        key="data.train.path",
        fix="pacs-megatron fetch",
    ),
    Case(
        "template that raises",
        key="data.train.path",
        fix="correct the template",
        breaks=write("model/chat_template.jinja", '{{ raise_exception("no") }}'),
    ),
    Case(
        "template that writes nothing",
        key="data.train.path",
        fix="correct chat_template.jinja",
        breaks=write("model/chat_template.jinja", '{{ "" }}'),
    ),
    Case(
        "data that is no JSON",
        key="data.train.path",
        fix="correct it",
        breaks=write("train.jsonl", "hello\n"),
    ),
    Case(
        "data of lists",
        key="data.train.path",
        fix="expected a JSON object",
        breaks=write("train.jsonl", "[1]\n"),
    ),
    Case(
        "data of another kind",
        ["data.train.path=train.csv"],
        key="data.train.path",
        fix="expected .json",
        breaks=write("train.csv", "problem,answer\n1,2\n"),
    ),
    Case(
        "empty answers",
        key="data.train.path",
        fix="correct or remove the row",
        breaks=write("train.jsonl", '{"problem": "1", "answer": ""}\n'),
    ),
]

REWARD = [
    Case("reward file missing", key="reward", fix="reward.py", breaks=drop("reward.py")),
    Case("reward pattern", ["reward={name: format, pattern: '('}"], key="reward", fix="pattern"),
    Case(
        "answers that never verify",
        ["reward={name: arithmetic}", "batch.prompts_per_step=1", "batch.updates_per_step=1"],
        key="reward",
        fix="data.train.preset or columns",
        breaks=write("train.jsonl", '{"problem": "1", "answer": "many"}\n' * 8),
    ),
    Case(
        "reward that raises",
        key="reward",
        fix="raised ValueError: boom",
        breaks=write("reward.py", "def reward(p, r):\n    raise ValueError('boom\\nmore')\n"),
    ),
    Case(
        "reward without a number",
        key="reward",
        fix="returned NoneType, expected a number",
        breaks=write("reward.py", "def reward(p, r):\n    pass\n"),
    ),
    Case(
        "reward that is no number",
        key="reward",
        fix="the reward is nan",
        breaks=write("reward.py", "def reward(p, r):\n    return float('nan')\n"),
    ),
    Case(
        "reward that hangs",
        ["reward.timeout_s=0.2"],
        key="reward",
        fix="no verdict within 0.2 s",
        breaks=write("reward.py", "import time\ndef reward(p, r):\n    time.sleep(99)\n"),
    ),
    Case(
        "reward that ends its process",
        key="reward",
        fix="the worker died (exit code 3)",
        breaks=write("reward.py", "import os\ndef reward(p, r):\n    os._exit(3)\n"),
    ),
    Case(
        "reward of another name",
        key="reward",
        fix="has no 'reward'",
        breaks=write("reward.py", "x = 1\n"),
    ),
    Case(
        "reward that cannot be imported",
        key="reward",
        fix="must be able to import it",
        breaks=write("reward.py", "import nosuchmodule\n"),
    ),
]

HOST = [
    Case("run.dir is a file", key="run.dir", fix="name a folder", breaks=run_dir_is_a_file),
    Case(
        "damaged checkpoint",
        key="checkpoint",
        fix="resume from the one before",
        breaks=broken_checkpoint,
    ),
    Case(
        "another critic on resume",
        [*PPO, "objective.critic.path=model"],
        key="objective.critic.path",
        fix="use the same",
        breaks=earlier_critic,
    ),
    Case(
        "another run's folder",
        ["run.seed=6"],
        key="run.name",
        fix="choose another run.name",
        breaks=earlier_run,
    ),
    Case(
        "more samples than memory",
        ["batch.prompts_per_step=2000000000", "batch.samples_per_prompt=16"],
        key="memory",
        fix="lower batch.prompts_per_step",
    ),
    Case(
        "signal too late",
        key="resources.signal_lead_s",
        fix="use at least 1200",
        breaks=slow_updates,
    ),
    Case(
        "time limit too short",
        ["resources.time_limit=00:04:00"],
        key="resources.time_limit",
        fix="raise it",
        breaks=slow_updates,
    ),
    Case(
        "run.dir is not writable",
        ["run.dir=/proc/none"],
        key="run.dir",
        fix="choose another folder",
    ),
    Case(
        "scratch below a file",
        key="TMPDIR",
        fix="name a folder",
        env={"TMPDIR": "{folder}/train.jsonl/x"},
    ),
    Case(
        "quota used up",
        key="checkpoint.keep_last",
        fix="free some space",
        breaks=fake_program("quota", "#!/bin/sh\necho '{device} 5000* 4000 5000 0 10 0 0 0'\n"),
        env={"PATH": "{folder}/bin:" + os.environ["PATH"]},
    ),
    Case(
        "no files left",
        key="checkpoint.keep_last",
        fix="1 files left",
        breaks=fake_program("quota", "#!/bin/sh\necho '{device} 5 0 0 0 10 0 11 0'\n"),
        env={"PATH": "{folder}/bin:" + os.environ["PATH"]},
    ),
    Case(
        "port taken",
        key="MASTER_PORT",
        fix="export another MASTER_PORT",
        env={"MASTER_PORT": "{port}"},
    ),
    Case(
        "no port at all", key="MASTER_PORT", fix="from 1024 to 65535", env={"MASTER_PORT": "http"}
    ),
    Case(
        "interface that is not there",
        key="NCCL_SOCKET_IFNAME",
        fix="network_interface",
        env={"SLURM_JOB_ID": "1", "NCCL_SOCKET_IFNAME": "ib9"},
    ),
    Case(
        "loopback between nodes",
        [*GPUS, "resources.nodes=2"],
        key="GLOO_SOCKET_IFNAME",
        fix="reaches the other nodes",
        env={"GLOO_SOCKET_IFNAME": "lo"},
    ),
    Case(
        "adapter that is not there",
        key="NCCL_IB_HCA",
        fix="/sys/class/infiniband",
        env={"SLURM_JOB_ID": "1", "NCCL_IB_HCA": "mlx9_0:1"},
    ),
    Case(
        "a job without GPUs",
        GPUS,
        key="resources.gpus_per_node",
        fix="request GPUs from Slurm",
        env={"SLURM_JOB_ID": "1"},
        needs_no_gpu=True,
    ),
    Case(
        "fp8 without Transformer Engine",
        [*GPUS, "precision={dtype: bf16, fp8: {recipe: delayed}}"],
        key="precision.fp8",
        fix="slurm/container",
        env={"SLURM_JOB_ID": "1"},
        needs_no_gpu=True,
    ),
    Case(
        "run's folder is a file", key="run.dir", fix="name a folder", breaks=write("runs/tiny", "")
    ),
    Case(
        "checkpoints are a file",
        key="checkpoint",
        fix="move it away",
        breaks=write("runs/tiny/checkpoints", ""),
    ),
    Case(
        "run's config.yaml is damaged",
        key="run.name",
        fix="fix the line",
        breaks=write("runs/tiny/config.yaml", "{"),
    ),
    Case(
        "scratch that is not there",
        key="TMPDIR",
        fix="create it, or set TMPDIR",
        env={"TMPDIR": "{folder}/nothere"},
    ),
]
