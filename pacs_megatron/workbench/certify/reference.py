"""The reference of `certify`: a plain training loop.

With its parts (`reference_*.py`, `expected.py` and the formulas) it imports nothing else of
pacs_megatron; a test reads the imports. It has transformers in float64, one sample a forward,
autograd through the whole mini-batch, and an AdamW and a schedule of its own.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.workbench.certify import expected
from pacs_megatron.workbench.certify.formulas import (
    OBJECTIVES,
    Batch,
    Metrics,
    PerSample,
    estimates,
    implicit_advantages,
    value_loss,
)
from pacs_megatron.workbench.certify.reference_adam import Adam
from pacs_megatron.workbench.certify.reference_case import (
    Step,
    per_sample,
    read_case,
    read_steps,
    write_sampler,
)
from pacs_megatron.workbench.certify.reference_model import CRITIC, TEACHER, Model, Routes


class Reference:
    """Trains the case in `folder` (case.json, steps.npz, model/) and writes `reference/` there.

    `rows` are samples of a step's rollout batch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.case = read_case(folder)
        self.steps = read_steps(folder)
        self.options = self.case["objective"]

        clip = self.case["clip_grad"]
        total = self.case["steps"] * self.planned_updates()
        self.model = Model(folder / "model", self.case["temperature"], self.case["lora"])
        self.adam = Adam(self.model.parameters, self.case["optimizer"], clip, total)
        self.frozen = self.model.copy()
        """weights of the frozen reference"""
        if self.options["name"] == "distill":
            self.frozen = Model(folder / TEACHER, self.case["temperature"]).parameters
        self.routes: dict[int, Routes] = {}
        """row -> experts of each layer in the last pass over all samples"""

        self.certainties: dict[int, Tensor] = {}
        self.token_logits: dict[int, Tensor] = {}
        """row -> [response] at the start of the step; `certainties` likewise"""

        self.critic: Model | None = None
        if self.options["name"] == "ppo":
            self.critic = Model(folder / CRITIC, 1.0)
            self.critic_adam = Adam(self.critic.parameters, self.critic_optimizer(), clip, total)

    def critic_optimizer(self) -> dict[str, Any]:
        """The section `optimizer` with the critic's rate; min_lr keeps its ratio to lr."""
        optimizer: dict[str, Any] = dict(self.case["optimizer"])
        lr = self.options["critic"]["lr"]
        optimizer["min_lr"] = optimizer["min_lr"] * lr / optimizer["lr"]
        optimizer["lr"] = lr
        return optimizer

    def planned_updates(self) -> int:
        """Updates of a step in the schedule; a step with few groups has fewer."""
        return int(self.case["updates_per_step"] * self.case["epochs"])

    def prepare(self) -> None:
        """Completes the case: the sampler's log-probs are those of the first weights plus the
        noise, and clip_grad is a norm that some updates exceed.
        """
        sampler_logprobs = {}
        norms = []
        for step in self.steps.values():
            starts, _ = self.logprobs(step)
            sampler = torch.cat(starts).numpy() + np.concatenate(step.noise)
            sampler_logprobs[step.number] = sampler.astype(np.float32)
            lens = np.array([len(start) for start in starts])
            step.sampler_logprobs = per_sample(sampler_logprobs[step.number], lens)
            if self.case["clip_grad"]:
                is_distilled = self.options["name"] == "distill"
                frozen = self._frozen_logprobs(step) if is_distilled else starts
                for rows in self.minibatches(step):
                    norms.append(self._first_norm(step, rows, starts, frozen))

        write_sampler(self.folder, sampler_logprobs)
        if norms:
            # Between two norms in the middle, so that some updates are clipped and others are not.
            middle = (len(norms) - 1) // 2
            low, high = sorted(norms)[middle : middle + 2]
            self.case["clip_grad"] = math.sqrt(low * high)
        (self.folder / "case.json").write_text(json.dumps(self.case))

    def train(self) -> None:
        """All updates of the case."""
        (self.folder / "reference").mkdir()
        updates: list[dict[str, Any]] = []
        for step in self.steps.values():
            frozen = self._frozen_logprobs(step)
            starts, entropies = self.logprobs(step)
            for index, rows in enumerate(self.minibatches(step)):
                arrays, numbers = self._update(len(updates) + 1, step, index, rows, starts, frozen)
                numbers["of_step"] = self._step_metrics(entropies)
                updates.append(numbers)
                np.savez(self.folder / "reference" / f"update_{len(updates)}.npz", **arrays)

            reset_every = self.options.get("reset_every")
            if reset_every and step.number % reset_every == 0:
                self.frozen = self.model.copy()
                self.adam.reset()

        for kind, moments in (("exp_avg", self.adam.first), ("exp_avg_sq", self.adam.second)):
            np.savez(self.folder / "reference" / f"{kind}.npz", **self.model.named(moments))
        (self.folder / "reference" / "updates.json").write_text(json.dumps(updates))

    def _step_metrics(self, entropies: PerSample) -> Metrics:
        """The metrics of a step that no update reports.

        Args:
            entropies: at the start of the step, of all samples.
        """
        if not self.case["step_start_entropy"]:
            return {}
        return expected.step_metrics(torch.cat(entropies))

    def minibatches(self, step: Step) -> list[list[int]]:
        """Rows of each update: equal shares of the groups, in order, once an epoch."""
        num_groups = int(step.groups.max()) + 1
        num_parts = min(self.case["updates_per_step"], num_groups)
        bounds = [round(num_groups * part / num_parts) for part in range(num_parts + 1)]

        parts = []
        for part in range(num_parts):
            is_in_part = (bounds[part] <= step.groups) & (step.groups < bounds[part + 1])
            parts.append(np.flatnonzero(is_in_part).tolist())
        return parts * int(self.case["epochs"])

    @torch.no_grad()
    def logprobs(self, step: Step, *, is_frozen: bool = False) -> tuple[PerSample, PerSample]:
        """Log-probs and entropies of all samples of a step, without a graph.

        Records the experts, which later updates of the step replay.

        Args:
            is_frozen: whether the weights are the frozen reference's, whose router always selects
                experts.
        """
        logprobs = []
        entropies = []
        for row in step.rows:
            routes = self._no_routes() if is_frozen else self._sampler_routes(step, row)
            logprob, entropy = self._sample(step, row, routes)
            logprobs.append(logprob)
            entropies.append(entropy)
            self.routes[row] = self.model.chosen_routes()
            if not is_frozen:
                self.certainties[row] = self.model.certainty
                self.token_logits[row] = self.model.token_logit
        return logprobs, entropies

    def update_logprobs(
        self, step: Step, rows: Iterable[int], *, replays: bool = False
    ) -> tuple[PerSample, PerSample]:
        """Log-probs and entropies of some samples, with a graph.

        Args:
            replays: whether to use the experts of the last pass over all samples, unless the case
                has the sampler's.
        """
        logprobs = []
        entropies = []
        for row in rows:
            routes = self._sampler_routes(step, row)
            if step.routes is None and replays:
                routes = self.routes[row]
            logprob, entropy = self._sample(step, row, routes)
            logprobs.append(logprob)
            entropies.append(entropy)
        return logprobs, entropies

    def _sample(self, step: Step, row: int, routes: Routes) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the tokens that the policy wrote."""
        logprob, entropy = self.model.sample(step.token_ids[row], step.prompt_lens[row], routes)
        return logprob[step.is_policy[row]], entropy[step.is_policy[row]]

    def _no_routes(self) -> Routes:
        """The router of every layer selects experts."""
        return [None] * len(self.model.routers)

    def _sampler_routes(self, step: Step, row: int) -> Routes:
        """The sampler's experts of a sample, if the case has them."""
        if step.routes is None:
            return self._no_routes()
        # The last token is no input of the sampler; here any experts serve it.
        recorded = step.routes[row]
        padded = torch.cat([recorded, recorded[-1:]])
        return [padded[:, layer] for layer in range(len(self.model.routers))]

    def _frozen_logprobs(self, step: Step) -> PerSample:
        """Log-probs of the frozen reference, of all samples."""
        own_weights = self.model.copy()
        self.model.set(self.frozen)
        logprobs, _ = self.logprobs(step, is_frozen=True)
        self.model.set(own_weights)
        return logprobs

    def _minibatch(
        self,
        step: Step,
        rows: list[int],
        own: tuple[PerSample, PerSample],
        starts: PerSample,
        frozen: PerSample,
    ) -> Batch:
        """A mini-batch with the rollout batch of its step.

        Args:
            rows: the samples of the mini-batch.
            own: log-probs and entropies of the update, of `rows`.
            starts: log-probs at the start of the step, of all samples.
            frozen: log-probs of the frozen reference, of all samples.
        """
        batch = self._samples(step, rows, own, starts, frozen)
        batch.step = self._samples(step, list(step.rows), (starts, []), starts, frozen)
        return batch

    def _samples(
        self,
        step: Step,
        rows: list[int],
        own: tuple[PerSample, PerSample],
        starts: PerSample,
        frozen: PerSample,
    ) -> Batch:
        """The samples `rows` for the formulas; see `_minibatch`."""
        logprobs, entropies = own
        groups = step.groups[rows]
        return Batch(
            options=self.options,
            groups=[np.flatnonzero(groups == group).tolist() for group in np.unique(groups)],
            labels=step.labels[rows],
            rewards=step.rewards[rows],
            logprobs=logprobs,
            entropies=entropies,
            rows=rows,
            start_logprobs=[starts[row] for row in rows],
            frozen_logprobs=[frozen[row] for row in rows],
            sampler_logprobs=[step.sampler_logprobs[row] for row in rows],
            certainties=[self.certainties[row] for row in rows],
            logits=[self.token_logits[row] for row in rows],
        )

    def _first_norm(
        self, step: Step, rows: list[int], starts: PerSample, frozen: PerSample
    ) -> float:
        """The norm of the gradient of a mini-batch at the first weights."""
        self.model.zero_grad()
        own = self.update_logprobs(step, rows)
        batch = self._minibatch(step, rows, own, starts, frozen)
        self._estimate(step, 0, batch)
        self._estimate_implicit(step, 0, batch, {})
        loss, _ = OBJECTIVES[self.options["name"]](batch)
        torch.autograd.backward(loss)
        return self.adam.norm()

    @torch.no_grad()
    def _estimate(self, step: Step, index: int, batch: Batch) -> None:
        """Sets the mini-batch's advantages, and for a step's first update the values and returns of
        all samples.
        """
        if self.critic is None or batch.step is None:
            return
        if index == 0:
            self.start_values = self._values(self.critic, step, step.rows)
            self.advantages, self.returns = estimates(batch.step, self.start_values)
        batch.advantages = [self.advantages[row] for row in batch.rows]

    def _estimate_implicit(
        self, step: Step, index: int, batch: Batch, product: dict[str, Tensor]
    ) -> None:
        """Sets the mini-batch's advantages of VIMPO; for a step's first update those of all
        samples, at the log-probs that the product recorded in all updates of the step.
        """
        if self.options["name"] != "vimpo" or batch.step is None:
            return
        if index == 0:
            ids = [step.ids[row] for row in step.rows]
            starts = _recorded(product, "start", ids, batch.step.start_logprobs)
            frozen = _recorded(product, "reference", ids, batch.step.frozen_logprobs)
            self.advantages = implicit_advantages(self.options, starts, frozen)
        batch.advantages = [self.advantages[row] for row in batch.rows]

    def _values(self, critic: Model, step: Step, rows: Iterable[int]) -> PerSample:
        values = []
        for row in rows:
            of_response = critic.values(step.token_ids[row], step.prompt_lens[row])
            values.append(of_response[step.is_policy[row]])
        return values

    def _update(
        self,
        number: int,
        step: Step,
        index: int,
        rows: list[int],
        starts: PerSample,
        frozen: PerSample,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One update of the policy, and of the critic if there is one.

        Args:
            number: of the update in the run, from 1.
            step: the update's step.
            index: of the update in the step, from 0.
            rows: the samples of the mini-batch.
            starts: log-probs at the start of the step, of all samples.
            frozen: log-probs of the frozen reference, of all samples.

        Returns:
            (arrays, numbers), for update_<number>.npz and updates.json.
        """
        batch, arrays = self._update_batch(number, step, index, rows, starts, frozen)
        loss, metrics = OBJECTIVES[self.options["name"]](batch)
        torch.autograd.backward(loss)
        arrays["coefficient"] = [_gradient(logprob) for logprob in batch.logprobs]

        planned = (step.number - 1) * self.planned_updates() + index + 1
        norm = self.adam.norm()
        lr = self.adam.rate(planned)
        self.adam.step(lr)
        critic_arrays, critic_metrics = self._update_critic(step, planned, rows)

        count = float(len(rows))
        skipped = self._skipped(batch, index, arrays["coefficient"])
        metrics |= self._passes(index)
        metrics |= self._forward_metrics(batch, skipped)
        metrics["objective/loss"] = (float(loss.detach()), count)
        if self.options["name"] != "sft":
            truncated_frac = float(step.truncated[rows].mean())
            metrics[f"{self.options['name']}/truncated_frac"] = (truncated_frac, count)

        files = {name: torch.cat(values).detach().numpy() for name, values in arrays.items()}
        for name, weight in self.model.weights().items():
            files[f"weight {name}"] = weight
        numbers = {
            "critic": critic_metrics,
            "step": step.number,
            "ids": [step.ids[row] for row in rows],
            "lens": batch.lens,
            "skipped": skipped,
            "grad_norm": norm,
            "is_clipped": self.adam.clips(norm),
            "lr": lr,
            "metrics": metrics,
        }
        return files | critic_arrays, numbers

    def _passes(self, index: int) -> Metrics:
        """The forward-only passes for a mini-batch; one plan serves it in all its epochs."""
        return expected.passes(self.options, max(index, self.case["epochs"] - 1))

    def _update_batch(
        self,
        number: int,
        step: Step,
        index: int,
        rows: list[int],
        starts: PerSample,
        frozen: PerSample,
    ) -> tuple[Batch, dict[str, PerSample]]:
        """The mini-batch of an update at the product's log-probs, with the graph of this model.

        Resets the gradients. See `_update` for the arguments.

        Returns:
            (mini-batch, this model's own log-probs by their kind).
        """
        self.model.zero_grad()
        needs_start_pass, _ = self._passes(index)["passes/step_start"]
        own, entropies = self.update_logprobs(step, rows, replays=needs_start_pass > 0)

        ids = [step.ids[row] for row in rows]
        product = self._product_arrays(number)
        logprobs = _evaluated_at(product, ids, own)
        batch = self._minibatch(step, rows, (logprobs, entropies), starts, frozen)
        arrays = {"update": own, "start": batch.start_logprobs, "reference": batch.frozen_logprobs}

        if index == 0:
            # A first update's own forward gives the log-probs of the step's start.
            batch.start_logprobs = [logprob.detach() for logprob in logprobs]
        batch.start_logprobs = _recorded(product, "start", ids, batch.start_logprobs)
        batch.frozen_logprobs = _recorded(product, "reference", ids, batch.frozen_logprobs)
        self._estimate(step, index, batch)
        of_step = dict(product)
        for later in range(number + 1, number + len(self.minibatches(step)) - index):
            of_step |= self._product_arrays(later)
        self._estimate_implicit(step, index, batch, of_step)
        return batch, arrays

    def _product_arrays(self, number: int) -> dict[str, Tensor]:
        """The log-probs that the product's ranks recorded in update `number`: "<kind> <sample id>"
        -> float64 [response].
        """
        arrays: dict[str, Tensor] = {}
        for file in sorted((self.folder / "product").glob(f"update_{number}.*.npz")):
            for key, value in np.load(file).items():
                arrays[key] = torch.from_numpy(value).double()
        return arrays

    def _skipped(self, batch: Batch, index: int, derivatives: PerSample) -> list[bool]:
        """Whether the product leaves each sample out of the update's forward pass."""
        is_only_update = index == 0 and self.case["epochs"] == 1
        if not is_only_update or not expected.skips_zero_gradient(self.options):
            return [False] * batch.size
        return expected.has_no_gradient(batch, derivatives)

    def _forward_metrics(self, batch: Batch, skipped: list[bool]) -> Metrics:
        """The metrics over the tokens of the update's forward pass."""
        rows = [row for row in range(batch.size) if not skipped[row]]
        if not rows:
            return {}
        return expected.token_metrics(
            torch.cat([batch.logprobs[row].detach() for row in rows]),
            torch.cat([batch.entropies[row].detach() for row in rows]),
            torch.cat([batch.sampler_logprobs[row] for row in rows]),
            self.case,
        )

    def _update_critic(
        self, step: Step, planned: int, rows: list[int]
    ) -> tuple[dict[str, Any], Metrics]:
        """(weights, metrics) of one update of the critic; empty without one.

        Args:
            planned: number of the update in the schedule, from 1.
        """
        if self.critic is None:
            return {}, {}

        self.critic.zero_grad()
        values = self._values(self.critic, step, rows)
        starts = [self.start_values[row] for row in rows]
        returns = [self.returns[row] for row in rows]
        loss, metrics = value_loss(self.options, values, starts, returns)
        torch.autograd.backward(loss)

        norm = self.critic_adam.norm()
        lr = self.critic_adam.rate(planned)
        self.critic_adam.step(lr)
        count = float(len(rows))
        metrics["critic/loss"] = (float(loss.detach()), count)
        metrics["critic/grad_norm"] = (norm, count)
        metrics["critic/lr"] = (lr, count)
        metrics["critic/clipped_frac"] = (float(self.critic_adam.clips(norm)), count)
        weights = self.critic.named(self.critic.parameters)
        return {f"critic {name}": value for name, value in weights.items()}, metrics


def _evaluated_at(product: dict[str, Tensor], ids: list[str], own: PerSample) -> PerSample:
    """The product's log-probs with the graph of this model, where the product recorded them.

    The comparison bounds the difference of the log-probs, so the objective is evaluated at equal
    ones, and its derivatives do not amplify the difference (docs/certify.md#tolerances).
    """
    logprobs = []
    for sample_id, logprob in zip(ids, own, strict=True):
        value = product.get(f"update {sample_id}", logprob.detach())
        evaluated = logprob + (value - logprob.detach())
        evaluated.retain_grad()
        logprobs.append(evaluated)
    return logprobs


def _recorded(
    product: dict[str, Tensor], kind: str, ids: list[str], default: PerSample
) -> PerSample:
    """The log-probs `kind` that the product recorded, else `default`."""
    pairs = zip(ids, default, strict=True)
    return [product.get(f"{kind} {sample_id}", logprob) for sample_id, logprob in pairs]


def _gradient(logprob: Tensor) -> Tensor:
    """The derivative of the loss by a sample's log-probs; 0 if the loss does not read them."""
    return torch.zeros_like(logprob) if logprob.grad is None else logprob.grad
