"""A real SIGTERM in a score or reference pass: every rank leaves it within a few micro-batches, and
nothing changed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from pacs_megatron.contracts import Interrupted
from pacs_megatron.errors import ExitCode
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.training import signals
from pacs_megatron.training.signals import StopFlag
from tests.support.metrics import reproducible_bytes, strip_times
from tests.support.policies.policy_cases import make_part, make_policy, random_step
from tests.support.ranks import run_ranks
from tests.support.tiers import in_tiers
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
    return {
        family: make_family(tmp_path_factory.mktemp(family), family, **shape)
        for family in ("qwen3", "qwen3_moe")
    }


class RealMicroBatches:
    """Micro-batches with real tokens that entered this rank's first chunk; `at_start` is called
    before each.
    """

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
def test_every_rank_leaves_the_pass(
    folders: dict[str, Path], tmp_path: Path, layout: str, kind: str
) -> None:
    world, options = LAYOUTS[layout]
    folder = folders["qwen3_moe" if layout == "ep2" else "qwen3"]
    facts, tokens = random_step(7, num_groups=10)

    def on_rank(rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, **options)
        objective = build_objective(
            PacsOptions(name="pacs", reference="frozen"), updates_per_step=1
        )
        minibatch = make_part(facts, tokens, policy, BUDGET)
        policy.take_reference(reset_optimizer=False)
        for parameter in policy.chunks[0].parameters():  # the policy moved away from its reference
            parameter.data.mul_(1.01)
        minibatch = replace(minibatch, reference_logprobs=policy.logprobs(minibatch, "reference"))
        expected = policy.scores(minibatch, objective)
        before = []
        for chunk in policy.chunks:
            for p in chunk.parameters():
                before.append(p.detach().clone())
        stop = StopFlag(tmp_path)
        stop.install()
        asked = policy.scores(minibatch, objective, stop.is_set)

        def send(index: int) -> None:
            if rank == world - 1 and index == SIGNAL_AT:
                os.kill(os.getpid(), signal.SIGTERM)

        counter = RealMicroBatches(policy, 2 * policy.rank.layout.cp, send)
        with pytest.raises(Interrupted):
            if kind == "scores":
                policy.scores(minibatch, objective, stop.is_set)
            else:
                policy.logprobs(minibatch, "reference", stop.is_set)
        counter.close()
        parameters = itertools.chain.from_iterable(chunk.parameters() for chunk in policy.chunks)
        after = [parameter.detach() for parameter in parameters]
        return {
            "real": counter.real,
            "planned": len(minibatch.plan.by_dp_rank[policy.rank.dp]),
            "asked_is_unasked": torch.equal(asked, expected),
            "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "again_is_expected": torch.equal(policy.scores(minibatch, objective), expected),
        }

    found = run_ranks(on_rank, world)
    lag = options.get("pp", 1) + 1
    for rank in found:
        assert rank["planned"] > SIGNAL_AT + lag + 3
        # The flag is in the sum of the next micro-batch, which is read `lag` later; a stage may be
        # pp - 1 behind.
        assert rank["real"] <= SIGNAL_AT + 1 + lag + 1
        assert rank["asked_is_unasked"] and rank["unchanged"] and rank["again_is_expected"]


UPDATES = 3
"""A step."""
PACS_FROZEN = ("objective.reference=frozen", "objective.importance_cap=2.0", "batch.groups=apart")
GRPO_KL = ("objective.name=grpo", "objective.kl_coef=0.1")
LAYOUT_KEYS = {
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.tp=1", "parallel.pp=2"),
    "dp": ("parallel.tp=1", "run.nproc=2"),
}
BATCH = (
    f"batch.updates_per_step={UPDATES}",
    "batch.tokens_per_microbatch=140",
    "batch.prompts_per_step=6",
)


@dataclass(frozen=True)
class Signal:
    """A SIGTERM in step 2 at the first `phase` after `updates` of its updates (`update`: after its
    score pass): to rank 1.

    For `decode`: to each rank, in its chunk number `chunk[rank]`.
    """

    phase: str
    updates: int
    chunk: tuple[int, int] = (0, 0)

    def is_due(self, rank: int, phase: str, version: int, seen: int) -> bool:
        """`version` counts the updates of the weights.

        `seen` the calls of `phase` at this version.
        """
        if (phase, version) != (self.phase, UPDATES + self.updates):
            return False
        return seen == self.chunk[rank] if phase == "decode" else (rank, seen) == (1, 1)


def run_signalled(
    folder: Path, model: Path, overrides: tuple[str, ...], signal_at: Signal | None
) -> list[int]:
    """Trains in `folder` on two ranks; returns their exit codes."""
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)

    def on_rank(rank: int, _world: int) -> int:
        from pacs_megatron.embedded.engine import EmbeddedEngine
        from pacs_megatron.policy.engine import MegatronPolicy
        from pacs_megatron.training.main import run_rank

        seen: Counter[tuple[str, int]] = Counter()

        def signalling(phase: str, method: Any) -> Any:
            def call(it: Any, *args: Any) -> Any:
                seen[phase, it.version] += 1
                if signal_at is not None and signal_at.is_due(
                    rank, phase, it.version, seen[phase, it.version]
                ):
                    os.kill(os.getpid(), signal.SIGTERM)
                return method(it, *args)

            return call

        # This process ends with the test.
        for phase, method in (
            ("scores", "_score_pass"),
            ("update", "_forward_backward"),
            ("logprobs", "logprobs"),
        ):
            setattr(MegatronPolicy, method, signalling(phase, getattr(MegatronPolicy, method)))
        EmbeddedEngine._decode = signalling("decode", EmbeddedEngine._decode)  # type: ignore[method-assign]
        return int(run_rank(config, overrides))

    return run_ranks(on_rank, 2, init_process_group=False)


@dataclass(frozen=True)
class Stops:
    """Attempts of a run that a signal stops, and the newest checkpoint that each must leave."""

    layout: str
    objective: tuple[str, ...]
    attempts: tuple[tuple[Signal, str], ...]


CASES = {
    "in the first update, then in the last score pass": Stops(
        "tp",
        PACS_FROZEN,
        (
            (Signal("update", 0), "step_000001_plus_01"),
            (Signal("scores", 2), "step_000001_plus_02"),
        ),
    ),
    # Nothing has changed yet: the step is repeated.
    "in the first score pass": Stops("tp", PACS_FROZEN, ((Signal("scores", 0), "step_000001"),)),
    "in the first score pass of a pipeline": Stops(
        "pp", PACS_FROZEN, ((Signal("scores", 0), "step_000001"),)
    ),
    "in a log-prob pass": Stops("tp", GRPO_KL, ((Signal("logprobs", 0), "step_000001"),)),
    # An update is completed first.
    "in the second score pass of a pipeline": Stops(
        "pp", PACS_FROZEN, ((Signal("scores", 1), "step_000001_plus_01"),)
    ),
    "in the first update of a pipeline": Stops(
        "pp", GRPO_KL, ((Signal("update", 0), "step_000001_plus_01"),)
    ),
    "in the second update of replicas": Stops(
        "dp", GRPO_KL, ((Signal("update", 1), "step_000001_plus_02"),)
    ),
    "with steps sampled ahead": Stops(
        "tp",
        (*PACS_FROZEN, "rollout.max_staleness=1"),
        ((Signal("update", 0), "step_000001_plus_01"),),
    ),
    # With the last update the step is complete.
    "in the last update": Stops("dp", PACS_FROZEN, ((Signal("update", 2), "step_000002"),)),
}


@pytest.mark.parametrize("case", in_tiers(CASES, every=2))
def test_a_run_stopped_inside_a_step_resumes_to_the_same_bits(tmp_path: Path, case: str) -> None:
    stops = CASES[case]
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    overrides = (*LAYOUT_KEYS[stops.layout], *stops.objective, *BATCH, "run.steps=3")
    whole = tmp_path / "whole" / "runs" / "tiny"
    cut = tmp_path / "cut" / "runs" / "tiny"

    assert run_signalled(tmp_path / "whole", model, overrides, None) == [ExitCode.OK] * 2
    for signal_at, checkpoint in stops.attempts:
        assert (
            run_signalled(tmp_path / "cut", model, overrides, signal_at) == [ExitCode.PREEMPTED] * 2
        )
        newest = latest_checkpoint(cut)
        assert newest is not None and newest.name == checkpoint
        steps_complete = int(checkpoint.split("_")[1])
        assert read_metrics(cut)[-1]["step"] == steps_complete
    assert run_signalled(tmp_path / "cut", model, overrides, None) == [ExitCode.OK] * 2

    assert reproducible_bytes(cut) == reproducible_bytes(whole)
    assert (cut / "hf" / "model.safetensors").read_bytes() == (
        whole / "hf" / "model.safetensors"
    ).read_bytes()
    # A checkpoint inside a step exists only while it is the newest.
    assert [path.name for path in sorted((cut / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000003",
    ]


@pytest.mark.full
def test_a_signal_in_a_chunk_of_the_embedded_engine_keeps_the_whole_ones(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    overrides = (
        *LAYOUT_KEYS["tp"],
        f"batch.updates_per_step={UPDATES}",
        "batch.prompts_per_step=6",
        "rollout.batch_sequences=4",
    )
    assert run_signalled(tmp_path / "whole", model, overrides, None) == [ExitCode.OK] * 2
    # Six chunks, the even ones rank 0's: it leaves number 2 and never begins 4, rank 1 leaves
    # number 5.
    codes = run_signalled(tmp_path / "cut", model, overrides, Signal("decode", 0, chunk=(2, 3)))
    assert codes == [ExitCode.PREEMPTED] * 2
    folder = tmp_path / "cut" / "runs" / "tiny"
    newest = latest_checkpoint(folder)
    assert newest is not None and newest.name == "step_000001"
    [saved] = json.loads((newest / "buffer.json").read_text())["steps"]
    assert (saved["step"], saved["samples"]) == (2, 12)
    assert run_signalled(tmp_path / "cut", model, overrides, None) == [ExitCode.OK] * 2
    whole = tmp_path / "whole" / "runs" / "tiny"
    assert reproducible_bytes(folder) == reproducible_bytes(whole)
    assert (folder / "hf" / "model.safetensors").read_bytes() == (
        whole / "hf" / "model.safetensors"
    ).read_bytes()


@pytest.mark.full
def test_a_step_goes_on_in_another_layout(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    same = (*PACS_FROZEN, *BATCH, "run.steps=2")
    tensors = (*same, *LAYOUT_KEYS["tp"])
    pipeline = (*same, *LAYOUT_KEYS["pp"])
    assert run_signalled(tmp_path / "whole", model, tensors, None) == [ExitCode.OK] * 2
    assert (
        run_signalled(tmp_path / "cut", model, tensors, Signal("update", 0))
        == [ExitCode.PREEMPTED] * 2
    )
    assert run_signalled(tmp_path / "cut", model, pipeline, None) == [ExitCode.OK] * 2
    whole, cut = (
        load_file(tmp_path / name / "runs" / "tiny" / "hf" / "model.safetensors")
        for name in ("whole", "cut")
    )
    start = load_file(model / "model.safetensors")
    for name, expected in whole.items():
        moved = (expected - start[name]).abs().max()
        torch.testing.assert_close(
            cut[name], expected, rtol=0, atol=max(1e-3 * float(moved), 1e-7), msg=name
        )
    rows = [read_metrics(tmp_path / name / "runs" / "tiny")[-1] for name in ("whole", "cut")]
    assert (
        rows[0].pop("batch/pipeline_bubble") == 0 < rows[1]["batch/pipeline_bubble"]
    )  # the layouts differ in it
    for key, value in strip_times(rows[0]).items():
        assert rows[1][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_the_stop_file_is_looked_at_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    stop = StopFlag(tmp_path)
    assert not stop.is_set()
    (tmp_path / "STOP").touch()
    assert not stop.is_set()
    now += signals.FILE_CHECK_S
    assert stop.is_set() and stop.reason == "file STOP"
    (tmp_path / "STOP").unlink(missing_ok=True)
    assert stop.is_set()
