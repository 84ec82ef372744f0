"""An eighth set: one careless value in an otherwise good run, for each part that a user touches.

Written in one sitting from the documents, before the code was read for it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.integration.test_hostile_files import (
    PREVIEW,
    SHOW,
    TO_HF,
    TO_MEGATRON,
    VERIFY,
    folder,
    text,
    together,
)
from tests.integration.test_hostile_verbs import SUBMIT, TWO
from tests.support.hostile import Arrange, Cases, World, check_case
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add
SGLANG = "rollout={{engine: sglang, sampling: {{max_response_tokens: 12}}"

# ------------------------------------------------------------------------------------------------------
# one wrong value
for _override in (
    "parallel.tp=2.0",
    "parallel.tp=true",
    "parallel.cp=0",
    "parallel.tp=[1]",
    "parallel.pp=-2",
    "parallel.vpp=1",
    "parallel.tp=1_000",
    "optimizer.lr=1e400",
    "optimizer.lr='1e-4 '",
    "optimizer.adam_beta2=1",
    "optimizer.adam_eps=0",
    "optimizer.warmup_updates=-1",
    "optimizer.schedule=cosine_with_restarts",
    "optimizer.weight_decay=-0.1",
    "batch.prompts_per_step=0",
    "batch.samples_per_prompt=1",
    "batch.updates_per_step=17",
    "batch.tokens_per_microbatch=1",
    "batch.epochs=0",
    "rollout.sampling.top_p=0",
    "rollout.sampling.top_p=1.5",
    "rollout.sampling.temperature=-1",
    "rollout.sampling.max_response_tokens=0",
    "rollout.max_staleness=-1",
    "evaluation.k=[0]",
    "evaluation.k=[9]",
    "evaluation.k=[1, 1]",
    "checkpoint.keep_last=0",
    "checkpoint.every=0",
    "run.steps=0",
    "run.steps=2.5",
    "run.name=..",
    "run.name=a/b",
    "run.seed=-1",
    "precision.dtype=float16",
    "precision.fp8=hybrid",
    "objective.name=PACS",
    "objective.name=../pacs",
    "objective.beta=0",
    "objective.beta=.inf",
    "objective.clip_grad=-1",
    "objective.weighting=yes",
    "policy.offload=true",
    "data.train.limit=0",
    "data.max_prompt_tokens=0",
    "reward.timeout_s=0",
    "reward.name=maths",
    "logging.wandb=true",
    "resources.nodes=0",
    "resources.gpus_per_node=8.5",
    "resources.time_limit=1 day",
    "resources.time_limit=00:00:00",
    "mismatch.max_score_noise=-1",
    "model.trust_remote_code=maybe",
):
    case(f"value: {_override}", *SHOW, _override)
for _name, _override in (
    ("no servers", SGLANG + ", urls: []}}"),
    ("servers and urls", SGLANG + ", urls: ['http://h:1'], servers: {{number: 1}}}}"),
    ("a server of half a GPU", SGLANG + ", servers: {{tp: 0.5}}}}"),
    ("minus one server", SGLANG + ", servers: {{number: -1}}}}"),
    ("a share of 200 %", SGLANG + ", servers: {{mem_fraction: 2}}}}"),
    ("an unknown transport", SGLANG + ", urls: ['http://h:1'], sync: {{transport: rdma}}}}"),
    ("a url with a space in front", SGLANG + ", urls: [' http://h:1']}}"),
    ("an engine of another project", "rollout={{engine: vllm}}"),
):
    case(f"rollout: {_name}", *SHOW, _override)

# --------------------------------------------------------------------------------------------------------
# command line
for _name, _words in (
    ("an argument file", ("@{w}/tiny.yaml",)),
    ("a verb with an escape", ("tr\x1b[31main", "{r}")),
    ("a verb of 100 kB", ("t" * 100_000,)),
    ("two configurations", ("train", "{r}", "{r}")),
    ("no configuration", ("train",)),
    ("an option of another verb", ("train", "{r}", "--tp", "2")),
    ("help with a value", ("train", "--help=3")),
    ("an override first", ("train", "run.steps=1", "{r}")),
    ("an override with a colon", ("config", "show", "{r}", "run.steps: 1")),
    ("an override with two signs", ("config", "show", "{r}", "run.steps==1")),
    (
        "an override of a parent and a child",
        ("config", "show", "{r}", "optimizer={{lr: 1e-3}}", "optimizer.lr.x=1"),
    ),
    ("lines of logs", ("logs", "{w}/runs/a", "--lines", "-5")),
    ("an attempt of a word", ("logs", "{w}/runs/a", "--attempt", "last")),
    ("a plan of nothing", ("plan", "{w}/nothing.yaml")),
    ("a plan of a folder", ("plan", "{w}")),
    ("a plan of a model", ("plan", "{m}/config.json")),
    ("a plan of eight terabytes", ("plan", "{r}", "--gpu", "h900")),
    ("status of a file", ("status", "{w}/train.jsonl")),
    ("an export of a model", ("export", "{m}", "--out", "{w}/o")),
    ("an evaluation of nothing", ("eval", "{r}", "--model", "{w}/nothing")),
    ("a comparison of one", ("compare", "{w}/runs/a", "{w}/runs/a", "--out", "{w}/o")),
    ("an unknown table", ("paper", "table99", "--scale", "laptop", "--dir", "{w}/p")),
    ("a certificate of a model", ("certify", "{m}")),
):
    case(f"words: {_name}", *_words, arrange=TWO)

# ---------------------------------------------------------------------------------------------------------------
# model
for _name, _changes in {
    "no heads": {"num_attention_heads": 0},
    "half a head": {"num_attention_heads": 1.5},
    "more groups than heads": {"num_key_value_heads": 64},
    "groups that do not divide": {"num_key_value_heads": 3},
    "a head of 0": {"head_dim": 0},
    "a vocabulary of minus one": {"vocab_size": -1},
    "tied by a word": {"tie_word_embeddings": "yes"},
    "another activation": {"hidden_act": "tanh"},
    "no layers": {"num_hidden_layers": 0},
    "layers of true": {"num_hidden_layers": True},
    "a type of a list": {"model_type": ["qwen3"]},
    "a family of tomorrow": {"model_type": "qwen9", "architectures": ["Qwen9ForCausalLM"]},
    "a bias": {"attention_bias": True},
    "a window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "a scaling of no kind": {"rope_scaling": {"rope_type": "magic", "factor": 2.0}},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
}.items():
    case(
        f"model: {_name}",
        *TO_MEGATRON,
        arrange=lambda w, c=_changes: w.model_json("config.json", **c),
    )  # type: ignore[misc]


def weights(change: object) -> Arrange:
    return lambda w: w.header(change)  # type: ignore[arg-type]


for _name, _change in {
    "a tensor is missing": lambda h: h.pop("model.norm.weight") and None,
    "a tensor too many": lambda h: h.update(extra=h["model.norm.weight"]),
    "another shape": lambda h: h["model.norm.weight"].update(shape=[1, 16]),
    "a shape of floats": lambda h: h["model.norm.weight"].update(shape=[16.0]),
    "offsets of text": lambda h: h["model.norm.weight"].update(data_offsets=["0", "64"]),
    "offsets reversed": lambda h: h["model.norm.weight"].update(data_offsets=[64, 0]),
    "a kind of tomorrow": lambda h: h["model.norm.weight"].update(dtype="F4"),
    "lower case": lambda h: h["model.norm.weight"].update(dtype="f32"),
}.items():
    case(f"weights: {_name}", *TO_MEGATRON, arrange=weights(_change))
case("weights: empty", *TO_MEGATRON, arrange=text("model/model.safetensors", ""))
case(
    "weights: a header of 8 EiB",
    *TO_MEGATRON,
    arrange=text("model/model.safetensors", struct.pack("<Q", 2**63 - 1)),
)
case("weights: a folder", *TO_MEGATRON, arrange=together(lambda w: (w.model / "model.safetensors").unlink(), folder("model/model.safetensors")))  # fmt: skip
case("weights: pickled", *TO_MEGATRON, arrange=together(lambda w: (w.model / "model.safetensors").unlink(), text("model/pytorch_model.bin", b"\x80\x04N.")))  # fmt: skip
case("checkpoint: a flipped byte", *TO_HF, arrange=lambda w: w.flip("dist/*.distcp"))
case(
    "checkpoint: another model's",
    *VERIFY,
    arrange=lambda w: w.model_json("config.json", rms_norm_eps=0.5),
)
case("checkpoint: no manifest", *TO_HF, arrange=lambda w: (w.checkpoint / "manifest.json").unlink())

# ----------------------------------------------------------------------------------------------------------------
# data
for _name, _content in {
    "no lines": "",
    "only line ends": "\n\n\n",
    "a problem of nothing": '{"problem": "", "answer": "1"}\n',
    "a problem of spaces": '{"problem": "   ", "answer": "1"}\n',
    "an answer of null": '{"problem": "1+1", "answer": null}\n',
    "an answer of a list": '{"problem": "1+1", "answer": ["2"]}\n',
    "a problem of a number": '{"problem": 7, "answer": "2"}\n',
    "other columns": '{"question": "1+1", "solution": "2"}\n',
    "a second row of other columns": '{"problem": "1+1", "answer": "2"}\n{"question": "x"}\n',
    "a comma at the end": '{"problem": "1+1", "answer": "2"},\n',
    "one list": '[{"problem": "1+1", "answer": "2"}]\n',
    "single quotes": "{'problem': '1+1', 'answer': '2'}\n",
    "a page": "<!DOCTYPE html><html><body>404</body></html>\n",
    "Latin-1": b'{"problem": "\xe9t\xe9", "answer": "2"}\n',
    "a gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "a parquet": b"PAR1\x00\x00\x00\x00PAR1",
}.items():
    case(f"data: {_name}", *PREVIEW, arrange=text("train.jsonl", _content))
case("data: a folder", *PREVIEW, arrange=lambda w: ((w.folder / "train.jsonl").unlink(), (w.folder / "train.jsonl").mkdir()))  # fmt: skip
case("data: without permission to a link", *PREVIEW, arrange=lambda w: ((w.folder / "train.jsonl").unlink(), (w.folder / "train.jsonl").symlink_to("train.jsonl")))  # fmt: skip

# --------------------------------------------------------------------------------------------------------------
# submit
for _override in (
    "resources.time_limit=1:2:3:4",
    "resources.time_limit=-1:00",
    "resources.max_attempts=-1",
    "resources.signal_lead_s=-5",
    "resources.nodes=1000000000",
    "run.dir=$HOME/runs;id",
    "run.name='a b'",
):
    case(
        f"submit: {_override}",
        *SUBMIT,
        "{w}/cluster.yaml",
        _override,
        arrange=text("cluster.yaml", "name: c\npython: [python]\n"),
    )
for _name, _content in {
    "empty": "",
    "a list": "- account: a\n",
    "an unknown key": "name: c\npython: [python]\nacount: a\n",
    "a newline in the account": 'name: c\npython: [python]\naccount: "a\\n#SBATCH --wrap=id"\n',
    "a partition of a command": "name: c\npython: [python]\npartition: $(touch canary)\n",
    "a mail of two lines": 'name: c\npython: [python]\nmail_user: "a@b\\ntouch canary"\n',
    "a binary": b"\x00\x01\x02",
    "a tag": "name: c\npython: [python]\naccount: !!python/name:os.system\n",
}.items():
    case(f"cluster: {_name}", *SUBMIT, "{w}/cluster.yaml", arrange=text("cluster.yaml", _content))


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)
