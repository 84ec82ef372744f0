"""The reference of `certify`: a plain training loop that imports nothing from pacs_megatron (a test reads the imports).

transformers, one sample a forward, float64, autograd through the whole mini-batch, an AdamW and a schedule written from
docs/configuration.md, and the formulas of docs/objective.md. A new objective is one function and one row of OBJECTIVES.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Logps = list[Tensor]
"""Per sample, float64 [response], nats"""
Metrics = dict[str, tuple[float, float]]
"""name -> (value, denominator); a denominator of 0 means that there is no value"""


@dataclass(kw_only=True)
class Batch:
    """One mini-batch. `logps` has a graph; the others have none."""

    options: Mapping[str, Any]
    """the section `objective` of the configuration"""
    groups: list[list[int]]
    """rows of each group"""
    labels: Tensor
    rewards: Tensor
    logps: Logps
    starts: Logps
    """log-probs of the policy at the start of the step"""
    frozen: Logps
    """log-probs of the frozen reference"""
    sampler: Logps
    entropies: list[Tensor]
    """of the whole distributions, float64 [response], with graph"""

    @property
    def lens(self) -> Tensor:
        return torch.tensor([float(len(logp)) for logp in self.logps], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ objectives
def pacs(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, PACS: proxy (7), score (6), weight (3.5), loss (2) and (8), actor term (5), stale rollouts."""
    o, n = batch.options, len(batch.logps)
    if o["reward_proxy"] == "mean_log_prob":
        proxy = torch.stack([o["beta"] * logp.mean() for logp in batch.logps])
    else:
        against = batch.frozen if o["reference"] == "frozen" else batch.starts
        pairs = zip(batch.logps, against, strict=True)
        proxy = torch.stack([o["beta"] * (logp - base).sum() for logp, base in pairs])
    psi, weight = [proxy.new_zeros(())] * n, torch.ones(n, dtype=torch.float64)
    for rows in batch.groups:
        r, labels = proxy[rows], batch.labels[rows]
        for row, value in zip(rows, _pacs_scores(r, o), strict=True):
            psi[row] = value
        for row in rows:
            same = int((labels == batch.labels[row]).sum())
            question = 1.0 if same == len(rows) else len(rows) / (2 * same)
            label = float(batch.labels[row])
            kinds = {"question": question, "only_positive": label, "only_negative": 1 - label, "none": 1.0}
            weight[row] = kinds[o["weighting"]]
    score, metrics = torch.stack(psi), Metrics()
    if o["importance_cap"] is not None:
        ratios = [(start - old).mean().exp() for start, old in zip(batch.starts, batch.sampler, strict=True)]
        factor = torch.stack(ratios).clamp(max=o["importance_cap"])
        weight = weight * factor
        metrics["pacs/importance_mean"] = (float(factor.mean()), n)
        metrics["pacs/importance_capped_frac"] = (float((factor >= o["importance_cap"]).double().mean()), n)
    loss = weight * torch.nn.functional.binary_cross_entropy_with_logits(score, batch.labels, reduction="none")
    total = loss.sum() / n
    if o["actor_term"] > 0:
        done = loss.detach()
        for rows in batch.groups:
            for row in rows:
                seen = done[rows].sum() if o["actor_scope"] == "group" else done[row]
                total = total + o["actor_term"] / (n * o["beta"]) * seen * (proxy[row] - proxy[row].detach())
    found, labels = score.detach(), batch.labels
    for name, chosen in (("pos", found[labels == 1]), ("neg", found[labels == 0])):
        metrics[f"pacs/psi_mean_{name}"] = (float(chosen.mean()) if len(chosen) else 0.0, len(chosen))
    metrics["pacs/residual_mean"] = (float((found.sigmoid() - labels).abs().mean()), n)
    metrics["pacs/psi_over_8_frac"] = (float((found.abs() > 8).double().mean()), n)
    one_class = [len(set(labels[rows].tolist())) == 1 for rows in batch.groups]
    metrics["pacs/one_class_group_frac"] = (sum(one_class) / len(one_class), len(one_class))
    return total, metrics


def _pacs_scores(r: Tensor, o: Mapping[str, Any]) -> Sequence[Tensor]:
    """psi of one group from its proxies."""
    if o["score"] == "naive":
        return list(r)
    if o["score"] == "rloo":
        return [value - (r.sum() - value) / (len(r) - 1) for value in r]
    centred = r - r.mean()
    if o["score"] == "dr_grpo":
        return list(centred)
    is_constant = float(r.detach().std()) <= (o["score_std_floor"] or 0.0)
    return list(centred / ((torch.tensor(o["score_std_floor"] or 0.0) if is_constant else r.std()) + 1e-6))


def _kl(estimator: str, logp: Tensor, reference: Tensor) -> Tensor:
    q = reference - logp
    return -q if estimator == "k1" else 0.5 * q * q if estimator == "k2" else torch.expm1(q) - q


def _advantages(batch: Batch) -> Tensor:
    """[n]"""
    o, name = batch.options, batch.options["name"]
    if name == "w_reinforce":
        correct, wrong = {"both": (o["positive_weight"], -1.0), "positive": (1.0, 0.0), "negative": (0.0, -1.0)}[
            o["classes"]
        ]
        return torch.tensor([wrong, correct], dtype=torch.float64)[batch.labels.long()]
    rewards = batch.rewards.clone()
    if o.get("overlong_length") is not None:
        excess = (batch.lens - o["overlong_length"] + o["overlong_buffer"]) / o["overlong_buffer"]
        rewards = rewards - o["overlong_penalty"] * excess.clamp(0.0, 1.0)
    if o["kl_in"] == "reward":
        pairs = zip(batch.starts, batch.frozen, strict=True)
        rewards = rewards - o["kl_coef"] * torch.stack([_kl(o["kl_estimator"], *pair).sum() for pair in pairs])
    kind, advantage = o.get("advantage", name if name in ("dr_grpo", "rloo") else "grpo"), torch.zeros_like(rewards)
    for rows in batch.groups:
        own = rewards[rows]
        if len(set(own.tolist())) > 1:  # else every advantage is 0
            for row in rows:
                others = (own.sum() - rewards[row]) / (len(rows) - 1)
                centre = others if kind == "rloo" else own.mean()
                scale = own.std() + o.get("advantage_eps", 1e-6) if kind == "grpo" else 1.0
                advantage[row] = (rewards[row] - centre) / scale
    return advantage


def policy_gradient(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, policy gradients."""
    o, n, name = batch.options, len(batch.logps), batch.options["name"]
    advantage = _advantages(batch)
    is_counted = advantage != 0 if name == "w_reinforce" else torch.ones(n, dtype=torch.bool)
    tokens, total = float(batch.lens.sum()), torch.zeros((), dtype=torch.float64)
    clipped, kl, weights, cut, corrected = 0.0, 0.0, 0.0, 0.0, 0.0
    for row, (logp, a) in enumerate(zip(batch.logps, advantage.tolist(), strict=True)):
        # Of a sample's ratio with a weight for each token, each token has the sample's loss with its own derivative.
        by_token = name in ("gspo", "luspo", "rloo") and o["importance"] != "none"
        own = logp.detach().requires_grad_() if by_token else logp
        log_ratio, ones = own - batch.starts[row], torch.ones_like(own)
        ratio = (
            ones
            * {"gspo": log_ratio.mean(), "luspo": log_ratio.mean(), "rloo": log_ratio.sum()}.get(name, log_ratio).exp()
        )
        low, high = 1 - o.get("clip_low", 1.0), 1 + o["clip_high"]
        loss = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        if name == "cispo":
            loss = -ratio.clamp(max=high).detach() * a * logp
        is_high, is_low = ratio > high, (ratio < low) & (name != "cispo")
        clipped += int((is_high | is_low if name == "cispo" else is_high if a > 0 else is_low).sum()) if a else 0
        if o["importance"] != "none":
            w = batch.starts[row] - batch.sampler[row]
            w = ones.detach() * (w.sum() if o["importance_level"] == "sequence" else w).exp()
            outside = (w > o["importance_cap"]) | (w < (o["importance_floor"] or 0.0))
            factor = w.clamp(max=o["importance_cap"]) if o["importance"] == "truncate" else w * ~outside
            if by_token:
                loss = loss.detach() + torch.autograd.grad(loss.sum(), own)[0] * (logp - logp.detach())
            loss = loss * factor
            if a:
                weights, cut, corrected = weights + float(factor.sum()), cut + int(outside.sum()), corrected + len(w)
        if o["kl_coef"] > 0:
            estimate = _kl(o["kl_estimator"], logp, batch.frozen[row])
            loss, kl = loss + o["kl_coef"] * estimate * (o["kl_in"] == "loss"), kl + float(estimate.detach().sum())
        if o["entropy_coef"] > 0:
            loss = loss - o["entropy_coef"] * batch.entropies[row]
        mean = {"gspo": "sequence", "rloo": "sequence", "luspo": "sum", "dr_grpo": "dr_grpo"}.get(
            name, o.get("loss_mean", "token")
        )
        counted = float(batch.lens[is_counted].sum())
        divisor = {
            "token": counted,
            "sequence": n * len(logp),
            "sum": n,
            "dr_grpo": n * (o.get("constant_length") or 1),
        }
        total = total + loss.sum() / divisor[mean]
    metrics: Metrics = {
        "advantage_abs_mean": (float(advantage.abs().mean()), n),
        "zero_advantage_frac": (float((advantage == 0).double().mean()), n),
        "clip_frac": (clipped / tokens, tokens),
    }
    if o["kl_coef"] > 0:
        metrics["kl"] = (kl / tokens, tokens)
    if o["importance"] != "none":
        metrics["importance_mean"] = (weights / max(corrected, 1), corrected)
        metrics["importance_cut_frac"] = (cut / max(corrected, 1), corrected)
    return total, {f"{name}/{key}": value for key, value in metrics.items()}


def real(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, REAL and its BCE variant."""
    o, total, counted = batch.options, torch.zeros((), dtype=torch.float64), 0
    mixed = [rows for rows in batch.groups if 0 < float(batch.labels[rows].mean()) < 1]
    for rows in mixed:
        pairs = [(batch.logps[row] - batch.starts[row]).mean() / o["tau"] for row in rows]
        s, y = torch.stack(pairs), batch.labels[rows]
        if o["name"] == "real_bce":
            total = total + torch.nn.functional.binary_cross_entropy_with_logits(s, y, reduction="sum")
        else:
            total = total + torch.log1p((-s[y == 1]).exp().sum()) + torch.log1p(s[y == 0].exp().sum())
        counted += len(rows)
    total = total + 0.0 * torch.cat(batch.logps).sum()  # a graph, where every group has one class
    groups = len(batch.groups)
    metrics: Metrics = {f"{o['name']}/one_class_group_frac": (1 - len(mixed) / groups, groups)}
    return total / (groups if o["name"] == "real" else max(counted, 1)), metrics


def sft(batch: Batch) -> tuple[Tensor, Metrics]:
    """Mean negative log-likelihood over tokens, or the mean of each response's mean."""
    if batch.options["loss_mean"] == "token":
        return -torch.cat(batch.logps).mean(), {}
    return -torch.stack([logp.mean() for logp in batch.logps]).mean(), {}


OBJECTIVES: dict[str, Callable[[Batch], tuple[Tensor, Metrics]]] = {
    "pacs": pacs,
    "sft": sft,
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "rloo", "w_reinforce"), policy_gradient),
    **dict.fromkeys(("real", "real_bce"), real),
}


def _skips_zero_gradient(o: Mapping[str, Any]) -> bool:
    """Whether a step's first update leaves samples out whose gradient is exactly 0 (docs/metrics.md)."""
    if o["name"] == "pacs":
        return bool(o["reference"] == "step_start" and o["importance_cap"] is None)
    if o["name"] == "sft" or o.get("kl_coef", 0) > 0 or o.get("entropy_coef", 0) > 0:
        return False
    return bool(o.get("importance_level") != "sequence")


def _passes(o: Mapping[str, Any], index: int) -> Metrics:
    """Forward-only log-prob passes of update `index` (docs/objective.md)."""
    if o["name"] == "pacs":
        start, frozen = o["reference"] == "step_start" or o["importance_cap"] is not None, o["reference"] == "frozen"
    else:
        start, frozen = o["name"] != "sft", o.get("kl_coef", 0.0) > 0
    later = index > 0 or o.get("kl_in") == "reward"
    return {"passes/step_start": (float(start and later), 1.0), "passes/reference": (float(frozen), 1.0)}


# ------------------------------------------------------------------------------------------------------- model, optimizer
class Model:
    """A transformers model in float64. `named` gives parameters and their moments the names of a checkpoint."""

    def __init__(self, folder: Path, temperature: float) -> None:
        from transformers import AutoModelForCausalLM

        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):  # transformers' norms compute in float32
                module.forward = _Norm(module)
        self.temperature = temperature
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())

    def sample(self, ids: np.ndarray, prompt_len: int) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of one sample's response, with graph."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = self.model(tokens[None], use_cache=False).logits[0, prompt_len - 1 : -1]
        every = torch.log_softmax(logits / self.temperature, dim=-1)
        return every.gather(1, tokens[prompt_len:, None])[:, 0], -(every.exp() * every).sum(-1)

    def named(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """With one tensor for each expert's projection."""
        return {name: part.detach().numpy() for key, value in values.items() for name, part in _unstacked(key, value)}

    def copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(weights[name])


class _Norm:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Any:
        return self.module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.module.variance_epsilon)


def random_model(folder: Path, seed: int) -> None:
    """Writes weights for the config.json in `folder`, wide enough that a wrong one shows; norms differ from 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.12)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)


def _unstacked(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    base, _, last = name.rpartition(".experts.")
    if not base:
        yield name, value
    for number, expert in enumerate(value) if base else ():
        parts = {"down_proj": expert}
        if last != "down_proj":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2, dim=0), strict=True))
        yield from ((f"{base}.experts.{number}.{name}.weight", part) for name, part in parts.items())


class Adam:
    """AdamW with decoupled decay of matrices only, clipping by the global norm, and the schedule."""

    def __init__(self, parameters: Mapping[str, Tensor], o: Mapping[str, Any], clip: float, total: int) -> None:
        self.parameters, self.o, self.clip, self.total = parameters, o, clip, total
        self.reset()

    def reset(self) -> None:
        """Moments and bias correction start again."""
        self.count = 0
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def norm(self) -> float:
        return math.sqrt(sum(float(p.grad.pow(2).sum()) for p in self.parameters.values() if p.grad is not None))

    def rate(self, number: int) -> float:
        """Learning rate of the planned update `number`, from 1."""
        o, warmup = self.o, min(self.o["warmup_updates"], self.total - 1)
        if number <= warmup:
            return float(o["lr"] * number / warmup)
        if o["schedule"] == "constant":
            return float(o["lr"])
        last = self.total + (o["min_lr"] == 0)  # the last update has min_lr, unless it would change nothing
        done = (number - warmup) / (last - warmup)
        share = 1 - done if o["schedule"] == "linear" else (1 + math.cos(math.pi * done)) / 2
        return float(o["min_lr"] + share * (o["lr"] - o["min_lr"]))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        o, norm = self.o, self.norm()
        scale = self.clip / (norm + 1e-6) if 0 < self.clip < norm else 1.0
        self.count += 1
        b1, b2 = o["adam_beta1"], o["adam_beta2"]
        for name, p in self.parameters.items():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad * scale
            m = self.first[name].mul_(b1).add_(gradient, alpha=1 - b1) / (1 - b1**self.count)
            v = self.second[name].mul_(b2).add_(gradient * gradient, alpha=1 - b2) / (1 - b2**self.count)
            p *= 1 - lr * (o["weight_decay"] if p.ndim > 1 else 0.0)
            p -= lr * m / (v.sqrt() + o["adam_eps"])


# -------------------------------------------------------------------------------------------------------------- the loop
class Reference:
    """Trains the case in `folder` (case.json, steps.npz, model/) and writes `reference/` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.case: dict[str, Any] = json.loads((folder / "case.json").read_text())
        self.options = self.case["objective"]
        self.data: dict[str, Any] = dict(np.load(folder / "steps.npz"))
        self.model = Model(folder / "model", self.case["temperature"])
        total = self.case["steps"] * self.case["updates_per_step"]
        self.adam = Adam(self.model.parameters, self.case["optimizer"], self.case["clip_grad"], total)

    def logps(self, step: int, rows: Sequence[int] | None = None) -> tuple[Logps, Logps]:
        """(log-probs, entropies) of some samples, with a graph; None: of all, without."""
        tokens, prompt_lens = self.data[f"{step}.tokens"], self.data[f"{step}.prompt_lens"]
        bounds = np.cumsum([0, *(prompt_lens + self.data[f"{step}.response_lens"])])
        with torch.set_grad_enabled(rows is not None):
            wanted = range(len(prompt_lens)) if rows is None else rows
            found = [self.model.sample(tokens[bounds[r] : bounds[r + 1]], prompt_lens[r]) for r in wanted]
        return [f[0] for f in found], [f[1] for f in found]

    def minibatches(self, step: int) -> list[list[int]]:
        """Rows of each update: equal shares of the groups, in order."""
        groups = self.data[f"{step}.groups"]
        num, parts = int(groups.max()) + 1, min(self.case["updates_per_step"], int(groups.max()) + 1)
        bounds = [round(num * k / parts) for k in range(parts + 1)]
        return [[r for r, g in enumerate(groups) if bounds[k] <= g < bounds[k + 1]] for k in range(parts)]

    def batch(self, step: int, rows: list[int], own: tuple[Logps, Logps], starts: Logps, frozen: Logps) -> Batch:
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
            starts=[starts[row] for row in rows],
            frozen=[frozen[row] for row in rows],
            sampler=[torch.from_numpy(sampler[row]) for row in rows],
        )

    def prepare(self) -> None:
        """Completes the case: the sampler's log-probs are those of the first weights plus the noise, and clip_grad is a
        norm that some updates exceed."""
        norms = []
        for step in range(1, self.case["steps"] + 1):
            starts = self.logps(step)[0]
            self.data[f"{step}.sampler"] = (torch.cat(starts).numpy() + self.data[f"{step}.noise"]).astype(np.float32)
            for rows in self.minibatches(step) if self.case["clip_grad"] else []:
                self.model.model.zero_grad()
                batch = self.batch(step, rows, self.logps(step, rows), starts, starts)
                torch.autograd.backward(OBJECTIVES[self.options["name"]](batch)[0])
                norms.append(self.adam.norm())
        np.savez(self.folder / "steps.npz", **self.data)
        if norms:
            low, high = sorted(norms)[(len(norms) - 1) // 2 : (len(norms) + 3) // 2]
            self.case["clip_grad"] = math.sqrt(low * high)
        (self.folder / "case.json").write_text(json.dumps(self.case))

    def train(self) -> None:
        """All updates of the case."""
        (self.folder / "reference").mkdir()
        updates: list[dict[str, Any]] = []
        frozen_weights = self.model.copy()
        for step in range(1, self.case["steps"] + 1):
            starts, own = self.logps(step)[0], self.model.copy()
            self.model.set(frozen_weights)
            frozen = self.logps(step)[0]
            self.model.set(own)
            for index, rows in enumerate(self.minibatches(step)):
                arrays, numbers = self._update(step, index, rows, starts, frozen)
                updates.append(numbers)
                np.savez(self.folder / "reference" / f"update_{len(updates)}.npz", **arrays)
            reset = self.options.get("reset_every")
            if reset and step % reset == 0:
                frozen_weights = self.model.copy()
                self.adam.reset()
        for kind, values in (("exp_avg", self.adam.first), ("exp_avg_sq", self.adam.second)):
            np.savez(self.folder / "reference" / f"{kind}.npz", **self.model.named(values))
        (self.folder / "reference" / "updates.json").write_text(json.dumps(updates))

    def _update(
        self, step: int, index: int, rows: list[int], starts: Logps, frozen: Logps
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arrays, numbers) of one update."""
        o, case, n = self.options, self.case, len(rows)
        self.model.model.zero_grad()
        logps, entropies = self.logps(step, rows)
        for logp in logps:
            logp.retain_grad()
        batch = self.batch(step, rows, (logps, entropies), starts, frozen)
        loss, metrics = OBJECTIVES[o["name"]](batch)
        torch.autograd.backward(loss)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in logps]
        least = 1e-12 * max(float(c.abs().max()) for c in slopes)
        skips = index == 0 and _skips_zero_gradient(o)
        skipped = [skips and float(c.abs().max()) <= least for c in slopes]
        norm, lr = self.adam.norm(), self.adam.rate((step - 1) * case["updates_per_step"] + index + 1)
        self.adam.step(lr)
        seen = [k for k in range(n) if not skipped[k]]
        if seen:
            forward = [torch.cat([values[k].detach() for k in seen]) for values in (logps, entropies, batch.sampler)]
            metrics |= _token_metrics(forward[0], forward[1], forward[2], case)
        metrics |= _passes(o, index) | {"objective/loss": (float(loss.detach()), n)}
        if o["name"] != "sft":
            metrics[f"{o['name']}/truncated_frac"] = (float(self.data[f"{step}.truncated"][rows].mean()), n)
        arrays = {f"weight {name}": value for name, value in self.model.named(self.model.parameters).items()}
        sources = {"update": logps, "coefficient": slopes, "start": batch.starts, "reference": batch.frozen}
        arrays |= {name: torch.cat(values).detach().numpy() for name, values in sources.items()}
        return arrays, {
            "step": step,
            "ids": [case["ids"][str(step)][row] for row in rows],
            "lens": [len(logp) for logp in logps],
            "skipped": skipped,
            "grad_norm": norm,
            "is_clipped": 0 < case["clip_grad"] < norm,
            "lr": lr,
            "metrics": metrics,
        }


def _token_metrics(logps: Tensor, entropies: Tensor, sampler: Tensor, case: Mapping[str, Any]) -> Metrics:
    """docs/metrics.md: policy/* and mismatch/* over the tokens of the update's forward pass."""
    count, q = float(len(logps)), logps - sampler
    found = {"policy/entropy": entropies.mean(), "policy/logprob_mean": logps.mean()}
    if case["is_sampled"]:
        found |= {
            "mismatch/logprob_abs_mean": q.abs().mean(),
            "mismatch/logprob_abs_max": q.abs().max(),
            "mismatch/ratio": q.mean().exp(),
            "mismatch/kl": (q.exp() - 1 - q).mean(),
            "mismatch/over_frac": (q.abs() > case["mismatch_threshold"]).double().mean(),
        }
    return {name: (float(value), count) for name, value in found.items()}
