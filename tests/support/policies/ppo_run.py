"""A PPO run on recorded samples: the real training step, save, resume and export in any layout.

Call it inside `run_ranks`.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import SampleFacts, TokenBuffers
from tests.support.policies.policy_cases import OPTIMIZER
from tests.support.tiny_families import make_family

Step = tuple[SampleFacts, TokenBuffers]


def make_models(folder: Path, family: str = "qwen3") -> tuple[Path, Path]:
    """(policy, critic), random; the critic as transformers writes it."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    policy = make_family(folder / "policy", family, vocab_size=272, num_hidden_layers=4)
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.12)
    critic.save_pretrained(folder / "critic")
    return policy, folder / "critic"


def config_of(
    folder: Path,
    models: tuple[Path, Path | None],
    objective: dict[str, Any],
    parallel: dict[str, Any],
    **batch: Any,
) -> RunConfig:
    """Two steps of the recorded samples."""
    policy, critic = models
    return RunConfig.model_validate(
        {
            "run": {"name": "ppo", "steps": 2, "dir": str(folder)},
            "model": {"path": str(policy)},
            "precision": {"dtype": "fp32"},
            "parallel": parallel,
            "objective": {"clip_grad": 1.0}
            | objective
            | {"critic": {"lr": 2e-3, "path": critic and str(critic)}},
            "batch": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "tokens_per_microbatch": 40,
                "updates_per_step": 2,
            }
            | batch,
            "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 16}},
            "reward": {"name": "math"},
            "data": {"train": {"path": "x.jsonl", "preset": "gsm8k"}, "max_prompt_tokens": 16},
            "optimizer": OPTIMIZER,
        }
    )


class Recorded:
    """The samples of the case in the place of `rollout.collect.Rollouts`."""

    def __init__(self, steps: list[Step], *, is_first: bool) -> None:
        self._steps = steps
        self._is_first = is_first

    def collect(self, step: int) -> Any:
        from pacs_megatron.rollout.collect import StepSamples

        facts, tokens = self._steps[step - 1]
        return StepSamples(facts=facts, tokens=tokens if self._is_first else None, metrics={})

    def state(self, trained: int, *, final: bool, at_boundary: bool) -> Any:
        from pacs_megatron.rollout.collect import DriverState

        return DriverState(order={}, buffer=None)

    def load_state(self, saved: Any, trained: int) -> None:
        """Nothing is in progress."""


def attempt(
    config: RunConfig,
    run_dir: Path,
    steps: list[Step],
    *,
    stop_after: int | None = None,
    export: Path | None = None,
) -> dict[str, Any]:
    """Trains from the newest checkpoint to the end, or to `stop_after` updates of this attempt, and
    saves.

    Returns by model its (loss, norm) of each update and its weights, and the rows of metrics.
    Collective.
    """
    from pacs_megatron.contracts import Interrupted
    from pacs_megatron.objectives.registry import build_objective
    from pacs_megatron.observability.spans import Timer
    from pacs_megatron.training import saving
    from pacs_megatron.training.context import RunContext, build_critic, build_policy, join
    from pacs_megatron.training.export import export_hf
    from pacs_megatron.training.progress import RunProgress
    from pacs_megatron.training.saver import Saver
    from pacs_megatron.training.signals import StopFlag
    from pacs_megatron.training.step import train_step

    channel = join(config)
    rank = channel.rank
    model_dir = Path(config.model.path)
    run = RunContext(
        config=config,
        run_dir=run_dir,
        model_dir=model_dir,
        rank=rank,
        channel=channel,
        policy=build_policy(config, run_dir, model_dir, rank),
        critic=build_critic(config, run_dir, model_dir, rank),
        objective=build_objective(config.objective, updates_per_step=config.batch.num_updates),
        rollouts=Recorded(steps, is_first=rank.rank == 0),  # type: ignore[arg-type]
        driver=None,
        engine=None,
        server_sync=None,
        timer=Timer(),
        stop=StopFlag(run_dir),
        saver=Saver(config, rank),
    )
    names = ("policy", "critic")[: len(run.models)]
    numbers: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    done = 0

    def recorded(name: str, model: Any) -> Any:
        update = model.update
        key = "objective/loss" if name == "policy" else "critic/loss"

        def wrapped(*args: Any) -> Any:
            nonlocal done
            report = update(*args)
            numbers[name].append((report.metrics[key], report.grad_norm))
            done += name == names[-1]
            if done == stop_after:
                run.stop.reason = "test"
            return report

        return wrapped

    for name, model in zip(names, run.models, strict=True):
        model.update = recorded(name, model)  # type: ignore[method-assign]
    progress = saving.resume(run) or RunProgress(row={})
    rows = []
    with suppress(Interrupted):
        while progress.step < config.run.steps:
            progress.complete_step(train_step(run, progress))
            rows.append(progress.row)
    saving.save(run, progress, final=True)
    if export is not None:
        for name, model in zip(names, run.models, strict=True):
            export_hf(run, model, export / name)
    weights = {
        name: {key: tensor.float().numpy().copy() for key, tensor in model.export_weights()}
        for name, model in zip(names, run.models, strict=True)
    }
    return {"numbers": numbers, "weights": weights, "rows": rows}


def split(facts: SampleFacts, parts: int) -> list[list[int]]:
    """Rows of each mini-batch: equal shares of the groups."""
    bounds = [round(facts.num_groups * k / parts) for k in range(parts + 1)]
    return [
        np.flatnonzero((facts.groups >= a) & (facts.groups < b)).tolist()
        for a, b in itertools.pairwise(bounds)
    ]
