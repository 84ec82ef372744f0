"""GRPO (arXiv:2402.03300) and its relatives: Dr. GRPO (arXiv:2503.20783), RLOO, DAPO's clip-higher and token mean.

Minimised: sum over trained tokens of u_i * (-min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef * k3), where u_i
contains every divisor. rho is exp(log pi_theta - log pi_step_start).

`importance` corrects for off-policy samples (older weights, or an engine that computes other log-probs): it multiplies
the first term by the token's ratio w = exp(log pi_step_start - log pi_sampler), without gradient, truncated (as in
IMPALA, arXiv:1802.01561) or masked outside a band. It does not change the KL term.
"""

import numpy as np
import torch

from pacs_megatron.config.objective_options import GrpoOptions
from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.groups import Groups, build_table, groups_of
from pacs_megatron.objectives.lookup import at_tokens
from pacs_megatron.objectives.means import mean_weights
from pacs_megatron.objectives.uncoupled import UncoupledObjective

MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are clamped here (no gradient above): exp would overflow, and Inf * 0 in a clipped branch is NaN."""


class Grpo(UncoupledObjective):
    """The GRPO family; see `contracts.Objective` for the protocol."""

    name = "grpo"

    def __init__(self, options: GrpoOptions) -> None:
        self._options = options

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        """`step_start` for the ratios from the second update on, `reference` for the KL term."""
        passes: set[LogprobSource] = set()
        if update_index > 0:
            passes.add("step_start")
        if self._options.kl_coef > 0:
            passes.add("reference")
        return frozenset(passes)

    def prepare_step(self, facts: SampleFacts) -> dict[str, float]:
        """Advantage of each sample id, from the rewards of the whole rollout batch's groups.

        Does not depend on the order of the rows, bit for bit. Raises NonFiniteError for a NaN or Inf among the rewards.
        """
        table = build_table(facts)
        order = table.rows.numpy()
        rewards = facts.rewards[order]
        bad = np.flatnonzero(~np.isfinite(rewards))
        if len(bad):
            raise NonFiniteError(
                f"reward of sample {facts.ids[order[bad[0]]]} is {rewards[bad[0]]}; expected a finite number"
            )
        advantages = self._scaled(torch.from_numpy(rewards), groups_of(table))
        return {facts.ids[row]: advantage for row, advantage in zip(order, advantages.tolist(), strict=True)}

    def prepare(self, scores: torch.Tensor | None, facts: SampleFacts, step_inputs: dict[str, float]) -> Prepared:
        """Per sample [n] float64: `advantage`, and `token_weight` u_i with every divisor inside."""
        advantage = torch.tensor([step_inputs[sample_id] for sample_id in facts.ids], dtype=torch.float64)
        weights = mean_weights(facts.response_lens, self._options.loss_mean, self._options.constant_length)
        num_samples = facts.num_samples
        no_gradient = advantage == 0.0
        # The engine may leave samples of zero advantage out, so importance is a mean over the tokens of the others.
        num_tokens = float(facts.response_lens[~no_gradient.numpy()].sum())
        return Prepared(
            per_sample={
                "advantage": advantage,
                "token_weight": torch.from_numpy(weights),
                "importance_share": (~no_gradient).double() / max(num_tokens, 1.0),
            },
            denominators={"grpo/importance_mean": num_tokens, "grpo/importance_cut_frac": num_tokens}
            | {name: float(facts.response_lens.sum()) for name in ("grpo/clip_frac", "grpo/kl")},
            metrics={
                "grpo/advantage_abs_mean": float(np.abs(advantage.numpy()).sum()) / num_samples,
                "grpo/zero_advantage_frac": float(no_gradient.sum()) / num_samples,
                "grpo/truncated_frac": float(facts.truncated.sum()) / num_samples,
            },
            zero_gradient=no_gradient if self._options.kl_coef == 0 else None,
        )

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> torch.Tensor:
        """[t]; its masked sum is the true loss."""
        dtype = tokens.logprobs.dtype
        advantage = at_tokens(prepared.per_sample["advantage"], tokens).to(dtype)
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(dtype)
        ratio = self._ratio(tokens)
        clipped = ratio.clamp(1.0 - self._options.clip_low, 1.0 + self._options.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        importance = self._importance(tokens)
        if importance is not None:
            loss = loss * importance
        if self._options.kl_coef > 0:
            loss = loss + self._options.kl_coef * _k3(tokens)
        return weight * loss

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, torch.Tensor]:
        """`grpo/clip_frac`, the share of all trained tokens where clipping stops the gradient, and with kl_coef > 0
        `grpo/kl` (k3, nats), their mean. With importance: `grpo/importance_mean` and `grpo/importance_cut_frac`, over
        the tokens of samples whose advantage is not zero: groups with equal rewards are not in it."""
        num_tokens = tokens.response_lens.sum().clamp(min=1)
        advantage = at_tokens(prepared.per_sample["advantage"], tokens)
        ratio = self._ratio(tokens)
        too_high = (advantage > 0) & (ratio > 1.0 + self._options.clip_high)
        too_low = (advantage < 0) & (ratio < 1.0 - self._options.clip_low)
        metrics = {"grpo/clip_frac": (too_high | too_low).to(ratio.dtype) / num_tokens}
        importance = self._importance(tokens)
        if importance is not None:
            share = at_tokens(prepared.per_sample["importance_share"], tokens)
            metrics["grpo/importance_mean"] = importance * share
            metrics["grpo/importance_cut_frac"] = self._is_cut(self._sampler_ratio(tokens)) * share
        if self._options.kl_coef > 0:
            metrics["grpo/kl"] = _k3(tokens) / num_tokens
        return metrics

    def _ratio(self, tokens: TokenRecord) -> torch.Tensor:
        """[t], rho, with gradient, also where its value is 1 by construction."""
        return torch.exp((tokens.logprobs - self._step_start(tokens)).clamp(max=MAX_LOG_RATIO))

    def _step_start(self, tokens: TokenRecord) -> torch.Tensor:
        """[t], log pi_step_start."""
        if tokens.step_start_logprobs is None:
            raise ValueError("objective: grpo needs step_start log-probs, got none")
        return tokens.step_start_logprobs

    def _importance(self, tokens: TokenRecord) -> torch.Tensor | None:
        """[t], the factor of the policy-gradient term, without gradient; None when there is no correction."""
        cap = self._options.importance_cap
        if cap is None:
            return None
        ratio = self._sampler_ratio(tokens)
        if self._options.importance == "mask":
            return torch.where(self._is_cut(ratio), torch.zeros_like(ratio), ratio)
        return ratio.clamp(max=cap)

    def _is_cut(self, ratio: torch.Tensor) -> torch.Tensor:
        """bool [t], where `_importance` is not the ratio itself."""
        cap, floor = self._options.importance_cap, self._options.importance_floor
        too_high = ratio > (float("inf") if cap is None else cap)
        return too_high if floor is None else too_high | (ratio < floor)

    def _sampler_ratio(self, tokens: TokenRecord) -> torch.Tensor:
        """[t], w = pi_step_start / pi_sampler of the sampled tokens."""
        if tokens.sampler_logprobs is None:
            raise ValueError("objective: grpo with importance needs the sampler's log-probs, got none")
        log_ratio = self._step_start(tokens).detach() - tokens.sampler_logprobs
        return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))

    def _scaled(self, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[m], the advantages."""
        centred = groups.centred(rewards)
        match self._options.advantage:
            case "dr_grpo":
                return centred
            case "rloo":
                return centred * (groups.sizes / (groups.sizes - 1.0))[groups.of_sample]
            case "grpo":
                if self._options.advantage_eps is None:
                    raise ValueError("objective: advantage grpo without advantage_eps")
                return centred / (groups.std(centred) + self._options.advantage_eps)[groups.of_sample]


def _k3(tokens: TokenRecord) -> torch.Tensor:
    """[t], nats: exp(q) - q - 1 with q = log pi_reference - log pi_theta; unbiased for KL(pi_theta || reference)."""
    if tokens.reference_logprobs is None:
        raise ValueError("objective: grpo with kl_coef > 0 needs reference log-probs, got none")
    log_ratio = (tokens.reference_logprobs - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
