"""`rollout.max_staleness` with the embedded engine: which weights sample which step, and that a
stop loses nothing.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.config.rollout_options import EmbeddedRollout
from pacs_megatron.contracts import SampleFacts, TokenBuffers
from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.support.metrics import reproducible_bytes
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import OPTIMIZER
from tests.support.ranks import run_ranks
from tests.support.rollout import fill
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

STEPS = 5
GROUPS = 4
SIBLINGS = 4
# Counts its calls; number {stop_at} requests a stop and returns no verdict.
REWARD = """import time
from pathlib import Path

CALLS = Path(__file__).with_name("calls")


def reward(prompt, response):
    with CALLS.open("a") as file:
        file.write("x")
    if CALLS.stat().st_size == {stop_at}:
        Path({stop_file!r}).touch()
        time.sleep(3600)
    return float(sum(response.encode()) % 2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=262)


def write(folder: Path, model: Path, stop_at: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)
    text = REWARD.format(stop_at=stop_at, stop_file=str(folder / "runs" / "tiny" / "STOP"))
    (folder / "reward.py").write_text(text)
    return config


def start(config: Path, world: int, *overrides: str) -> ExitCode:
    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        return int(run_rank(config, (f"run.steps={STEPS}", *overrides)))

    codes = run_ranks(on_rank, world, init_process_group=False)
    assert len(set(codes)) == 1
    return ExitCode(codes[0])


@pytest.mark.parametrize("max_staleness", [pytest.param(1, marks=pytest.mark.full), 2])
def test_max_staleness_determines_the_weights_that_sample_each_step(
    tmp_path: Path, model: Path, max_staleness: int
) -> None:
    """Against a loop written by hand: plain transformers trains, and an engine that is filled from
    the run's own checkpoint of step max(0, t - 1 - max_staleness) samples step t.
    """
    config = write(tmp_path, model)
    overrides: tuple[str, ...] = (
        f"rollout.max_staleness={max_staleness}",
        "batch.updates_per_step=1",
        "checkpoint.keep_last=9",
    )
    overrides += (f"optimizer.lr={OPTIMIZER['lr']}", f"optimizer.adam_eps={OPTIMIZER['adam_eps']}")
    assert start(config, 2, "parallel.tp=2", *overrides) is ExitCode.OK
    run_dir = tmp_path / "runs" / "tiny"
    rows = read_metrics(run_dir)
    sampler = Sampler(config, model)
    trainer = PlainTrainer(model, clip=0.0)  # PACS has no clipping by default
    for step in range(1, STEPS + 1):
        origin = max(0, step - 1 - max_staleness)
        facts, tokens, responses = sampler.sample(step, run_dir, origin)
        logged = {sample["id"]: sample for sample in read_rollouts(rollout_path(run_dir, step))}
        assert {sample_id: sample["response"] for sample_id, sample in logged.items()} == responses
        spans = itertools.chain.from_iterable(sample["spans"] for sample in logged.values())
        assert {span["version"] for span in spans} == {origin}
        starts = trainer.logprobs(facts, tokens)
        loss, norm = trainer.update(facts, tokens, pacs_loss(starts, facts))
        row = rows[step - 1]
        assert row["staleness/mean"] == row["staleness/max"] == step - 1 - origin
        assert (
            row["staleness/multi_version_frac"] == 0 and row["admission/dropped_stale_groups"] == 0
        )
        assert row["objective/loss"] == pytest.approx(loss, rel=1e-5)
        assert row["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-4)
    from safetensors.numpy import load_file

    theirs = trainer.weights()
    for name, values in load_file(run_dir / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(values, theirs[name], atol=2e-5, rtol=0, err_msg=name)


class Sampler:
    """The run's prompts in their order, and an engine of one process for them."""

    def __init__(self, config: Path, model: Path) -> None:
        from pacs_megatron.config import load_config
        from pacs_megatron.data import PromptOrder, load_prompts, load_tokenizer
        from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary

        self.model = model
        self.config = load_config(config).config
        self.tokenizer = load_tokenizer(str(model))
        self.prompts = load_prompts(
            self.config.data.train, self.config.data, self.tokenizer
        ).prompts
        self.order = PromptOrder(len(self.prompts), self.config.run.seed, True)
        vocabulary = Vocabulary.from_tokenizer(self.tokenizer, str(model))
        assert isinstance(self.config.rollout, EmbeddedRollout)
        self.sampling = self.config.rollout.sampling
        self.engine = EmbeddedEngine(model, self.config.rollout, vocabulary)

    def sample(
        self, step: int, run_dir: Path, origin: int
    ) -> tuple[SampleFacts, TokenBuffers, dict[str, str]]:
        """(facts, tokens, response text by sample id) of `step` from the weights after `origin`."""
        from pacs_megatron.batching.tables import tabulate
        from pacs_megatron.checkpoint.megatron_weights import open_weights
        from pacs_megatron.contracts import Group, Stop
        from pacs_megatron.rollout.judging import label_sample
        from pacs_megatron.rollout.requests import sample_requests

        weights = open_weights(
            run_dir / "checkpoints" / f"step_{origin:06d}" if origin else self.model
        )
        fill(self.engine, ((name, weights.get(name)) for name in weights.names), version=origin)
        prompts = [self.prompts[k] for k in self.order.take(GROUPS)]
        requests = sample_requests(
            prompts, SIBLINGS, self.sampling, run_seed=5, step=step, purpose="train"
        )
        texts = {}
        groups = []
        samples = list(self.engine.stream(requests))
        for at in range(0, len(samples), SIBLINGS):
            judged = []
            for sample in samples[at : at + SIBLINGS]:
                text = self.tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
                texts[sample.id] = text
                label = int(sum(text.encode()) % 2 == 1 and sample.stop is not Stop.LENGTH)
                judged.append(label_sample(sample, float(label), label))
            groups.append(Group(prompt_id=judged[0].prompt_id, samples=tuple(judged)))
        facts, tokens = tabulate(groups)
        return facts, tokens.joined(), texts


@pytest.mark.full
def test_a_stop_keeps_the_samples_and_a_resumed_run_has_the_same_bits(
    tmp_path: Path, model: Path
) -> None:
    overrides = (
        "parallel.tp=1",
        "rollout.max_staleness=2",
        "checkpoint.every=2",
        "reward.timeout_s=3600",
    )
    assert start(write(tmp_path / "whole", model), 1, *overrides) is ExitCode.OK
    whole = tmp_path / "whole" / "runs" / "tiny"
    run_dir = tmp_path / "cut" / "runs" / "tiny"
    calls = tmp_path / "cut" / "calls"
    # Steps 1 to 3 are sampled first, 16 responses each: number 40 is one of the third.
    config = write(tmp_path / "cut", model, stop_at=40)
    assert start(config, 1, *overrides) is ExitCode.PREEMPTED
    [folder] = (run_dir / "checkpoints").iterdir()
    buffer = json.loads((folder / "buffer.json").read_text())
    trained = int(folder.name.split("_")[1])  # the stop may fall into a step: step_000001_plus_01
    assert trained < 3
    assert {(saved["step"], saved["samples"]) for saved in buffer["steps"]} >= {(3, 16)}
    assert all(saved["step"] > trained and saved["samples"] in (0, 16) for saved in buffer["steps"])
    assert "buffer.safetensors" in (folder / "manifest.json").read_text()
    assert start(config, 1, *overrides) is ExitCode.OK
    assert reproducible_bytes(run_dir) == reproducible_bytes(whole)
    weights = Path("hf") / "model.safetensors"
    assert (run_dir / weights).read_bytes() == (whole / weights).read_bytes()
    for path in sorted((whole / "rollouts").iterdir()):
        assert (run_dir / "rollouts" / path.name).read_bytes() == path.read_bytes()
    # Only the sample that the one worker had when the run stopped is judged twice.
    assert calls.stat().st_size == GROUPS * SIBLINGS * STEPS + 1
    assert not (run_dir / "checkpoints" / f"step_{STEPS:06d}" / "buffer.json").exists()


def test_a_lower_max_staleness_on_resume_drops_the_stale_samples(
    tmp_path: Path, model: Path
) -> None:
    """Steps that were sampled ahead with the earlier limit: their groups are dropped and counted,
    and the run goes on.
    """
    overrides = (
        "parallel.tp=1",
        "batch.updates_per_step=1",
        "checkpoint.every=9",
        "reward.timeout_s=3600",
    )
    config = write(tmp_path, model, stop_at=40)
    assert start(config, 1, *overrides, "rollout.max_staleness=2") is ExitCode.PREEMPTED
    run_dir = tmp_path / "runs" / "tiny"
    [folder] = (run_dir / "checkpoints").iterdir()
    trained = int(folder.name.split("_")[1])
    saved = json.loads((folder / "buffer.json").read_text())
    ahead = [step["step"] for step in saved["steps"] if step["samples"]]
    assert ahead[-1] > trained + 1
    assert start(config, 1, *overrides, "rollout.max_staleness=0") is ExitCode.OK
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows[trained:]:
        dropped = row.get("admission/dropped_stale_groups", 0)
        assert dropped in (0, GROUPS) and row["admission/num_groups"] == GROUPS - dropped
    # Weights that no update changed since the sampling count as the newest, so a later step may be
    # admitted again.
    assert rows[trained]["admission/num_groups"] == 0 and rows[-1]["admission/num_groups"] == GROUPS
