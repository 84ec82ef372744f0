"""Each combination that cannot work is rejected with its key and its fix."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.messages import named_key
from pacs_megatron.errors import ConfigError
from pacs_megatron.models.shape import shape_problems
from tests.support.run_files import BASE

SFT = [
    "objective=null",
    "objective.name=sft",
    "rollout.engine=demonstrations",
    "rollout.max_response_tokens=512",
    "reward=null",
]
BENCH = "evaluation.benchmarks=[{path: a, preset: aime, name: x}]"
ONE_CLASS = "admission.drop_one_class_groups=true"
SAMPLING = "evaluation.sampling={max_response_tokens: 8}"
SGLANG = "rollout={engine: sglang, urls: ['http://127.0.0.1:1'], sync: {transport: disk}"

LONE = ("w_reinforce", "ppo", "reinforce_pp")
"""Objectives that train on one sample of a prompt, too"""
SERVERS = [
    "resources={gpus_per_node: 8, gpu: h100}",
    "rollout={engine: sglang, sync: {transport: disk}, sampling: {max_response_tokens: 512}, "
    "servers: {python: [python]}}",
]
TWO_SERVERS = (
    "rollout={engine: sglang, urls: ['http://n1:1', 'http://n2:1'], shares_gpus: true, sampling: "
    "{max_response_tokens: 512}, sync: {transport: ipc}}"
)
AHEAD = [
    "rollout={engine: sglang, max_staleness: 1, urls: ['http://127.0.0.1:1'], sampling: "
    "{max_response_tokens: 512}, sync: {transport: disk}}"
]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path / "base.yaml"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["run.nproc=6", "parallel.tp=4"],
            "6 ranks are not a multiple of parallel.tp*pp*cp=4*1*1=4; start a multiple of 4 "
            "ranks, or make tp*pp*cp one of 1, 2, 3, 6 (override)",
        ),
        (
            ["precision={dtype: fp32, fp8: {recipe: delayed}}"],
            "precision.fp8 requires precision.dtype=bf16, got fp32; change precision.dtype, or "
            "remove precision.fp8 (override)",
        ),
        (
            ["parallel.sequence_parallel=true"],
            "parallel.sequence_parallel=true requires parallel.tp > 1",
        ),
        (["parallel.vpp=2"], "parallel.vpp=2 requires parallel.pp > 1"),
        (
            ["observability.profile={steps: [3, 11]}"],
            "observability.profile.steps contains 11, but run.steps=10; use steps from 1 to 10",
        ),
        (
            ["run.nproc=2", "observability.profile={steps: [3], ranks: [0, 2]}"],
            "observability.profile.ranks contains 2, but the run has 2 ranks; use ranks from 0 to "
            "1",
        ),
        (
            ["observability.profile={steps: [3], kind: memory}"],
            "observability.profile.kind=memory requires resources.gpus_per_node > 0, got 0",
        ),
        (
            ["observability.profile={steps: [3], kind: nsys}"],
            "observability.profile.kind=nsys requires resources.gpus_per_node > 0, got 0",
        ),
        (
            ["observability.profile={steps: [3], servers: true}"],
            "observability.profile.servers=true requires rollout.engine=sglang, got embedded",
        ),
        (
            [*AHEAD, "observability.profile={steps: [3], server_forwards: 5}"],
            "observability.profile.server_forwards=5 requires observability.profile.servers=true",
        ),
        (["batch.groups=together"], "batch.groups=together needs batch.tokens_per_microbatch >="),
        (
            ["objective=null", "objective.name=grpo", "batch.groups=apart"],
            "requires objective.name=pacs | real, got grpo",
        ),
        (
            ["rollout.sampling.temperature=0"],
            "rollout.sampling.temperature=0 is greedy: all responses of a group are",
        ),
        (
            ["rollout.sampling.temperature=1e-7"],
            "temperature=1e-07 is below 1e-05, where SGLang samples greedily",
        ),
        (
            ["objective={name: grpo, importance: truncate}", "rollout.sampling.top_k=3"],
            "rollout.sampling.top_k=3 with objective.importance=truncate: the importance weight is",
        ),
        (
            ["objective={name: rloo, importance: mask}", "rollout.sampling.top_p=0.9"],
            "rollout.sampling.top_p=0.9 with objective.importance=mask",
        ),
        (
            [
                "objective={name: pacs, importance_cap: 2.0}",
                "rollout.sampling={max_response_tokens: 512, top_k: 20, top_p: 0.8}",
            ],
            "rollout.sampling.top_k=20 and rollout.sampling.top_p=0.8 with "
            "objective.importance_cap=2.0",
        ),
        (
            ["batch.samples_per_prompt=1"],
            "compares the samples of a prompt; use at least 2 (override)",
        ),
        (
            ["objective.actor_term=0.5", "batch.updates_per_step=2"],
            "actor_term 0, or 1 for both (override)",
        ),
        (["run.name=''"], "run.name: expected letters, digits"),
        (["run.name=../other"], "run.name: expected letters"),
        (["run.name=a b"], "got 'a b'; correct it (override)"),
        (
            ["resources.time_limit=00:05:00"],
            "not longer than resources.signal_lead_s=300; the stop signal would arrive",
        ),
        (
            [*SERVERS, "rollout.servers.tp=16"],
            "rollout.servers.tp=16: a server runs on one node with resources.gpus_per_node=8; "
            "change one of them",
        ),
        (
            [
                *SERVERS,
                "resources.rollout_nodes=2",
                "rollout.servers.tp=6",
                "rollout.servers.count=4",
            ],
            "= 24 GPUs, but resources.rollout_nodes * gpus_per_node = 2 * 8 offers 16; use at "
            "most 2 servers",
        ),
        (
            [*SERVERS, "resources.rollout_nodes=3", "rollout.servers.count=4"],
            "rollout.servers.count=4 does not divide over resources.rollout_nodes=3; use a "
            "multiple of 3",
        ),
        (["objective.reset_every=3"], "remove it or set reference to frozen (override)"),
        (["objective.score=grpo"], "it is required there; set the key (base.yaml:6)"),
        (
            ["batch.updates_per_step=9"],
            "batch.updates_per_step=9 is more than batch.prompts_per_step=8: an update requires "
            "at least one group; use at most 8",
        ),
        (
            ["batch.tokens_per_microbatch=1023"],
            "data.max_prompt_tokens=512 + rollout.sampling.max_response_tokens=512; use at least "
            "1024",
        ),
        (["objective.name=sft"], "set rollout.engine=demonstrations (base.yaml:14)"),
        (
            ["rollout.engine=demonstrations", "rollout.max_response_tokens=5"],
            "set rollout.engine=embedded or objective.name=sft",
        ),
        (["reward=null"], "`reward` is missing; sampled responses require a verifier"),
        (
            [
                "objective=null",
                "objective.name=w_reinforce",
                "batch.samples_per_prompt=1",
                ONE_CLASS,
            ],
            "drops every group of batch.samples_per_prompt=1 sample; set it to false (override)",
        ),
        (
            ["reward.label_threshold=2"],
            "label_threshold=2 gives every reward of 0 or 1 the same label; remove it",
        ),
        (
            ["reward.label_threshold=0"],
            "label_threshold=0 gives every reward of 0 or 1 the same label; remove it",
        ),
        (
            [
                "objective=null",
                "objective={name: dapo, overlong_length: 20480, overlong_buffer: 4096}",
            ],
            "is not below rollout.sampling.max_response_tokens=512, so no response is punished; "
            "set overlong_length=512",
        ),
        (
            [
                "objective=null",
                "objective={name: reinforce_pp, baseline: group}",
                "batch.samples_per_prompt=1",
            ],
            "objective reinforce_pp compares the samples of a prompt; use at least 2 (override)",
        ),
        (
            [ONE_CLASS, "admission.refill_rounds=-1"],
            "admission.refill_rounds=-1: expected greater than or equal to 0",
        ),
        (
            ["admission.refill_rounds=3"],
            "admission.refill_rounds=3 requires admission.drop_one_class_groups=true",
        ),
        (
            [*SFT, "admission.refill_rounds=3"],
            "admission.refill_rounds=3 requires rollout.engine=embedded | sglang, got dem",
        ),
        (
            ["admission.resample={schedule: equal, max_samples: 4}", "batch.samples_per_prompt=4"],
            "admission.resample.max_samples=4 leaves no further samples beside batch.samples_per",
        ),
        (
            [ONE_CLASS, "admission.oversample=1.5", "admission.resample={schedule: hardness}"],
            "admission.resample requires admission.oversample=1, got 1.5; change",
        ),
        (
            [*SFT, "admission.resample={schedule: equal}"],
            "admission.resample requires rollout.engine=embedded | sglang, got dem",
        ),
        (
            ["objective=null", "objective={name: ppo}", "batch.groups=together"],
            "requires objective.name=pacs | real, got ppo",
        ),
        (
            ["objective=null", "objective={name: real_bce}", "batch.groups=apart"],
            "requires objective.name=pacs | real, got real_bce",
        ),
        (
            ["objective=null", "objective={name: real, importance: truncate}"],
            "objective.name=real does not use it; remove the key",
        ),
        (
            ["objective=null", "objective={name: w_reinforce, loss_mean: sequence}"],
            "objective.name=w_reinforce does not use it",
        ),
        (
            ["objective=null", "objective={name: grpo}", "mismatch.score_noise_every=5"],
            "requires objective.name=pacs, got grpo; change",
        ),
        (
            ["objective=null", "objective={name: ppo, kl_in: reward}"],
            "objective.kl_in=reward does not go with kl_coef=0.0",
        ),
        (
            ["objective.actor_term=0.5", "batch.epochs=2"],
            "use actor_term 0, or 1 for both (override)",
        ),
        (
            ["reward={name: arithmetic, label_rule: authors}"],
            "it belongs to reward.name=math, and reward.name=arith",
        ),
        (["reward={name: code, test_memory_gib: 8}"], "must be below reward.memory_limit_gib=4"),
        (["reward={name: code, sandbox: docker}"], "expected one of bubblewrap, none (override)"),
        (["reward={name: http, url: 'http://u:p@x/y'}"], "without user or password"),
        (["admission.oversample=1.5"], "requires admission.drop_one_class_groups=true, got false"),
        (
            [*SERVERS, "policy.offload=all"],
            "policy.offload=all requires rollout.servers.colocated=true, got false",
        ),
        (
            ["policy.routing=replay_sampler"],
            "policy.routing=replay_sampler requires rollout.engine=sglang, got embedded",
        ),
        (
            [
                f"{SGLANG}, sampling: {{max_response_tokens: 9}}, agent: {{function: 'a.py:f'}}}}",
                "policy.routing=replay_sampler",
            ],
            "policy.routing=replay_sampler needs rollout.agent null",
        ),
        (
            ["policy.offload=optimizer"],
            "policy.offload=optimizer requires rollout.servers.colocated=true, got null",
        ),
        (
            [SERVERS[0], TWO_SERVERS],
            "rollout.sync.transport=ipc passes handles of one host's memory",
        ),
        (
            [SERVERS[0], TWO_SERVERS, "rollout.url_ranks=[0]"],
            "url_ranks has 1 ranks for 2 servers; give one for each of `urls`, or remove it",
        ),
        (
            ["policy.lora={rank: 4, alpha: 8, dropout: 0.1}"],
            "policy.lora.dropout=0.1 is not supported: the passes of a step would use other",
        ),
        (
            ["policy.lora={rank: 4, alpha: 8}", "objective=null", "objective={name: ppo}"],
            "policy.lora with objective.name=ppo is not supported: its critic would be a whole",
        ),
        (
            [
                "policy.lora={rank: 4, alpha: 8}",
                "precision.fp8={recipe: tensorwise}",
                "resources={gpus_per_node: 1, gpu: h100}",
            ],
            "policy.lora with precision.fp8 is not supported: a product of FP8 weights",
        ),
        (["policy.lora={rank: 4, alpha: 8, targets: [experts]}"], "expected one of q_proj, k_proj"),
        (
            ["policy.lora={rank: 4, alpha: 8, targets: [q_proj, q_proj]}"],
            "expected each module once, got q_proj, q_proj",
        ),
        (["policy.lora={rank: 4}"], "policy.lora.alpha"),
        (
            [*AHEAD, "rollout.shares_gpus=true"],
            "rollout.max_staleness=1 requires rollout.shares_gpus=false",
        ),
        ([*SFT, "rollout.max_staleness=1"], "max_staleness"),
        ([*SFT, "reward.name=math"], "`reward` is not used by rollout.engine=demonstrations"),
        (
            [*SFT, "data.shuffle_labels=true"],
            "data.shuffle_labels=true requires rollout.engine=embedded | sglang",
        ),
        (
            [*SFT, "admission.truncated=drop"],
            "admission.truncated=drop requires rollout.engine=embedded | sglang",
        ),
        (
            [*SFT, "data.train.preset=null", "data.train.columns={problem: p, answer: a}"],
            "`data.train.columns.solution` is missing",
        ),
        (
            [*SFT, "data.mix=[{path: a.jsonl, name: b, columns: {problem: p, answer: a}}]"],
            "`data.mix.0.columns.solution` is missing",
        ),
        (
            ["data.mix=[{path: a.jsonl, name: b}]"],
            "data.mix.0: exactly one of `preset` and `columns` must be set, got neither",
        ),
        (
            ["data.mix=[{path: a, preset: aime}, {path: b, preset: aime}]"],
            "data.mix.1.name=aime is also the name of data.mix.0; set another name",
        ),
        (["data.train.weight=2"], "data.train.weight=2 has no effect on the only training set"),
        (
            ["data.train.preset=null"],
            "data.train: exactly one of `preset` and `columns` must be set, got neither",
        ),
        (["data.train.columns={problem: p, answer: a}"], "got both; set one"),
        (
            ["optimizer.schedule=cosine", "optimizer.min_lr=1.0"],
            "optimizer.min_lr=1.0 is above optimizer.lr=1e-06; lower it",
        ),
        (
            [
                f"{SGLANG[:-1]}, folder: /x}}, sampling: {{max_response_tokens: 8}}}}".replace(
                    "disk", "ipc"
                )
            ],
            "rollout.sync.folder=/x requires rollout.sync.transport=disk, got ipc",
        ),
        (
            ["optimizer.min_lr=1e-8"],
            "optimizer.min_lr=1e-08 requires optimizer.schedule=linear | cosine, got constant",
        ),
        (
            ["optimizer.schedule=linear", "optimizer.warmup_updates=10"],
            "leaves no update for the decay: the run has 10",
        ),
        ([BENCH], "`evaluation.sampling` is missing"),
        (
            [
                f"{SGLANG}, sampling: {{max_response_tokens: 8, stop: "
                f"{list('abcdefghijklmnopqrstuvwxyz0123456')}}}}}"
            ],
            "rollout.sampling.stop has 33 strings, but SGLang allows at most 32; shorten it",
        ),
        (
            [BENCH, SAMPLING, "evaluation.k=[1, 8]"],
            "evaluation.k=8: pass@k requires 1 <= k <= evaluation.samples_per_prompt=4",
        ),
        (
            [
                BENCH,
                SAMPLING,
                "evaluation.benchmarks=[{path: a, preset: aime, name: x}, {path: b, preset: aime, "
                "name: x}]",
            ],
            "name=x is also the name of evaluation.benchmarks.0; set another name",
        ),
        (["evaluation.samples_per_prompt=100000000"], "less than or equal to 16384"),
        (["evaluation.every=5"], "`evaluation.every` is not used without evaluation.benchmarks"),
    ],
)
def test_rejected(base: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        SFT,
        [BENCH, SAMPLING, "evaluation.k=[1, 4]"],
        ["run.nproc=4", "parallel.tp=2"],
        *(
            ["objective=null", f"objective={{name: {name}}}", "batch.samples_per_prompt=1"]
            for name in LONE
        ),
        [
            "objective=null",
            "objective={name: ppo, critic: {warmup_steps: 10}}",
            ONE_CLASS,
            "admission.refill_rounds=3",
        ],
        ["objective=null", "objective={name: dapo, overlong_length: 600, overlong_buffer: 100}"],
        ["reward.label_threshold=0.5"],
        [SERVERS[0], TWO_SERVERS, "rollout.url_ranks=[0, 7]", "policy.offload=all"],
    ],
)
def test_accepted(base: Path, overrides: list[str]) -> None:
    load_config(base, overrides)


@dataclass(frozen=True)
class Experts:
    num_experts: int = 128
    expert_ffn_size: int = 768
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class DeltaNets:
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_head_dim: int = 128
    value_head_dim: int = 128


@dataclass(frozen=True)
class Shape:
    num_layers: int = 40
    hidden_size: int = 5120
    num_heads: int = 40
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn_size: int = 17408
    max_context: int = 40960
    moe: Experts | None = None
    delta: DeltaNets | None = None


@pytest.mark.parametrize(
    ("overrides", "shape", "expected"),
    [
        (
            ["parallel.tp=4", "parallel.cp=2"],
            Shape(delta=DeltaNets(num_key_heads=12, num_value_heads=24)),
            "parallel.tp*cp=8 does not divide linear_num_key_heads=12 of M; make it one of 1, 2, "
            "3, 4, 6, 12",
        ),
        (
            ["parallel.tp=4"],
            Shape(moe=Experts(shared_ffn_size=510)),
            "parallel.tp=4 does not divide shared_expert_intermediate_size=510 of M",
        ),
        (
            ["parallel.tp=3"],
            Shape(),
            "parallel.tp=3 does not divide num_key_value_heads=8 of M; use one of 1, 2, 4, 8",
        ),
        (
            ["parallel.tp=8"],
            Shape(num_heads=12, num_kv_heads=8),
            "num_attention_heads=12 of M; use one of 1, 2, 4",
        ),
        (["parallel.tp=2"], Shape(ffn_size=333), "intermediate_size=333 of M; use 1"),
        (
            ["parallel.pp=3"],
            Shape(),
            "parallel.pp=3 does not divide num_hidden_layers=40 of M; make it one of 1, 2, 4",
        ),
        (
            ["parallel.pp=4", "parallel.vpp=3"],
            Shape(),
            "parallel.pp*vpp=12 does not divide num_hidden_layers=40",
        ),
        (["parallel.ep=2"], Shape(), "parallel.ep=2, but M has no experts; set parallel.ep=1"),
        (
            ["parallel.ep=3"],
            Shape(moe=Experts()),
            "parallel.ep=3 does not divide num_experts=128 of M; use one of 1, 2",
        ),
        (["parallel.tp=2"], Shape(moe=Experts()), "requires parallel.sequence_parallel=true"),
        (
            [
                "resources={gpus_per_node: 8, gpu: h200}",
                "precision={dtype: bf16, fp8: {recipe: tensorwise}}",
                "parallel.tp=2",
            ],
            Shape(ffn_size=1000),
            "multiples of 16 on every tensor-parallel rank, but M has intermediate_size=1000 with "
            "parallel.tp=2; lower",
        ),
        (
            [
                "resources={gpus_per_node: 8, gpu: h200}",
                "precision={dtype: bf16, fp8: {recipe: tensorwise}}",
            ],
            Shape(head_dim=10, num_heads=8, num_kv_heads=1),
            "but M has (num_attention_heads + 2 * num_key_value_heads) * head_dim=100 with "
            "parallel.tp=1; remove precision.fp8",
        ),
        (
            [
                "resources={gpus_per_node: 8, gpu: h200}",
                "precision={dtype: bf16, fp8: {recipe: blockwise}}",
                "parallel={tp: 2, sequence_parallel: true}",
            ],
            Shape(hidden_size=1088),
            "blockwise with parallel.sequence_parallel needs a multiple of 128 as hidden_size, M "
            "has 1088; use recipe tensorwise",
        ),
        (
            [],
            Shape(max_context=100),
            "positions, but M has max_position_embeddings=100; lower one of them",
        ),
        (
            [BENCH, "evaluation.sampling={max_response_tokens: 5000}"],
            Shape(max_context=5000),
            "evaluation.sampling.max_response_tokens=5000 leaves no position for a problem",
        ),
        (
            [*SERVERS, "rollout.servers.context_length=5000"],
            Shape(max_context=4999),
            "rollout.servers.context_length=5000, but M has 4999 positions, and SGLang does not "
            "start with more; use at most 4999",
        ),
        (
            [*SERVERS, "data.max_prompt_tokens=488"],
            Shape(max_context=1001),
            "M has 1001 positions, but SGLang needs a context of 1002 for a response of 512 tokens "
            "to a prompt of data.max_prompt_tokens=488; lower one of them by 1",
        ),
        (
            [*SERVERS, "rollout.servers.tp=3"],
            Shape(),
            "rollout.servers.tp=3 does not divide num_attention_heads=40 and "
            "num_key_value_heads=8 of M; use one of 1, 2, 4, 8",
        ),
    ],
)
def test_shape(base: Path, overrides: list[str], shape: Shape, expected: str) -> None:
    problems = shape_problems(load_config(base, overrides).config, shape, "M")
    assert [problem for problem in problems if expected in problem]


def test_a_context_that_just_holds_the_longest_request(base: Path) -> None:
    for last in ([], ["rollout.servers.context_length=1002"]):
        config = load_config(base, [*SERVERS, "data.max_prompt_tokens=488", *last]).config
        assert shape_problems(config, Shape(max_context=1002), "M") == []
        assert len(shape_problems(config, Shape(max_context=1001), "M")) == 1


def test_a_dense_width_does_not_bind_a_moe_model(base: Path) -> None:
    config = load_config(base, ["parallel.tp=4", "parallel.sequence_parallel=true"]).config
    assert shape_problems(config, Shape(ffn_size=333, moe=Experts()), "M") == []


@pytest.mark.parametrize(
    ("overrides", "ranks", "key"),
    [
        (["parallel.tp=4", "parallel.pp=2"], 12, "parallel.tp"),
        (["parallel.tp=2", "parallel.ep=8"], 12, "parallel.ep"),
        (["batch.prompts_per_step=1", "batch.samples_per_prompt=4"], 8, "batch.prompts_per_step"),
    ],
)
def test_layout(base: Path, overrides: list[str], ranks: int, key: str) -> None:
    assert [
        named_key(problem)
        for problem in layout_problems(load_config(base, overrides).config, ranks)
    ] == [key]
    assert layout_problems(load_config(base).config, 8) == []


def test_an_empty_list_of_benchmarks_switches_the_evaluation_off(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(BASE)
    config = load_config(file, ["evaluation.every=5", "evaluation.benchmarks=[]"]).config
    assert config.evaluation.benchmarks == ()
