"""Which cores the processes of a node get: on a described node, and as real processes report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from itertools import chain, combinations
from pathlib import Path

import pytest

from pacs_megatron.runtime import cores
from pacs_megatron.runtime.cores import Core, allowed_cores, divide, gpu_numa_nodes, split

NODE_0 = [Core((number, number + 32), 0) for number in range(16)]
NODE_1 = [Core((number, number + 32), 1) for number in range(16, 32)]
"""Two sockets of 16 cores with two threads each, numbered as Linux does."""


def threads(share: list[Core]) -> set[int]:
    return set(chain.from_iterable(core.threads for core in share))


def test_each_rank_is_near_its_gpu_and_apart_from_the_others() -> None:
    near = [1, 1, 0, 0, 0, 0, 1, 1]
    shares = divide([*NODE_0, *NODE_1], near)
    assert [{core.numa_node for core in share} for share in shares] == [{node} for node in near]
    assert [len(share) for share in shares] == [4] * 8
    assert not any(threads(one) & threads(other) for one, other in combinations(shares, 2))
    assert set().union(*map(threads, shares)) == set(range(64))


def test_both_threads_of_a_core_belong_to_one_process() -> None:
    shares = divide([*NODE_0, *NODE_1], [0, 0, 0, 0, 1, 1, 1, 1])
    parts = list(chain.from_iterable(split(share, Fraction(1, 2)) for share in shares))
    assert [len(part) for part in parts] == [4] * 16
    assert all({number ^ 32 for number in part} == part for part in parts)


@pytest.mark.parametrize("near", [[None, 0], [0, 7], [None, None]])
def test_gpus_of_unknown_place_share_all_cores(near: list[int | None]) -> None:
    """No NUMA node of a GPU in a virtual machine, or cores of the other socket only in the job."""
    first, second = divide([*NODE_0[8:], *NODE_1[:8]], near)
    assert (len(first), len(second)) == (8, 8) and not threads(first) & threads(second)


def test_more_gpus_than_cores_take_turns() -> None:
    shares = divide(NODE_0[:2], [None] * 8)
    assert [share[0].threads[0] for share in shares] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert split(shares[0], Fraction(1, 2)) == ({0, 32}, {0, 32})


@pytest.mark.parametrize(
    ("part", "rank", "rollout"), [(Fraction(1, 2), 4, 4), (Fraction(1, 4), 6, 2), (0, 8, 8)]
)
def test_parts_of_rank_and_rollout(part: Fraction, rank: int, rollout: int) -> None:
    of_rank, of_rollout = split(NODE_0[:4], Fraction(part))
    assert (len(of_rank), len(of_rollout)) == (rank, rollout)
    assert not part or not of_rank & of_rollout


def test_the_kernels_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{number % 2}").mkdir()
        siblings = f"{number % 2},{number % 2 + 2}\n"
        (folder / "topology" / "thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 3})
    assert allowed_cores(tmp_path) == [Core((0,), 0), Core((1, 3), 1)]
    assert cores._numbers("0-3,8\n") == {0, 1, 2, 3, 8}

    gpus = tmp_path / "gpus"
    for address, node in (("0000:17:00.0", 0), ("0000:CA:00.0", 1), ("0000:DA:00.0", -1)):
        (gpus / address).mkdir(parents=True)
        uuid = f"GPU-{address[5:7].lower()}00"
        (gpus / address / "information").write_text(f"Model: x\nGPU UUID: \t {uuid}\n")
        device = tmp_path / "bus" / "pci" / "devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    assert gpu_numa_nodes(gpus, tmp_path) == {"0": 0, "GPU-1700": 0, "1": 1, "GPU-ca00": 1}
    assert gpu_numa_nodes(tmp_path / "none", tmp_path) == {}


PROBE = """
import json, os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from pacs_megatron.runtime import cores
from pacs_megatron.runtime.cores import Core
count = int(sys.argv[1])
numbers = sorted(os.sched_getaffinity(0))
cores.allowed_cores = lambda: [Core((number,), 0) for number in numbers]
config = SimpleNamespace(
    resources=SimpleNamespace(gpus_per_node=count),
    rollout=SimpleNamespace(on_trainer_gpus=True),
)
cores.bind_rank(config, 1, 1, count)
report = [sorted(os.sched_getaffinity(0)), os.environ.get("PACS_ROLLOUT_CORES")]
report.append(sorted(cores.rollout_cores([1]) or ()))
cores.bind_to_rollout_cores()
print(json.dumps([*report, sorted(os.sched_getaffinity(0))]))
"""


def reported(count: int, **environment: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(count)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_rank_its_server_and_the_driver_report_their_cores() -> None:
    numbers = sorted(os.sched_getaffinity(0))
    half = len(numbers) // 2
    rank, published, server, driver = reported(2)
    second = numbers[half:]
    assert published is not None
    if len(second) == 1:
        assert (rank, server, driver) == (second, second, numbers)
    else:
        middle = len(second) - len(second) // 2
        assert (rank, server) == (second[:middle], second[middle:])
        assert set(server) < set(driver) and not set(rank) & set(driver)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mask_cpu:", "cores"])
def test_cores_that_srun_chose_are_kept(kind: str) -> None:
    numbers = sorted(os.sched_getaffinity(0))
    assert reported(2, SLURM_CPU_BIND_TYPE=kind) == [numbers, None, [], numbers]
