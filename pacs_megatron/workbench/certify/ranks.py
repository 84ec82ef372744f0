"""Runs one rank of a certified run: the real policy, training step, save, resume and export, on
recorded samples.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from pacs_megatron.batching.tables import single_turn_writers
from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint
from pacs_megatron.config.schema import LoraOptions, RunConfig
from pacs_megatron.contracts import (
    Interrupted,
    MiniBatch,
    SampleFacts,
    TokenBuffers,
    UpdateReport,
    Writer,
)
from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron, megatron_to_hf
from pacs_megatron.convert.convert import export_adapters as export_of_checkpoint
from pacs_megatron.models.lora import ADAPTER_WEIGHTS
from pacs_megatron.objectives.distill import DistillOptions
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.shared.base import CommonOptions
from pacs_megatron.observability.spans import Timer
from pacs_megatron.parallel import groups
from pacs_megatron.policy.critic import Critic
from pacs_megatron.policy.engine import MegatronPolicy, on_host
from pacs_megatron.policy.microbatch import MicroBatch, UpdateLoss
from pacs_megatron.rollout.collect import DriverState, StepSamples
from pacs_megatron.training import saving
from pacs_megatron.training.context import (
    RunContext,
    build_critic,
    build_policy,
    digest_base,
    join,
)
from pacs_megatron.training.export import export_adapters, export_hf
from pacs_megatron.training.progress import RunProgress
from pacs_megatron.training.saver import Saver
from pacs_megatron.training.signals import StopFlag
from pacs_megatron.training.step import train_step
from pacs_megatron.workbench.certify.shrink import Case


class _RecordedLoss(UpdateLoss):
    """The loss of an update, which keeps log-probs and derivatives of each sample."""

    recorded: dict[int, tuple[np.ndarray, np.ndarray]]
    """row -> (log-probs, derivatives of the loss by them), [response] each, of the whole class"""

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, report = super().__call__(batch, logprobs, entropy)
        derivatives = torch.zeros_like(logprobs)
        if loss.requires_grad:
            (derivatives,) = torch.autograd.grad(loss, logprobs, retain_graph=True)

        logprobs_by_sample = _by_sample(batch, logprobs)
        derivatives_by_sample = _by_sample(batch, derivatives)
        for place, row in enumerate(batch.rows):
            self.recorded[int(row)] = (logprobs_by_sample[place], derivatives_by_sample[place])
        return loss, report


def _by_sample(batch: MicroBatch, values: Tensor) -> list[np.ndarray]:
    """One array [response] for each sample of the micro-batch, of this rank's `values` [local].

    Collective over the context-parallel ranks.
    """
    of_all_ranks = batch.gather(values.detach()).cpu().numpy()
    return np.split(of_all_ranks, np.cumsum(batch.response_lens)[:-1])


class _RecordedPolicy(MegatronPolicy):
    """Writes each update to `folder`: a rank's log-probs and report, on rank 0 the weights after
    it.
    """

    loss_function = _RecordedLoss
    folder: Path
    number = 0
    """updates so far, of both attempts"""
    stop_after: int
    """number of updates after which `stop` is set"""
    stop: StopFlag

    def update(self, minibatch: MiniBatch, *args: Any) -> UpdateReport:
        _RecordedLoss.recorded = {}
        report = super().update(minibatch, *args)
        self.number += 1

        file = self.folder / f"update_{self.number}.{self.rank.rank}"
        np.savez(f"{file}.npz", **_sample_arrays(minibatch, _RecordedLoss.recorded))
        content = _report_content(report, self.version, minibatch.facts.num_samples)
        Path(f"{file}.json").write_text(json.dumps(content))
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
                self._replace_weights(part, name)
            for chunk in self.chunks:
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync(force_sync=True)
            _write_weights(self, self.folder / name, with_merged=self.adapters is None)

    def _replace_weights(self, part: Any, name: str) -> None:
        """Copies the moments `name` of one of Megatron's optimizers into its weights."""
        param_groups = [] if part.optimizer is None else part.optimizer.param_groups
        for group in param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(part.optimizer.state[parameter][name])
        # The model's own parameters are copies of the optimizer's.
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()


def _sample_arrays(
    minibatch: MiniBatch, recorded: Mapping[int, tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """ "<kind> <sample id>" -> float32 [response] of this rank's samples."""
    index = minibatch.tokens.index.tolist()
    starts = on_host(minibatch, minibatch.step_start_logprobs)
    references = on_host(minibatch, minibatch.reference_logprobs)
    by_kind: dict[str, Mapping[int, np.ndarray]] = {
        "start": dict(zip(index, starts, strict=False)),
        "reference": dict(zip(index, references, strict=False)),
        "update": {row: logprobs for row, (logprobs, _) in recorded.items()},
        "coefficient": {row: derivatives for row, (_, derivatives) in recorded.items()},
    }
    arrays = {}
    for kind, by_row in by_kind.items():
        for row, values in by_row.items():
            arrays[f"{kind} {minibatch.facts.ids[row]}"] = values
    return arrays


def _report_content(report: UpdateReport, version: int, num_samples: int) -> dict[str, Any]:
    """JSON of an update's report, with the denominator of each metric."""
    metrics = {}
    for name, value in report.metrics.items():
        metrics[name] = (value, report.denominators.get(name, num_samples))
    return {
        "grad_norm": report.grad_norm,
        "is_clipped": report.is_clipped,
        "lr": report.lr,
        "version": version,
        "metrics": metrics,
    }


class _RecordedCritic(Critic):
    """Writes the weights after each update."""

    policy: _RecordedPolicy

    def update(self, *args: Any) -> UpdateReport:
        report = super().update(*args)
        _write_weights(self, self.policy.folder / f"critic_{self.policy.number}")
        return report


def _write_weights(model: MegatronPolicy, file: Path, *, with_merged: bool = True) -> None:
    """Every tensor under its Hugging Face name, adapters also under PEFT's. Collective."""
    tensors: dict[str, Any] = {}
    exports = [model.export_weights()] if with_merged else []
    if model.adapters is not None:
        exports.append(model.export_adapters())
    for name, tensor in itertools.chain(*exports):
        # A copy, because the export may use one buffer for several tensors.
        tensors[name] = tensor.float().cpu().numpy().copy()

    digest = hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors.values())).hexdigest()
    file.with_name(f"{file.name}.{model.rank.rank}.digest").write_text(digest)
    if model.rank.rank == 0:
        np.savez(f"{file}.npz", **tensors)


class _RecordedRollouts:
    """Replaces `rollout.collect.Rollouts` by the samples of the case."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self._ids = json.loads((folder / "case.json").read_text())["ids"]
        self._data = dict(np.load(folder / "steps.npz"))
        self._is_first = is_first

    def collect(self, step: int) -> StepSamples:
        facts = SampleFacts(
            ids=tuple(self._ids[str(step)]),
            groups=self._data[f"{step}.groups"],
            labels=self._data[f"{step}.labels"],
            rewards=self._data[f"{step}.rewards"],
            prompt_lens=self._data[f"{step}.prompt_lens"],
            response_lens=self._data[f"{step}.response_lens"],
            environment_lens=self._data[f"{step}.environment_lens"],
            truncated=self._data[f"{step}.truncated"],
        )
        tokens = TokenBuffers(
            index=np.arange(facts.num_samples),
            token_ids=self._data[f"{step}.tokens"],
            offsets=np.cumsum([0, *facts.lens]),
            writers=self._writers(step, facts),
            sampler_logprobs=self._data[f"{step}.sampler"],
            response_offsets=np.cumsum([0, *facts.response_lens]),
            routes=self._data.get(f"{step}.routes"),
        )
        return StepSamples(facts=facts, tokens=tokens if self._is_first else None, metrics={})

    def _writers(self, step: int, facts: SampleFacts) -> np.ndarray:
        """uint8 [tokens]"""
        whole_lens = facts.response_lens + facts.environment_lens
        writers = single_turn_writers(facts.prompt_lens, whole_lens)
        is_response = writers == Writer.POLICY
        is_policy = self._data[f"{step}.is_policy"]
        writers[is_response] = np.where(is_policy, Writer.POLICY, Writer.ENVIRONMENT)
        return writers

    def state(self, trained: int, *, final: bool, at_boundary: bool) -> DriverState:
        return DriverState(order={}, buffer=None)

    def load_state(self, saved: DriverState, trained: int) -> None:
        """Does nothing, because no rollout is in progress."""


def attempt(case: Case, folder: Path, number: int) -> None:
    """Attempt 0 trains `case.stop_after` updates and saves; attempt 1 resumes in the other layout,
    ends the run, exports.

    Collective over the ranks of the attempt's layout. Its files are in `folder/product`.
    """
    run = _build_run(case, folder, number)
    policy = run.policy
    assert isinstance(policy, _RecordedPolicy)
    progress = saving.resume(run) or RunProgress(row={})
    policy.number = case.stop_after if number else 0
    _write_weights(policy, policy.folder / f"start_{number}")

    # With one update a step, the first attempt ends between two steps; else the stop request ends
    # it inside one.
    ends_between_steps = number == 0 and run.config.batch.updates_per_step == 1
    last_step = case.stop_after if ends_between_steps else case.steps
    rows: dict[int, dict[str, float | None]] = {}
    with suppress(Interrupted):
        while progress.step < last_step:
            progress.complete_step(train_step(run, progress))
            rows[progress.step] = progress.row or {}
    saving.save(run, progress, final=True)

    if run.rank.rank == 0:
        (policy.folder / f"rows_{number}.json").write_text(json.dumps(rows))
    if number:
        export_hf(run, policy, policy.folder / "hf")
        if policy.adapters is not None:
            export_adapters(run, policy.folder / "hf_adapters")
        policy.write_moments()
    # An early exit of a rank would reset the connections of other ranks.
    dist.barrier(group=run.rank.control)
    groups.shutdown(keep_world=True)


def _build_run(case: Case, folder: Path, number: int) -> RunContext:
    """The training run of an attempt, on recorded samples. Collective."""
    config = case.config.model_copy(update={"parallel": case.parallel(number)})
    channel = join(config)
    rank = channel.rank
    config = config.model_copy(update={"objective": _case_objective(config, folder)})

    run_dir = folder / "run"
    model_dir = folder / "model"
    base_digest = ""
    if config.policy.lora is not None:
        config = _with_adapters_of_case(config, config.policy.lora, folder)
        base_digest = digest_base(model_dir, channel)
    policy = build_policy(config, run_dir, model_dir, rank, _RecordedPolicy)
    stop = StopFlag(run_dir)
    assert isinstance(policy, _RecordedPolicy)
    policy.folder = folder / "product"
    policy.stop = stop
    policy.stop_after = case.stop_after
    critic = build_critic(config, run_dir, model_dir, rank, _RecordedCritic)
    if isinstance(critic, _RecordedCritic):
        critic.policy = policy

    return RunContext(
        config=config,
        run_dir=run_dir,
        model_dir=model_dir,
        rank=rank,
        channel=channel,
        policy=policy,
        critic=critic,
        objective=build_objective(config.objective, updates_per_step=config.batch.updates_per_step),
        rollouts=_RecordedRollouts(folder, is_first=rank.rank == 0),  # type: ignore[arg-type]
        driver=None,
        engine=None,
        server_sync=None,
        timer=Timer(),
        saver=Saver(config, rank),
        stop=stop,
        base_digest=base_digest,
    )


def _with_adapters_of_case(config: RunConfig, adapters: LoraOptions, folder: Path) -> RunConfig:
    """The configuration with the case's model and first adapters, which a checkpoint names."""
    options = adapters.model_copy(update={"path": str(folder / "adapters")})
    policy = config.policy.model_copy(update={"lora": options})
    model = config.model.model_copy(update={"path": str(folder / "model")})
    return config.model_copy(update={"policy": policy, "model": model})


def _case_objective(config: RunConfig, folder: Path) -> CommonOptions:
    """The objective with the values that the reference chose: the limit of the norm, the critic,
    the teacher.
    """
    content = json.loads((folder / "case.json").read_text())
    changes: dict[str, Any] = {"clip_grad": content["clip_grad"]}
    if isinstance(config.objective, PpoOptions):
        critic_path = str(folder / "critic")
        changes["critic"] = config.objective.critic.model_copy(update={"path": critic_path})
    if isinstance(config.objective, DistillOptions):
        changes["teacher"] = str(folder / "teacher")
    return config.objective.model_copy(update=changes)


def convert(folder: Path) -> None:
    """Converts the last checkpoint to Hugging Face and back; writes the tensors of both in the
    ranks' format.
    """
    product = folder / "product"
    megatron_to_hf(folder / "run", ConversionOptions(out=product / "to_hf"), step=None)
    hf_to_megatron(str(product / "to_hf"), ConversionOptions(out=product / "to_megatron"))
    sources: dict[str, HfFolder | MegatronWeights] = {
        "export": HfFolder(product / "hf"),
        "convert to-hf": HfFolder(product / "to_hf"),
        "convert to-megatron": MegatronWeights(product / "to_megatron"),
    }

    critic = find_checkpoint(folder / "run", None) / "critic"
    if critic.is_dir():
        megatron_to_hf(critic, ConversionOptions(out=product / "critic_to_hf"), step=None)
        sources["critic to-hf"] = HfFolder(product / "critic_to_hf")

    adapters: dict[str, dict[str, Tensor]] = {}
    if (product / "hf_adapters").is_dir():
        export_of_checkpoint(find_checkpoint(folder / "run", None), product / "to_hf_adapters")
        of_run = load_file(product / "hf_adapters" / ADAPTER_WEIGHTS)
        of_checkpoint = load_file(product / "to_hf_adapters" / ADAPTER_WEIGHTS)
        # A conversion of merged weights has none.
        adapters = dict.fromkeys(sources, of_checkpoint) | {"export": of_run}

    for name, source in sources.items():
        tensors: dict[str, Any] = {key: source.get(key).float().numpy() for key in source.names}
        for key, tensor in adapters.get(name, {}).items():
            tensors[key] = tensor.float().numpy()
        np.savez(product / f"{name}.npz", **tensors)
