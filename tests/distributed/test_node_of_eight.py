"""Every shipped configuration on the modelled node of eight GPUs (tests/support/node_run.py)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import read_metrics, reproducible_bytes
from tests.support.node_run import NUM_PROMPTS, NUM_SAMPLES, NodeRun, shipped
from tests.support.ranks import RankError

IN_TEST = "pacs-qwen3-8b-1n8g-tp2"
IN_FULL = (
    "pacs-qwen2.5-7b-1n8g-tp2",
    "grpo-qwen3-14b-2n8g-tp4-ahead",
    "grpo-qwen3-30b-a3b-4n8g-ep8",
    "pacs-qwen3-32b-4n8g-tp8",
    "grpo-qwen3-4b-1n8g-tp1",
)


def in_tiers() -> list[object]:
    marks = {IN_TEST: (), **dict.fromkeys(IN_FULL, (pytest.mark.full,))}
    return [pytest.param(name, marks=marks.get(name, (pytest.mark.campaign,))) for name in shipped()]


@pytest.mark.parametrize("name", in_tiers())
def test_a_shipped_configuration_trains_two_steps_and_saves(tmp_path: Path, name: str) -> None:
    run = NodeRun(name, tmp_path)
    run.run()
    rows = read_metrics(run.run_dir)
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    for row in rows[-2:]:
        assert row["admission/num_samples"] == NUM_PROMPTS * NUM_SAMPLES
        assert math.isfinite(row["optimizer/grad_norm"] or math.nan)
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} >= {"step_000001", "step_000002"}
    servers = [server for host in run.hosts for server in host["servers"]]
    ended = [reason for host in run.hosts for reason in host["ended"]]
    assert all(reason.endswith("its process was killed") for reason in ended), ended  # at the end of the run
    assert sum(len(host["starts"]) for host in run.hosts) == len(servers) == run.num_servers
    assert {server["held"] for server in servers} == {run.exported()}
    assert len({server["version"] for server in servers}) == 1 and not any(server["paused"] for server in servers)
    assert all(server["answered"] for server in servers)


@pytest.mark.full
def test_offloaded_state_makes_memory_for_a_larger_cache_and_changes_no_bit(tmp_path: Path) -> None:
    """60 % of a GPU for servers: beside the trainer's whole state (37 GiB of 80) they would never start."""
    plain = NodeRun(IN_TEST, tmp_path / "plain")
    larger = NodeRun(
        IN_TEST, tmp_path / "larger", more=("policy.offload=all", "rollout.servers.mem_fraction=0.6"), steps=2
    )
    for run in (plain, larger):
        run.folder.mkdir()
        run.run()
    assert larger.exported() == plain.exported()
    assert {server["held"] for server in larger.hosts[0]["servers"]} == {larger.exported()}
    assert reproducible_bytes(larger.run_dir) == reproducible_bytes(plain.run_dir)
    without = ("policy.offload=none", "rollout.servers.mem_fraction=0.6", "rollout.servers.start_timeout_s=15")
    refused = NodeRun(IN_TEST, tmp_path / "refused", more=without)
    refused.folder.mkdir()
    with pytest.raises(
        RankError, match=r"waiting for GPU memory|trainer needs"
    ):  # a server or a rank has its memory first
        refused.run()


COLOCATED, APART = IN_TEST, "grpo-qwen3-14b-2n8g-tp4-ahead"
PHASES = (
    (COLOCATED, "/generate", pytest.mark.full),
    (COLOCATED, "/update_weights_from_tensor", pytest.mark.full),
    (APART, "/update_weights_from_distributed", pytest.mark.full),
    (COLOCATED, "/release_memory_occupation", pytest.mark.campaign),
    (COLOCATED, "/resume_memory_occupation", pytest.mark.campaign),
    (COLOCATED, "/weights_checker", pytest.mark.campaign),
    (COLOCATED, "/continue_generation", pytest.mark.campaign),
    (APART, "/generate", pytest.mark.campaign),
    (APART, "/init_weights_update_group", pytest.mark.campaign),
    (APART, "/begin_weight_update", pytest.mark.campaign),
)
_undisturbed: dict[str, str] = {}


@pytest.mark.parametrize(("name", "path"), [pytest.param(name, path, marks=mark) for name, path, mark in PHASES])
def test_a_server_killed_in_any_phase_comes_back_and_seven_work_on(tmp_path: Path, name: str, path: str) -> None:
    """SIGKILL of server 5. Its requests restart on the others, so the samples and the weights are those without it."""
    killed = NodeRun(name, tmp_path / "killed", steps=4, faults=frozenset({(5, path)}))
    killed.folder.mkdir()
    killed.run()
    servers = killed.hosts[-1]["servers"]
    assert [server["gpus"] for server in servers] == [[gpu] for gpu in range(8)]
    assert sorted(killed.hosts[-1]["starts"]) == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    assert f"server[5]: killed in {path}" in killed.hosts[-1]["ended"]
    assert all(server["answered"] for server in servers)
    assert {server["held"] for server in servers} == {killed.exported()}
    assert len({server["version"] for server in servers}) == 1
    if name == COLOCATED:  # ahead of training, the samples' weights depend on time
        if name not in _undisturbed:
            plain = NodeRun(name, tmp_path / "plain", steps=4)
            plain.folder.mkdir()
            plain.run()
            _undisturbed[name] = plain.exported()
        assert killed.exported() == _undisturbed[name]
