"""A real SIGTERM in a score or reference pass: every rank leaves it within a few micro-batches, and nothing changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.config.objective_options import PacsOptions
from pacs_megatron.contracts import Interrupted
from pacs_megatron.errors import ExitCode
from pacs_megatron.objectives import build_objective
from pacs_megatron.observability.metrics import read_metrics, reproducible_bytes
from pacs_megatron.training import signals
from pacs_megatron.training.signals import StopFlag
from tests.support.policy_cases import make_part, make_policy, random_step
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
}
BUDGET = 24
"""Tokens: a sample or two a micro-batch."""
SIGNAL_AT = 4
"""Micro-batch at which one rank, the last, gets the signal."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = {"vocab_size": 272, "num_hidden_layers": 4}
    return {family: make_family(tmp_path_factory.mktemp(family), family, **shape) for family in ("qwen3", "qwen3_moe")}


class Counter:
    """Micro-batches with real tokens that entered this rank's first chunk; `at_start` is called before each."""

    def __init__(self, policy: Any, padding_size: int, at_start: Callable[[int], None]) -> None:
        self.real = 0
        self._padding_size = padding_size
        self._at_start = at_start
        self._handle = policy.chunks[0].register_forward_pre_hook(self._see)

    def _see(self, _module: Any, inputs: tuple[Any, ...]) -> None:
        self._at_start(self.real)
        self.real += inputs[0].shape[1] > self._padding_size

    def close(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "scores") for layout in ("tp2", "pp2", "vpp2", "dp2", "ep2")),
        ("tp2", "reference"),
        ("pp2", "reference"),
        *(pytest.param(layout, "scores", marks=pytest.mark.full) for layout in ("cp2", "tp2-pp2")),
    ],
)
def test_every_rank_leaves_the_pass(folders: dict[str, Path], tmp_path: Path, layout: str, kind: str) -> None:
    world, options = LAYOUTS[layout]
    folder = folders["qwen3_moe" if layout == "ep2" else "qwen3"]
    facts, tokens = random_step(7, num_groups=10)

    def on_rank(rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, **options)
        objective = build_objective(PacsOptions(name="pacs", reference="frozen"), updates_per_step=1)
        part = make_part(facts, tokens, policy, BUDGET)
        policy.take_reference(reset_optimizer=False)
        for parameter in policy.chunks[0].parameters():  # the policy moved away from its reference
            parameter.data.mul_(1.01)
        part = replace(part, reference_logprobs=policy.logprobs(part, "reference"))
        expected = policy.scores(part, objective)
        before = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]
        stop = StopFlag(tmp_path)
        stop.install()
        asked = policy.scores(part, objective, stop.is_set)

        def send(index: int) -> None:
            if rank == world - 1 and index == SIGNAL_AT:
                os.kill(os.getpid(), signal.SIGTERM)

        counter = Counter(policy, 2 * policy.rank.layout.cp, send)
        with pytest.raises(Interrupted):
            if kind == "scores":
                policy.scores(part, objective, stop.is_set)
            else:
                policy.logprobs(part, "reference", stop.is_set)
        counter.close()
        after = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
        return {
            "real": counter.real,
            "planned": len(part.plan.by_dp_rank[policy.rank.dp]),
            "asked_is_unasked": torch.equal(asked, expected),
            "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "again_is_expected": torch.equal(policy.scores(part, objective), expected),
        }

    found = run_ranks(on_rank, world, timeout=100)
    lag = options.get("pp", 1) + 1
    for rank in found:
        assert rank["planned"] > SIGNAL_AT + lag + 3
        # The flag is in the sum of the next micro-batch, which is read `lag` later; a stage may be pp - 1 behind.
        assert rank["real"] <= SIGNAL_AT + 1 + lag + 1
        assert rank["asked_is_unasked"] and rank["unchanged"] and rank["again_is_expected"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [pytest.param("parallel.tp=2", marks=pytest.mark.full), "parallel.pp=2"])
def test_a_run_signalled_in_a_score_pass_goes_on_to_the_same_bits(tmp_path: Path, layout: str) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    overrides = ("parallel.tp=1", layout, "objective.reference=frozen", "batch.tokens_per_microbatch=140")

    def run(folder: Path, signal_in_step: int | None) -> list[tuple[int, bool]]:
        folder.mkdir(exist_ok=True)
        config = write_tiny_run(folder, model)

        def on_rank(rank: int, _world: int) -> tuple[int, bool]:
            from pacs_megatron.policy.engine import MegatronPolicy
            from pacs_megatron.training.main import run_rank

            real, left = MegatronPolicy.scores, []

            def scores(policy: Any, part: Any, objective: Any, should_stop: Any) -> Any:
                # Two updates a step: the first pass of step n finds version 2 (n - 1).
                if rank == 1 and signal_in_step is not None and policy.version == 2 * (signal_in_step - 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                try:
                    return real(policy, part, objective, should_stop)
                except Interrupted:
                    left.append(policy.version)
                    raise

            MegatronPolicy.scores = scores  # type: ignore[method-assign,assignment]  # this process ends with the test
            return int(run_rank(config, overrides)), bool(left)

        return run_ranks(on_rank, 2, timeout=110, init_process_group=False)

    assert run(tmp_path / "whole", None) == [(ExitCode.OK, False)] * 2
    assert run(tmp_path / "cut", 2) == [(ExitCode.PREEMPTED, True)] * 2
    folder = tmp_path / "cut" / "runs" / "tiny"
    assert len(read_metrics(folder)) == 1
    assert run(tmp_path / "cut", None) == [(ExitCode.OK, False)] * 2
    whole = tmp_path / "whole" / "runs" / "tiny"
    assert reproducible_bytes(folder) == reproducible_bytes(whole)
    assert (folder / "hf" / "model.safetensors").read_bytes() == (whole / "hf" / "model.safetensors").read_bytes()


def test_the_stop_file_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    stop = StopFlag(tmp_path)
    assert not stop.is_set()
    (tmp_path / "STOP").touch()
    assert not stop.is_set()
    now += signals.FILE_CHECK_S
    assert stop.is_set() and stop.reason == "file STOP"
    stop.clear_file()
    assert stop.is_set()
