"""Every shipped configuration on the modelled node of eight GPUs: eight real ranks over gloo,
stand-in servers, the real driver and guards.

A tiny model of the same family replaces the file's model. The file's layout, transport, number of
servers and their tensor-parallel size stay. Data, lengths and batch are small. FP8 is off: a CPU
has none. tests/te/training/test_main_node_of_eight.py runs the FP8 files with Transformer Engine's
modules and emulated FP8.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.sglang.server import PORT_TAKEN
from pacs_megatron.workbench.plan.plan import make_plan
from tests.support.metrics import reproducible_bytes
from tests.support.node.host import Host
from tests.support.node.runs import (
    GPU_BYTES,
    HYBRIDS,
    RUNS,
    NodeRun,
    check_run,
    shipped_run,
)
from tests.support.ranks import RankError
from tests.support.servers.fake_sglang import FakeSglang
from tests.support.tiny_models import make_tiny_qwen3

IN_TEST = "pacs-qwen3-8b-1n8g-tp2"
IN_FULL = (
    "pacs-qwen2.5-7b-1n8g-tp2",
    "pacs-qwen3-14b-2n8g-tp4",
    "grpo-qwen3-14b-7n8g-tp2-ahead",
    "grpo-qwen3-30b-a3b-4n8g-ep8",
    "pacs-qwen3-32b-4n8g-tp8",
    "grpo-qwen3-4b-1n8g-tp1",
)


WHOLE_ENVIRONMENT = {
    "python": "/env/bin/python",
    "home": "/home",
    "ninja": "/env/bin/ninja",
    "caches": ["/scratch"],
}


def in_tiers() -> list[object]:
    marks = {IN_TEST: (), **dict.fromkeys(IN_FULL, (pytest.mark.full,))}
    return [
        pytest.param(name, marks=marks.get(name, (pytest.mark.campaign,)))
        for name in sorted(path.stem for path in RUNS.glob("*n8g*.yaml"))
        if name not in HYBRIDS
    ]


@pytest.mark.parametrize("name", in_tiers())
def test_a_shipped_configuration_trains_two_steps_and_saves(tmp_path: Path, name: str) -> None:
    check_run(shipped_run(name, tmp_path))


def test_the_longest_prompt_of_a_shipped_configuration_gets_a_whole_response() -> None:
    """SGLang shortens a response without a message: one token less of context, and it is short."""
    names = []
    for path in sorted(RUNS.glob("*.yaml")):
        config = load_config(path).config
        servers = config.rollout.managed_servers
        if servers is None or servers.context_length is None:
            continue
        prompt = config.data.max_prompt_tokens
        response = config.rollout.sampling.max_response_tokens
        with FakeSglang() as fake:
            fake.context = servers.context_length
            assert fake._clip(prompt, response) == (response, ""), path.stem
            fake.context = prompt + response + 1
            assert fake._clip(prompt, response) == (response - 1, "")
        names.append(path.stem)
    assert {path.stem for path in RUNS.glob("*n8g*.yaml")} <= set(names)


def test_a_stand_in_server_reports_a_taken_port_as_the_product_expects(tmp_path: Path) -> None:
    """The product then starts it at another port, as with the real server."""
    make_tiny_qwen3(tmp_path / "model")
    host = Host(tmp_path / "host", GPU_BYTES["h100"], 1.0, frozenset())
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            options = (
                "--host=127.0.0.1",
                f"--port={taken.getsockname()[1]}",
                "--tp-size=1",
                "--mem-fraction-static=0.5",
            )
            args = [f"--model-path={tmp_path / 'model'}", *options]
            answer = host.call(
                op="serve", args=args, visible="0", pid=0, environment=WHOLE_ENVIRONMENT
            )
        assert answer["code"] == 1 and any(text in answer["reason"] for text in PORT_TAKEN), answer
        memory = host.call(op="memory", gpu=0)
        assert memory["free"] == memory["total"]
    finally:
        host.close()


@pytest.mark.full
@pytest.mark.parametrize(("count", "tp"), [(4, 2), (1, 8)])
def test_colocated_servers_with_several_gpus_each(tmp_path: Path, count: int, tp: int) -> None:
    """Each tensor-parallel rank of a server gets a handle of its own; the trainer has tp=2."""
    check_run(
        NodeRun(
            IN_TEST, tmp_path, more=(f"rollout.servers.count={count}", f"rollout.servers.tp={tp}")
        )
    )


@pytest.mark.full
@pytest.mark.parametrize("offload", ["none", "all"])
def test_colocated_servers_of_two_nodes_by_ipc(tmp_path: Path, offload: str) -> None:
    """Each rank sends to the server on its own GPU; a handle of another node's GPU is rejected.

    The servers start before the trainer has built its model, and release their memory to it.
    """
    more = ["rollout.servers.count=8", f"policy.offload={offload}"]
    if offload == "none":
        more.append("rollout.servers.mem_fraction=0.35")
    run = NodeRun(IN_TEST, tmp_path, more=tuple(more), nodes=2, gpus=4)
    check_run(run)
    config = load_config(run.run_dir / "config.yaml").config
    assert config.rollout.sglang is not None
    assert config.rollout.sglang.url_ranks == tuple(range(8))
    assert [[server["gpus"] for server in host["servers"]] for host in run.hosts] == [
        [[0], [1], [2], [3]],
        [[0], [1], [2], [3]],
    ]


@pytest.mark.full
def test_offloaded_state_makes_memory_for_a_larger_cache_and_changes_no_bit(tmp_path: Path) -> None:
    """85 % of a GPU for servers: beside the trainer's whole state (37 GiB of 141) they would never
    start.
    """
    without = "policy.offload=none"
    plain = NodeRun(
        IN_TEST, tmp_path / "plain", more=(without, "rollout.servers.mem_fraction=0.35")
    )
    larger = NodeRun(IN_TEST, tmp_path / "larger")
    for run in (plain, larger):
        run.folder.mkdir()
        run.run()
    assert larger.exported() == plain.exported()
    assert {server["held"] for server in larger.hosts[0]["servers"]} == {larger.exported()}
    assert reproducible_bytes(larger.run_dir) == reproducible_bytes(plain.run_dir)
    refused = NodeRun(
        IN_TEST, tmp_path / "refused", more=(without, "rollout.servers.start_timeout_s=15")
    )
    refused.folder.mkdir()
    with pytest.raises(
        RankError, match=r"waiting for GPU memory|trainer needs"
    ):  # a server or a rank has its memory first
        refused.run()


COLOCATED = IN_TEST
APART = "grpo-qwen3-14b-7n8g-tp2-ahead"
PHASES = (
    (COLOCATED, "ipc", "/generate", pytest.mark.full),
    (COLOCATED, "ipc", "/update_weights_from_tensor", pytest.mark.full),
    (COLOCATED, "ipc", "/release_memory_occupation", pytest.mark.campaign),
    (COLOCATED, "ipc", "/resume_memory_occupation", pytest.mark.campaign),
    (COLOCATED, "ipc", "/weights_checker", pytest.mark.campaign),
    (COLOCATED, "ipc", "/continue_generation", pytest.mark.campaign),
    (APART, "broadcast", "/generate", pytest.mark.campaign),
    (APART, "broadcast", "/pause_generation", pytest.mark.campaign),
    (APART, "broadcast", "/init_weights_update_group", pytest.mark.campaign),
    (APART, "broadcast", "/begin_weight_update", pytest.mark.campaign),
    (APART, "broadcast", "/update_weights_from_distributed", pytest.mark.full),
    (APART, "broadcast", "/end_weight_update", pytest.mark.campaign),
    (APART, "disk", "/generate", pytest.mark.campaign),
    (APART, "disk", "/update_weights_from_disk", pytest.mark.full),
    (APART, "disk", "/weights_checker", pytest.mark.campaign),
    (APART, "disk", "/continue_generation", pytest.mark.campaign),
)
_undisturbed: dict[str, str] = {}


@pytest.mark.parametrize(
    ("name", "transport", "path"), [pytest.param(*phase[:3], marks=phase[3]) for phase in PHASES]
)
def test_a_server_killed_in_any_phase_comes_back_and_seven_work_on(
    tmp_path: Path, name: str, transport: str, path: str
) -> None:
    check_kill(tmp_path, name, transport, path, 1)


@pytest.mark.parametrize(
    ("name", "transport", "path", "tp"),
    [
        pytest.param(COLOCATED, "ipc", "/update_weights_from_tensor", 2, marks=pytest.mark.full),
        pytest.param(COLOCATED, "ipc", "/resume_memory_occupation", 4, marks=pytest.mark.campaign),
        pytest.param(
            COLOCATED, "disk", "/release_memory_occupation", 2, marks=pytest.mark.campaign
        ),
        pytest.param(
            APART, "broadcast", "/update_weights_from_distributed", 4, marks=pytest.mark.full
        ),
        pytest.param(
            APART, "broadcast", "/init_weights_update_group", 2, marks=pytest.mark.campaign
        ),
        pytest.param(APART, "disk", "/update_weights_from_disk", 2, marks=pytest.mark.campaign),
    ],
)
def test_a_server_with_several_gpus_killed_in_any_phase_comes_back(
    tmp_path: Path, name: str, transport: str, path: str, tp: int
) -> None:
    check_kill(tmp_path, name, transport, path, tp)


def check_kill(tmp_path: Path, name: str, transport: str, path: str, tp: int) -> None:
    """SIGKILL of the last server but two, or the last.

    Its requests restart on the others, so the samples and the weights are those without it.
    """
    more = (
        f"rollout.sync.transport={transport}",
        f"rollout.servers.count={8 // tp}",
        f"rollout.servers.tp={tp}",
    )
    if name == APART:
        more = (*more, "resources.rollout_nodes=1")
    gpu = 5 if tp == 1 else 8 - tp
    killed = NodeRun(name, tmp_path / "killed", steps=4, faults=frozenset({(gpu, path)}), more=more)
    killed.folder.mkdir()
    killed.run()
    servers = killed.hosts[-1]["servers"]
    firsts = range(0, 8, tp)
    assert [server["gpus"] for server in servers] == [
        list(range(first, first + tp)) for first in firsts
    ]
    assert sorted(killed.hosts[-1]["starts"]) == sorted([*firsts, gpu])
    killings = [
        reason for reason in killed.hosts[-1]["ended"] if reason.endswith(f": killed in {path}")
    ]
    assert len(killings) == 1 and str(gpu) in killings[0]
    # On a busy host the killed one may come back after the last request.
    others = [server for server in servers if server["gpus"][0] != gpu]
    assert all(server["answered"] for server in others)
    assert {server["held"] for server in servers} == {killed.exported()}
    assert len({server["version"] for server in servers}) == 1
    if name == COLOCATED:  # ahead of training, the samples' weights depend on time
        if name not in _undisturbed:
            plain = NodeRun(
                name, tmp_path / "plain", steps=4
            )  # the samples do not depend on the servers' number
            plain.folder.mkdir()
            plain.run()
            _undisturbed[name] = plain.exported()
        assert killed.exported() == _undisturbed[name]


@pytest.mark.full
def test_a_critic_counts_on_the_node_and_in_plan(tmp_path: Path) -> None:
    """8B and its critic:

    2 x 34 GiB of state beside 16 GiB of working memory do not fit 80 GiB, and fit 141.
    """
    ppo = (
        "objective.name=ppo",
        "mismatch.score_noise_every=null",
        "mismatch.max_score_noise=null",
        "batch.tokens_per_microbatch=9216",
    )
    path = RUNS / f"{COLOCATED}.yaml"
    smaller = (*ppo, "resources.gpu=h100")
    assert not make_plan(load_config(path, smaller)).fits
    with pytest.raises(RankError, match=r"waiting for GPU memory|trainer needs"):
        _in(tmp_path / "h100", (*smaller, "rollout.servers.start_timeout_s=15")).run()
    assert make_plan(load_config(path, ppo)).fits
    check_run(_in(tmp_path / "h200", ppo))


def _in(folder: Path, more: tuple[str, ...]) -> NodeRun:
    folder.mkdir()
    return NodeRun(COLOCATED, folder, more=more)
