"""Runs one rank of a certified run: the real policy, training step, save, resume and export, on
recorded samples.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint
from pacs_megatron.contracts import Interrupted, MiniBatch, SampleFacts, TokenBuffers, UpdateReport
from pacs_megatron.convert.convert import Options, hf_to_megatron, megatron_to_hf
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.observability.spans import Timer
from pacs_megatron.parallel import groups
from pacs_megatron.policy.critic import Critic
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.policy.microbatch import MicroBatch, UpdateLoss
from pacs_megatron.rollout.collect import DriverState, StepSamples
from pacs_megatron.training.context import RunContext, build_critic, build_policy, join
from pacs_megatron.training.export import export_hf
from pacs_megatron.training.progress import RunProgress
from pacs_megatron.training.saver import Saver
from pacs_megatron.training.saving import resume, save
from pacs_megatron.training.signals import StopFlag
from pacs_megatron.training.step import train_step
from pacs_megatron.workbench.certify.shrink import Case


class _RecordedLoss(UpdateLoss):
    """The loss of an update.

    `found`: row -> (log-probs, derivatives of the loss by them), both [response].
    """

    found: dict[int, tuple[np.ndarray, np.ndarray]]

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, report = super().__call__(batch, logprobs, entropy)
        slopes = torch.zeros_like(logprobs)
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, logprobs, retain_graph=True)[0]
        ends = np.cumsum(batch.response_lens)[:-1]
        parts = [np.split(batch.gather(v.detach()).cpu().numpy(), ends) for v in (logprobs, slopes)]
        self.found.update({int(row): pair for row, *pair in zip(batch.rows, *parts, strict=False)})
        return loss, report


class _RecordedPolicy(MegatronPolicy):
    """Writes each update to `folder`: a rank's log-probs and report, on rank 0 the weights after
    it.
    """

    loss_function = _RecordedLoss
    folder: Path
    number = 0
    """updates so far, of both attempts"""
    stop_after: int
    stop: StopFlag

    def update(self, minibatch: MiniBatch, *args: Any) -> UpdateReport:
        _RecordedLoss.found = {}
        report = super().update(minibatch, *args)
        self.number += 1
        facts = minibatch.facts
        found = _RecordedLoss.found
        sources: dict[str, Mapping[int, np.ndarray] | None] = {
            "start": minibatch.step_start_logprobs,
            "reference": minibatch.reference_logprobs,
            "update": {row: pair[0] for row, pair in found.items()},
            "coefficient": {row: pair[1] for row, pair in found.items()},
        }
        arrays: dict[str, Any] = {
            f"{name} {facts.ids[row]}": value
            for name, values in sources.items()
            for row, value in (values or {}).items()
        }
        np.savez(self.folder / f"update_{self.number}.{self.rank.rank}.npz", **arrays)
        numbers = {name: getattr(report, name) for name in ("grad_norm", "is_clipped", "lr")} | {
            "version": self.version,
            "metrics": {
                k: (v, report.denominators.get(k, facts.num_samples))
                for k, v in report.metrics.items()
            },
        }
        (self.folder / f"update_{self.number}.{self.rank.rank}.json").write_text(
            json.dumps(numbers)
        )
        _write_weights(self, self.folder / f"weights_{self.number}")
        if self.number == self.stop_after:
            self.stop.reason = "certify"
        return report

    def write_moments(self) -> None:
        """Adam's moments under Hugging Face names, through the export: they replace the weights.

        Collective.
        """
        for name in ("exp_avg", "exp_avg_sq"):
            for part in self.optimizer.optimizers():
                for group in part.optimizer.param_groups if part.optimizer is not None else ():
                    for parameter in group["params"]:
                        parameter.data.copy_(part.optimizer.state[parameter][name])
                if hasattr(part, "_copy_main_params_to_model_params"):
                    part._copy_main_params_to_model_params()
            for chunk in self.chunks:
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync(force_sync=True)
            _write_weights(self, self.folder / name)


class _RecordedCritic(Critic):
    """Writes the weights after each update."""

    policy: _RecordedPolicy

    def update(self, *args: Any) -> UpdateReport:
        report = super().update(*args)
        _write_weights(self, self.policy.folder / f"critic_{self.policy.number}")
        return report


def _write_weights(model: MegatronPolicy, file: Path) -> None:
    """Every tensor under its Hugging Face name. Collective."""
    tensors: dict[str, Any] = {
        key: tensor.float().cpu().numpy().copy() for key, tensor in model.export_weights()
    }
    digest = hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors.values())).hexdigest()
    file.with_name(f"{file.name}.{model.rank.rank}.digest").write_text(digest)
    if model.rank.rank == 0:
        np.savez(f"{file}.npz", **tensors)


class _Recorded:
    """Replaces `rollout.collect.Rollouts` by the samples of the case."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self._ids = json.loads((folder / "case.json").read_text())["ids"]
        self._data = dict(np.load(folder / "steps.npz"))
        self._is_first = is_first

    def collect(self, step: int) -> StepSamples:
        names = ("groups", "labels", "rewards", "prompt_lens", "response_lens", "truncated")
        facts = SampleFacts(
            ids=tuple(self._ids[str(step)]),
            **{name: self._data[f"{step}.{name}"] for name in names},
        )
        tokens = TokenBuffers(
            index=np.arange(facts.num_samples),
            token_ids=self._data[f"{step}.tokens"],
            offsets=np.cumsum([0, *facts.lens]),
            sampler_logprobs=self._data[f"{step}.sampler"],
            response_offsets=np.cumsum([0, *facts.response_lens]),
            routes=self._data.get(f"{step}.routes"),
        )
        return StepSamples(facts=facts, tokens=tokens if self._is_first else None, metrics={})

    def state(self, trained: int, *, final: bool, at_boundary: bool) -> DriverState:
        return DriverState(order={}, buffer=None)

    def load_state(self, saved: DriverState, trained: int) -> None:
        """Does nothing, because no rollout is in progress."""


def attempt(case: Case, folder: Path, number: int) -> None:
    """Attempt 0 trains `case.stop_after` updates and saves; attempt 1 resumes in the other layout,
    ends the run, exports.

    Collective over the ranks of the attempt's layout. Its files are in `folder/product`.
    """
    config = case.config.model_copy(update={"parallel": case.parallel(number)})
    channel = join(config)
    rank = channel.rank
    clip_grad = json.loads((folder / "case.json").read_text())["clip_grad"]
    changes: dict[str, Any] = {"clip_grad": clip_grad}
    if isinstance(config.objective, PpoOptions):
        changes["critic"] = config.objective.critic.model_copy(
            update={"path": str(folder / "critic")}
        )
    config = config.model_copy(update={"objective": config.objective.model_copy(update=changes)})
    place = (folder / "run", folder / "model", rank)
    policy = build_policy(config, *place, _RecordedPolicy)
    stop = StopFlag(folder / "run")
    assert isinstance(policy, _RecordedPolicy)
    policy.folder = folder / "product"
    policy.stop = stop
    policy.stop_after = case.stop_after
    run = RunContext(
        config=config,
        run_dir=folder / "run",
        model_dir=folder / "model",
        rank=rank,
        channel=channel,
        policy=policy,
        critic=build_critic(config, *place, _RecordedCritic),
        objective=build_objective(config.objective, updates_per_step=config.batch.updates_per_step),
        rollouts=_Recorded(folder, is_first=rank.rank == 0),  # type: ignore[arg-type]
        driver=None,
        engine=None,
        server_sync=None,
        timer=Timer(),
        saver=Saver(config, rank),
        stop=stop,
    )
    if isinstance(run.critic, _RecordedCritic):
        run.critic.policy = policy
    progress = resume(run) or RunProgress(row={})
    policy.number = case.stop_after if number else 0
    _write_weights(policy, policy.folder / f"start_{number}")
    rows: dict[int, dict[str, float | None]] = {}
    with suppress(Interrupted):
        while progress.step < (
            case.steps if number or config.batch.updates_per_step > 1 else case.stop_after
        ):
            progress.complete_step(train_step(run, progress))
            rows[progress.step] = progress.row or {}
    save(run, progress, final=True)
    if rank.rank == 0:
        (policy.folder / f"rows_{number}.json").write_text(json.dumps(rows))
    if number:
        export_hf(run, policy, policy.folder / "hf")
        policy.write_moments()
    dist.barrier(
        group=rank.control
    )  # an early exit of a rank would reset the connections of other ranks
    groups.shutdown(keep_world=True)


def convert(folder: Path) -> None:
    """Converts the last checkpoint to Hugging Face and back; writes the tensors of both in the
    ranks' format.
    """
    product = folder / "product"
    megatron_to_hf(folder / "run", Options(out=product / "to_hf"), step=None)
    hf_to_megatron(str(product / "to_hf"), Options(out=product / "to_megatron"))
    critic = find_checkpoint(folder / "run", None) / "critic"
    sources: dict[str, HfFolder | MegatronWeights] = {
        "export": HfFolder(product / "hf"),
        "convert to-hf": HfFolder(product / "to_hf"),
        "convert to-megatron": MegatronWeights(product / "to_megatron"),
    }
    if critic.is_dir():
        megatron_to_hf(critic, Options(out=product / "critic_to_hf"), step=None)
        sources["critic to-hf"] = HfFolder(product / "critic_to_hf")
    for name, source in sources.items():
        tensors: dict[str, Any] = {key: source.get(key).float().numpy() for key in source.names}
        np.savez(product / f"{name}.npz", **tensors)
