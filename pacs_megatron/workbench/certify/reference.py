"""The reference of `certify`: a plain training loop.

It imports only `formulas.py` from pacs_megatron, which imports nothing from it (a test reads the
imports). It uses transformers in float64, one sample per forward, autograd through the whole
mini-batch, and an AdamW and a schedule written from docs/configuration.md.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.workbench.certify import formulas
from pacs_megatron.workbench.certify.formulas import Batch, Logps, Metrics

CRITIC = "critic"
"""Name of the critic's folder, beside the policy's folder"""


class Model:
    """A transformers model in float64.

    `named` gives parameters and their moments the names of a checkpoint.
    """

    def __init__(self, folder: Path, temperature: float) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        kind = AutoModelForTokenClassification if folder.name == CRITIC else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=torch.float64, **options).eval()
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):  # transformers' norms compute in float32
                norm = torch.nn.functional.rms_norm
                shape = module.weight.shape
                eps = module.variance_epsilon
                module.forward = partial(
                    norm, normalized_shape=shape, weight=module.weight, eps=eps
                )
        self.routers = [
            _Router(module) for module in self.model.modules() if hasattr(module, "norm_topk_prob")
        ]
        self.temperature = temperature
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())

    def sample(
        self, ids: np.ndarray, prompt_len: int, routes: list[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of one sample's response, with graph.

        `routes`: the experts of each layer with experts.
        """
        every = torch.log_softmax(self._logits(ids, prompt_len, routes) / self.temperature, dim=-1)
        tokens = torch.from_numpy(ids[prompt_len:].astype(np.int64))
        return every.gather(1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def values(self, ids: np.ndarray, prompt_len: int) -> Tensor:
        """A critic's values before each token of one sample's response, with graph.

        Its own router selects experts.
        """
        return self._logits(ids, prompt_len, [None] * len(self.routers))[:, 0]

    def _logits(self, ids: np.ndarray, prompt_len: int, routes: Sequence[Tensor | None]) -> Tensor:
        for router, chosen in zip(self.routers, routes, strict=False):
            router.chosen = chosen
        found: Tensor = self.model(
            torch.from_numpy(ids.astype(np.int64))[None], use_cache=False
        ).logits
        return found[0, prompt_len - 1 : -1]

    def named(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """With one tensor for each expert's projection."""
        found: dict[str, Any] = {}
        for key, value in values.items():
            base, _, last = key.rpartition(".experts.")
            for number, expert in enumerate(value.detach().numpy() if base else ()):
                parts = [expert] if last == "down_proj" else np.split(expert, 2)
                for name, part in zip(
                    ("down_proj",) if len(parts) == 1 else ("gate_proj", "up_proj"),
                    parts,
                    strict=True,
                ):
                    found[f"{base}.experts.{number}.{name}.weight"] = part
            found |= {} if base else {key: value.detach().numpy()}
        return found

    def copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(weights[name])


class _Router:
    """The router of a Qwen3 layer with experts, in float64.

    It uses the experts `chosen` [tokens, top k], if set.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.chosen: Tensor | None = None
        module.forward = self

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, x.shape[-1]) @ self.module.weight.T
        every = logits.softmax(-1)
        self.chosen = every.topk(self.module.top_k).indices if self.chosen is None else self.chosen
        values = every.gather(1, self.chosen)
        return (
            logits,
            values / values.sum(-1, keepdim=True) if self.module.norm_topk_prob else values,
            self.chosen,
        )


def random_model(folder: Path, seed: int, *, with_critic: bool) -> None:
    """Writes random weights for the config.json in `folder`, and the critic's; their range is wide
    enough to show errors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    torch.manual_seed(seed)
    config = (folder / "config.json").read_text()
    models = (
        (AutoModelForCausalLM, folder),
        (AutoModelForTokenClassification, folder.with_name(CRITIC)),
    )
    for kind, target in models if with_critic else models[:1]:
        labels = {"num_labels": 1} if target != folder else {}
        model = kind.from_config(AutoConfig.from_pretrained(folder, **labels), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.12)
        model.save_pretrained(target)
    (folder / "config.json").write_text(config)


class Adam:
    """AdamW with decoupled decay of matrices only, clipping by the global norm, and the schedule."""

    def __init__(
        self, parameters: Mapping[str, Tensor], o: Mapping[str, Any], clip: float, total: int
    ) -> None:
        self.parameters = parameters
        self.o = o
        self.clip = clip
        self.total = total
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.first, self.second = (
            {name: torch.zeros_like(p) for name, p in self.parameters.items()} for _ in "mv"
        )

    def norm(self) -> float:
        return math.sqrt(
            sum(float(p.grad.pow(2).sum()) for p in self.parameters.values() if p.grad is not None)
        )

    def clips(self, norm: float) -> bool:
        return 0 < self.clip < norm

    def rate(self, number: int) -> float:
        """Learning rate of the planned update `number`, from 1."""
        o = self.o
        warmup = min(self.o["warmup_updates"], self.total - 1)
        if number <= warmup:
            return float(o["lr"] * number / warmup)
        if o["schedule"] == "constant":
            return float(o["lr"])
        last = self.total + (o["min_lr"] == 0)  # the last update uses min_lr, unless min_lr is 0
        done = (number - warmup) / (last - warmup)
        share = 1 - done if o["schedule"] == "linear" else (1 + math.cos(math.pi * done)) / 2
        return float(o["min_lr"] + share * (o["lr"] - o["min_lr"]))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        o = self.o
        norm = self.norm()
        scale = self.clip / (norm + 1e-6) if self.clips(norm) else 1.0
        self.count += 1
        b1 = o["adam_beta1"]
        b2 = o["adam_beta2"]
        for name, p in self.parameters.items():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad * scale
            m = self.first[name].mul_(b1).add_(gradient, alpha=1 - b1) / (1 - b1**self.count)
            v = self.second[name].mul_(b2).add_(gradient * gradient, alpha=1 - b2) / (
                1 - b2**self.count
            )
            p *= 1 - lr * (o["weight_decay"] if p.ndim > 1 else 0.0)
            p -= lr * m / (v.sqrt() + o["adam_eps"])


class Reference:
    """Trains the case in `folder` (case.json, steps.npz, model/) and writes `reference/` beside
    them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.case: dict[str, Any] = json.loads((folder / "case.json").read_text())
        self.options = self.case["objective"]
        self.data: dict[str, Any] = dict(np.load(folder / "steps.npz"))
        self.model = Model(folder / "model", self.case["temperature"])
        total = self.case["steps"] * self._updates()
        self.adam = Adam(
            self.model.parameters, self.case["optimizer"], self.case["clip_grad"], total
        )
        self.critic: Model | None = None
        if self.options["name"] == "ppo":
            self.critic = Model(folder / CRITIC, 1.0)
            o = self.case["optimizer"]
            lr = self.options["critic"]["lr"]
            own = o | {"lr": lr, "min_lr": o["min_lr"] * lr / o["lr"]}
            self.critic_adam = Adam(self.critic.parameters, own, self.case["clip_grad"], total)
        self.routes: dict[int, list[Tensor | None]] = {}
        """row -> experts of each layer in the last pass over all samples"""

    def logps(
        self,
        step: int,
        rows: Sequence[int] | None = None,
        *,
        replays: bool = False,
        is_frozen: bool = False,
    ) -> tuple[Logps, Logps]:
        """(log-probs, entropies) of some samples, with a graph; None: of all samples, without a
        graph.

        Uses the sampler's experts if the case has them, unless `is_frozen`; `replays`: uses the
        experts of `self.routes`.
        """
        samples = self._samples(step)
        found = []
        with torch.set_grad_enabled(rows is not None):
            for row in range(len(samples)) if rows is None else rows:
                routes: list[Tensor | None] = (
                    self.routes[row] if replays else [None] * len(self.model.routers)
                )
                if (
                    f"{step}.routes" in self.data and not is_frozen
                ):  # of every input token but the last
                    first = sum(len(ids) - 1 for ids, _ in samples[:row])
                    given = torch.from_numpy(
                        self.data[f"{step}.routes"][first : first + len(samples[row][0]) - 1]
                    )
                    routes = [
                        torch.cat([given[:, k], given[-1:, k]]).long() for k in range(len(routes))
                    ]
                found.append(self.model.sample(*samples[row], routes))
                if rows is None:
                    self.routes[row] = [router.chosen for router in self.model.routers]
        return [f[0] for f in found], [f[1] for f in found]

    def _samples(self, step: int) -> list[tuple[np.ndarray, int]]:
        """(token ids, length of the prompt) of each."""
        prompt_lens = self.data[f"{step}.prompt_lens"]
        ends = np.cumsum(prompt_lens + self.data[f"{step}.response_lens"])[:-1]
        return list(
            zip(np.split(self.data[f"{step}.tokens"], ends), prompt_lens.tolist(), strict=True)
        )

    def _updates(self) -> int:
        """Planned updates of a step."""
        return int(self.case["updates_per_step"] * self.case["epochs"])

    def minibatches(self, step: int) -> list[list[int]]:
        """Rows of each update: equal shares of the groups, in order, once an epoch."""
        groups = self.data[f"{step}.groups"]
        num = int(groups.max()) + 1
        parts = min(self.case["updates_per_step"], num)
        bounds = [round(num * k / parts) for k in range(parts + 1)]
        shares = [
            [r for r, g in enumerate(groups) if bounds[k] <= g < bounds[k + 1]]
            for k in range(parts)
        ]
        return shares * int(self.case["epochs"])

    def batch(
        self, step: int, rows: list[int], own: tuple[Logps, Logps], starts: Logps, frozen: Logps
    ) -> Batch:
        """`own`: log-probs and entropies."""
        groups = self.data[f"{step}.groups"][rows]
        ends = np.cumsum(self.data[f"{step}.response_lens"])[:-1]
        sampler = np.split(self.data[f"{step}.sampler"].astype(np.float64), ends)
        return Batch(
            options=self.options,
            groups=[np.flatnonzero(groups == group).tolist() for group in np.unique(groups)],
            labels=torch.from_numpy(self.data[f"{step}.labels"][rows]),
            rewards=torch.from_numpy(self.data[f"{step}.rewards"][rows]),
            logps=own[0],
            entropies=own[1],
            rows=rows,
            starts=[starts[row] for row in rows],
            frozen=[frozen[row] for row in rows],
            sampler=[torch.from_numpy(sampler[row]) for row in rows],
        )

    def prepare(self) -> None:
        """Completes the case: the sampler's log-probs are those of the first weights plus the
        noise, and clip_grad is a norm that some updates exceed.
        """
        norms = []
        for step in range(1, self.case["steps"] + 1):
            starts = self.logps(step)[0]
            self.data[f"{step}.sampler"] = (
                torch.cat(starts).numpy() + self.data[f"{step}.noise"]
            ).astype(np.float32)
            for rows in self.minibatches(step) if self.case["clip_grad"] else []:
                self.model.model.zero_grad()
                batch = self.batch(step, rows, self.logps(step, rows), starts, starts)
                batch.step = self.batch(
                    step, list(range(len(starts))), (starts, []), starts, starts
                )
                self._estimate(step, 0, batch)
                torch.autograd.backward(formulas.OBJECTIVES[self.options["name"]](batch)[0])
                norms.append(self.adam.norm())
        np.savez(self.folder / "steps.npz", **self.data)
        if norms:
            low, high = sorted(norms)[(len(norms) - 1) // 2 : (len(norms) + 3) // 2]
            self.case["clip_grad"] = math.sqrt(low * high)
        (self.folder / "case.json").write_text(json.dumps(self.case))

    @torch.no_grad()
    def _estimate(self, step: int, index: int, batch: Batch) -> None:
        """Sets the mini-batch's advantages, and for a step's first update the values and returns of
        all samples.
        """
        if self.critic is None or batch.step is None:
            return
        if index == 0:
            self.starts = [self.critic.values(*sample) for sample in self._samples(step)]
            self.advantages, self.returns = formulas.estimates(batch.step, self.starts)
        batch.advantages = [self.advantages[row] for row in batch.rows]

    def _update_critic(
        self, step: int, number: int, rows: list[int]
    ) -> tuple[dict[str, Any], Metrics]:
        """(weights, metrics) of one update of the critic; empty without one."""
        if self.critic is None:
            return {}, {}
        self.critic.model.zero_grad()
        samples = self._samples(step)
        adam = self.critic_adam
        starts, returns = ([every[row] for row in rows] for every in (self.starts, self.returns))
        values = [self.critic.values(*samples[row]) for row in rows]
        loss, metrics = formulas.value_loss(self.options, values, starts, returns)
        torch.autograd.backward(loss)
        norm = adam.norm()
        lr = adam.rate(number)
        adam.step(lr)
        own = {
            "loss": float(loss.detach()),
            "grad_norm": norm,
            "lr": lr,
            "clipped_frac": float(adam.clips(norm)),
        }
        metrics |= {f"critic/{name}": (value, len(rows)) for name, value in own.items()}
        return {
            f"critic {name}": v for name, v in self.critic.named(self.critic.parameters).items()
        }, metrics

    def train(self) -> None:
        """All updates of the case."""
        (self.folder / "reference").mkdir()
        updates: list[dict[str, Any]] = []
        self.frozen = self.model.copy()
        for step in range(1, self.case["steps"] + 1):
            own = self.model.copy()
            self.model.set(self.frozen)
            frozen = self.logps(step, is_frozen=True)[0]
            self.model.set(own)
            starts = self.logps(step)[0]
            for index, rows in enumerate(self.minibatches(step)):
                arrays, numbers = self._update(len(updates) + 1, step, index, rows, starts, frozen)
                updates.append(numbers)
                np.savez(self.folder / "reference" / f"update_{len(updates)}.npz", **arrays)
            reset = self.options.get("reset_every")
            if reset and step % reset == 0:
                self.frozen = self.model.copy()
                self.adam.reset()
        for kind, values in (("exp_avg", self.adam.first), ("exp_avg_sq", self.adam.second)):
            np.savez(self.folder / "reference" / f"{kind}.npz", **self.model.named(values))
        (self.folder / "reference" / "updates.json").write_text(json.dumps(updates))

    def _update(
        self, number: int, step: int, index: int, rows: list[int], starts: Logps, frozen: Logps
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arrays, numbers) of one update."""
        o = self.options
        case = self.case
        n = len(rows)
        self.model.model.zero_grad()
        counts = formulas.passes(
            o, max(index, case["epochs"] - 1)
        )  # of a mini-batch, for all its epochs
        own, entropies = self.logps(step, rows, replays=counts["passes/step_start"][0] > 0)
        arrays = {
            "update": own,
            "start": [starts[row] for row in rows],
            "reference": [frozen[row] for row in rows],
        }
        # The objective is evaluated at the product's log-probs, which the comparison bounds; the
        # graph is this model's.
        ids = [case["ids"][str(step)][row] for row in rows]
        found = dict[str, Tensor]()
        logps = []
        for file in sorted((self.folder / "product").glob(f"update_{number}.*.npz")):
            found |= {key: torch.from_numpy(value).double() for key, value in np.load(file).items()}
        for i, logp in zip(ids, own, strict=True):
            logps.append(logp + (found.get(f"update {i}", logp.detach()) - logp.detach()))
            logps[-1].retain_grad()
        batch = self.batch(step, rows, (logps, entropies), starts, frozen)
        batch.step = self.batch(step, list(range(len(starts))), (starts, []), starts, frozen)
        first = (
            {f"start {i}": logp.detach() for i, logp in zip(ids, logps, strict=True)}
            if index == 0
            else {}
        )
        batch.starts, batch.frozen = (
            [values.get(f"{kind} {i}", logp) for i, logp in zip(ids, arrays[kind], strict=True)]
            for kind, values in (("start", first | found), ("reference", found))
        )
        self._estimate(step, index, batch)
        loss, metrics = formulas.OBJECTIVES[o["name"]](batch)
        torch.autograd.backward(loss)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in logps]
        skips = index == 0 and case["epochs"] == 1 and formulas.skips_zero_gradient(o)
        skipped = [skips and zero for zero in formulas.without_gradient(batch, slopes)]
        planned = (step - 1) * self._updates() + index + 1
        norm = self.adam.norm()
        lr = self.adam.rate(planned)
        self.adam.step(lr)
        critic, critic_metrics = self._update_critic(step, planned, rows)
        seen = [k for k in range(n) if not skipped[k]]
        if seen:
            forward = [
                torch.cat([values[k].detach() for k in seen])
                for values in (logps, entropies, batch.sampler)
            ]
            metrics |= formulas.token_metrics(forward[0], forward[1], forward[2], case)
        metrics |= counts | {"objective/loss": (float(loss.detach()), n)}
        if o["name"] != "sft":
            metrics[f"{o['name']}/truncated_frac"] = (
                float(self.data[f"{step}.truncated"][rows].mean()),
                n,
            )
        weights = {
            f"weight {name}": value
            for name, value in self.model.named(self.model.parameters).items()
        }
        arrays["coefficient"] = slopes
        files = {name: torch.cat(values).detach().numpy() for name, values in arrays.items()}
        return weights | files | critic, {
            "critic": critic_metrics,
            "step": step,
            "ids": ids,
            "lens": [len(logp) for logp in logps],
            "skipped": skipped,
            "grad_norm": norm,
            "is_clipped": self.adam.clips(norm),
            "lr": lr,
            "metrics": metrics,
        }
