"""A run with profiles and step times, beside the same run without."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rank_times import read_rank_times
from tests.support.metrics import strip_times
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

COUNTED = ("all_reduce", "all_gather", "send", "recv", "barrier", "reduce", "gather")
"""Collectives whose number does not depend on time; heartbeats are broadcasts"""


def run(folder: Path, model: Path, *overrides: str) -> tuple[Path, list[Counter[str]]]:
    """Runs the tiny configuration on two ranks; returns its folder and each rank's collectives."""
    folder.mkdir()
    config = write_tiny_run(folder, model)

    def on_rank(_rank: int, _world: int) -> Any:
        import torch.distributed as dist

        from pacs_megatron.training.main import run_rank

        calls: Counter[str] = Counter()

        def count(name: str) -> None:
            call = getattr(dist, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                calls[name] += 1
                return call(*args, **kwargs)

            setattr(dist, name, counted)

        for name in COUNTED:
            count(name)
        return int(run_rank(config, overrides)), calls

    results = run_ranks(on_rank, 2, init_process_group=False)
    assert [code for code, _ in results] == [ExitCode.OK] * 2
    return folder / "runs" / "tiny", [calls for _, calls in results]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Counter[str]]]]:
    tmp = tmp_path_factory.mktemp("profiled")
    model = make_tiny_qwen3(tmp / "model", num_hidden_layers=2, vocab_size=262)
    return {
        "off": run(tmp / "off", model),
        "on": run(tmp / "on", model, "observability.profile={steps: [2], ranks: [0, 1]}"),
    }


def test_the_trace_of_each_rank_has_the_phases(runs: Any) -> None:
    run_dir, _ = runs["on"]
    for rank in (0, 1):
        [path] = (run_dir / "profile").glob(f"rank{rank}.*")
        assert path.name == f"rank{rank}.2.pt.trace.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        for name in ("step 2", "rollout", "generate", "batch", "sync"):
            assert names[name] == 1, (name, names)
        for name in ("update", "forward_backward", "reduce", "optimizer"):
            assert names[name] == 2, (name, names)  # updates_per_step
        assert any(e["name"] == "aten::mm" for e in events)


def test_a_line_a_step_and_the_seconds_of_every_rank(runs: Any) -> None:
    run_dir, _ = runs["on"]
    log = (run_dir / "logs" / "rank0.log").read_text()
    for step in (1, 2):
        [line] = [line for line in log.splitlines() if f"INFO step {step}: " in line]
        assert "rollout " in line and "tokens/s a rank" in line and "TFLOP/s a rank" in line
        assert "MFU" not in line, "the peak of a CPU is not known"
    rows = read_rank_times(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert len(row["ranks"]) == 2
        for times in row["ranks"]:
            parts = times["update/forward_backward"] + times["update/optimizer"]
            assert parts <= times["update"] <= times["step"]
            assert times["update/forward_backward/reduce"] <= times["update/forward_backward"]
            assert times["rollout/generate"] <= times["rollout"]
    page = (run_dir / "report.html").read_text()
    assert "<h2>Ranks</h2>" in page and "TFLOP/s a GPU" in page


def test_the_results_are_the_same_bits_and_off_adds_nothing(runs: Any) -> None:
    off, calls_off = runs["off"]
    on, calls_on = runs["on"]
    assert not (off / "profile").exists()
    log = (off / "logs" / "rank0.log").read_text()
    assert "INFO step 1: " not in log and "<h2>Ranks" not in (off / "report.html").read_text()
    for mine, theirs in zip(read_metrics(on), read_metrics(off), strict=True):
        added = mine.keys() - theirs.keys()
        assert all(key.startswith(("speed/", "time/")) for key in added), added
        kept = {key: value for key, value in mine.items() if key not in added}
        assert strip_times(kept) == strip_times(theirs)
    weights = "hf/model.safetensors"
    assert (on / weights).read_bytes() == (off / weights).read_bytes()

    # One gather a step: rank 1 sends a size and the bytes.
    assert calls_on[0] - calls_off[0] == Counter(recv=4)
    assert calls_on[1] - calls_off[1] == Counter(send=4)
    assert not calls_off[0] - calls_on[0] and not calls_off[1] - calls_on[1]
