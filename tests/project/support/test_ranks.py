"""The helper that every distributed test trusts must itself notice failures, deaths and hangs."""

import os
import signal
import time

import pytest

from tests.support.ranks import RankError, run_ranks


def test_results_come_back_by_rank_and_the_group_works():
    def rank_main(rank: int, world_size: int) -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor)
        return os.getpid(), float(tensor[0])

    results = run_ranks(rank_main, 2)
    assert [value for _, value in results] == [3.0, 3.0]
    assert len({pid for pid, _ in results} | {os.getpid()}) == 3


def test_an_exception_in_one_rank_ends_all_with_its_traceback():
    def rank_main(rank: int, world_size: int) -> None:
        import torch
        import torch.distributed as dist

        if rank == 1:
            raise ValueError("rank one is unhappy")
        dist.all_reduce(torch.zeros(1))

    started = time.monotonic()
    with pytest.raises(RankError, match="rank one is unhappy"):
        run_ranks(rank_main, 2)
    assert time.monotonic() - started < 300


def test_a_death_by_signal_and_a_hang_are_named():
    def dies(rank: int, world_size: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(rank: int, world_size: int) -> int:
        if rank == 1:
            time.sleep(600)
        return rank

    with pytest.raises(RankError, match="rank 0 died by signal SIGKILL"):
        run_ranks(dies, 1, init_process_group=False)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] had not finished after 1 s"):
        run_ranks(hangs, 2, timeout=1.0, init_process_group=False)
    assert time.monotonic() - started < 300


def test_a_large_result_does_not_block_the_pipe():
    def rank_main(rank: int, world_size: int) -> bytes:
        return bytes([rank]) * 5_000_000

    assert [len(data) for data in run_ranks(rank_main, 2, init_process_group=False)] == [
        5_000_000
    ] * 2
