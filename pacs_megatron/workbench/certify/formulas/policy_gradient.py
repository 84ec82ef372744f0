"""The clipped policy gradients.

PPO arXiv:1707.06347, GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783, GSPO
arXiv:2507.18071, LUSPO arXiv:2602.05261, CISPO arXiv:2506.13585, RLOO arXiv:2402.14740, REINFORCE++
arXiv:2501.03262, W-REINFORCE arXiv:2506.01347. Numbers in brackets are equations of the paper that
they follow. Three rules are in no paper: the factor |o| of LUSPO (TRL), the biased variance of
REINFORCE++ and its floor (the authors' code), and W-REINFORCE's mean over the trained samples alone
(the authors' code cuts the batch first). MaxRL and DGPO are written from their authors' code
(tajwarfahim/maxrl c0698eb, AMAP-ML/MathForge 83edda0), on-policy distillation from GKD
(arXiv:2306.13649). STEER's weight and its bound of the ratio are those of zz-haooo/STEER b31df71,
UCAS's advantages those of xvolcano02/UCAS b122ff2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pacs_megatron.workbench.certify.formulas.batch import (
    Batch,
    Metrics,
    Options,
    PerSample,
    mean_and_count,
)

MAX_LOG_RATIO = 20.0
"""nats; what the project adds to the papers: exp(log-ratio) is a constant above it"""


def policy_gradient(batch: Batch) -> tuple[Tensor, Metrics]:
    """The sum over the tokens of trained samples of (w l(rho, A) + kl_coef k - entropy_coef H),
    divided by `divisor`.
    """
    advantages = token_advantages(batch)
    weights = token_weights(batch, advantages)
    trained = trained_samples(batch)
    lens = [batch.lens[row] for row in trained]

    loss = 0.0 * torch.cat(batch.logprobs).sum()  # a mini-batch may have no trained sample
    terms: dict[int, TokenTerms] = {}
    for row in trained:
        terms[row] = token_terms(batch, row, advantages[row], weights[row])
        loss = loss + terms[row].loss.sum() / divisor(batch.options, lens, batch.lens[row])
    return loss, metrics(batch, advantages, terms)


def trained_samples(batch: Batch) -> list[int]:
    """The samples that the loss contains: all, but PSR's are the correct ones and NSR's the
    incorrect ones.
    """
    wanted = {"positive": 1.0, "negative": 0.0}.get(batch.options.get("classes", "both"))
    labels = batch.labels.tolist()
    return [row for row in range(batch.size) if wanted in (None, labels[row])]


# The advantage A.


def token_advantages(batch: Batch) -> PerSample:
    """A of each token: a critic's, or the advantage of its sample."""
    if batch.advantages is not None:
        return batch.advantages

    if batch.options["name"] == "ucas":
        shaped = ucas_advantages(batch.step or batch)
        return [shaped[row] for row in batch.rows]
    of_samples = zip(sample_advantages(batch), batch.lens, strict=True)
    of_tokens = [advantage.expand(length) for advantage, length in of_samples]
    if batch.options["name"] == "distill":
        for row, start in enumerate(batch.start_logprobs):
            of_tokens[row] = of_tokens[row] + batch.frozen_logprobs[row] - start
    return of_tokens


def sample_advantages(batch: Batch) -> Tensor:
    """A of each sample, [n]."""
    match batch.options["name"]:
        case "w_reinforce":
            return w_reinforce_advantages(batch)
        case "reinforce_pp":
            return reinforce_pp_advantages(batch.step or batch)[batch.rows]
        case "dgpo":
            return dgpo_advantages(batch.step or batch)[batch.rows]
        case "distill" if batch.options["label_coef"] == 0:
            return torch.zeros(batch.size, dtype=torch.float64)

    rewards = penalised_rewards(batch)
    advantages = torch.zeros_like(rewards)
    for rows in batch.groups:
        # Equal rewards have an advantage of exactly 0, also where their mean is rounded.
        is_equal = bool((rewards[rows] == rewards[rows[0]]).all())
        if not is_equal:
            advantages[rows] = group_advantages(rewards[rows], batch.options["name"])
    return advantages * float(batch.options.get("label_coef", 1.0))


def group_advantages(rewards: Tensor, name: str) -> Tensor:
    """A of one group from its rewards R, [G]."""
    match name:
        case "dr_grpo":
            return rewards - rewards.mean()
        case "rloo":
            advantages = []
            for i in range(len(rewards)):
                siblings = torch.cat([rewards[:i], rewards[i + 1 :]])
                advantages.append(rewards[i] - siblings.mean())
            return torch.stack(advantages)
        case "maxrl":
            return (rewards - rewards.mean()) / (rewards.mean() + 1e-6)
        case _:
            # GRPO (section 4.1.2), DAPO (9), GSPO (6), CISPO.
            return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def reinforce_pp_advantages(step: Batch) -> Tensor:
    """REINFORCE++: R scaled over all tokens of the rollout batch, [n]."""
    rewards = penalised_rewards(step)
    if step.options["baseline"] == "group":
        for rows in step.groups:
            rewards[rows] = rewards[rows] - rewards[rows].mean()

    of_tokens = rewards.repeat_interleave(torch.tensor(step.lens))
    variance = of_tokens.var(correction=0).clamp(min=1e-8)
    return (rewards - of_tokens.mean()) / variance.sqrt()


def dgpo_advantages(step: Batch) -> Tensor:
    """DGPO: of a whole rollout batch, [n]; 0 in groups of equal rewards, which count nowhere."""
    rewards = penalised_rewards(step)
    advantages = torch.zeros_like(rewards)
    mixed = [rows for rows in step.groups if bool((rewards[rows] != rewards[rows[0]]).any())]
    if not mixed:
        return advantages

    difficulties = []
    for rows in mixed:
        accuracy = float(step.labels[rows].mean())
        difficulties.append(-1.0 if accuracy == 0.0 else -accuracy)
    weights = torch.ones(len(mixed), dtype=torch.float64)
    temperature = step.options["difficulty_temperature"]
    if temperature is not None:
        exponentials = (torch.tensor(difficulties, dtype=torch.float64) / temperature).exp()
        weights = len(mixed) * exponentials / exponentials.sum()

    num_tokens = 0
    for rows in mixed:
        num_tokens += sum(step.lens[row] for row in rows)
    for rows, weight in zip(mixed, weights, strict=True):
        difference = rewards[rows] - rewards[rows].mean()
        balanced = len(rows) * difference / (difference.abs().sum() + 1e-4)
        advantages[rows] = balanced * sum(step.lens) / num_tokens * weight
    return advantages


def ucas_advantages(step: Batch) -> PerSample:
    """UCAS: A of each token of a whole rollout batch."""
    o = step.options
    assert step.logits is not None
    of_batch = torch.cat(step.logits)
    least = of_batch.min()
    largest = of_batch.max()
    shaped = certain_advantages(step)
    advantages = []
    for row, logits in enumerate(step.logits):
        normalised = (logits - least) / (largest - least + 1e-6)
        if bool(torch.isclose(largest, least)):
            normalised = torch.full_like(logits, 0.5)
        advantage = shaped[row] - o["logit_coef"] * normalised
        advantages.append(advantage.clamp(min=0.0) if shaped[row] > 0 else advantage)
    return advantages


def certain_advantages(step: Batch) -> Tensor:
    """UCAS: A' of each sample of a whole rollout batch, [n]."""
    o = step.options
    rewards = penalised_rewards(step)
    assert step.certainties is not None
    certainties = torch.stack([certainty.sum() for certainty in step.certainties])
    advantages = torch.zeros_like(rewards)
    for rows in step.groups:
        if bool((rewards[rows] == rewards[rows[0]]).all()):
            continue
        advantage = group_advantages(rewards[rows], "ucas")
        of_group = certainties[rows]
        score = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
        of_correct = advantage * torch.exp(-o["correct_coef"] * score)
        of_wrong = advantage * torch.exp(o["wrong_coef"] * score)
        advantages[rows] = torch.where(advantage > 0, of_correct, of_wrong)
    return advantages


def w_reinforce_advantages(batch: Batch) -> Tensor:
    """A is the reward, 1 or -1, and W-REINFORCE weights the correct responses. [n], 0 for samples
    that PSR or NSR does not train.
    """
    o = batch.options
    of_correct = o["positive_weight"] if o["classes"] == "both" else 1.0
    advantages = torch.zeros_like(batch.labels)
    for row in trained_samples(batch):
        is_correct = float(batch.labels[row]) == 1.0
        advantages[row] = of_correct if is_correct else -1.0
    return advantages


def token_weights(batch: Batch, advantages: PerSample) -> PerSample:
    """STEER's w of each token, without gradient; 1 of all other objectives."""
    if batch.options["name"] != "steer":
        return [torch.ones_like(advantage) for advantage in advantages]

    changes = []
    for row, advantage in enumerate(advantages):
        p = batch.logprobs[row].detach().exp().clamp(1e-8, 1 - 1e-8)
        start = batch.start_logprobs[row].exp().clamp(1e-8, 1)
        slope = p * (1 - p) * (p.log() + batch.entropies[row].detach())
        changes.append((advantage / start * slope).abs())
    largest = max(0.02, float(torch.cat(changes).max()))
    return [batch.options["weight_min"] ** (change / largest) for change in changes]


def penalised_rewards(batch: Batch) -> Tensor:
    """R of each sample, [n], with DAPO's punishment of length and the KL of `kl_in: reward`."""
    o = batch.options
    rewards = batch.rewards.clone()
    for row, length in enumerate(batch.lens):
        if o.get("overlong_length") is not None:
            share = overlong_punishment(length, o["overlong_length"], o["overlong_buffer"])
            rewards[row] += o["overlong_penalty"] * share
        if o["kl_in"] == "reward":
            start = batch.start_logprobs[row]
            kl = kl_estimate(o["kl_estimator"], start, batch.frozen_logprobs[row])
            rewards[row] -= o["kl_coef"] * kl.sum()
    return rewards


def overlong_punishment(length: int, longest: int, buffer: int) -> float:
    """DAPO (13), between -1 and 0."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return (longest - buffer - length) / buffer
    return -1.0


# The loss of a token.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The tokens of one response, [response] each."""

    loss: Tensor
    """w l(rho, A) + kl_coef k - entropy_coef H, with graph"""
    weight: Tensor
    """STEER's w"""
    is_clipped: Tensor
    """bool: the clip takes the gradient, or bounds the weight (CISPO)"""
    kl: Tensor
    """k, without graph"""
    importance: Tensor
    """w"""
    is_cut: Tensor
    """bool: w is a bound or 0 instead of the ratio"""


def token_terms(batch: Batch, row: int, advantage: Tensor, weight: Tensor) -> TokenTerms:
    """The terms of the loss of sample `row`, whose tokens have `advantage` [response] and STEER's
    `weight` [response].
    """
    o = batch.options
    rho = policy_ratio(batch, row)
    high = 1 + o["clip_high"]
    if o["name"] == "cispo":
        loss, is_clipped = cispo_loss(rho, advantage, batch.logprobs[row], high)
    else:
        loss, is_clipped = clipped_loss(rho, advantage, 1 - o["clip_low"], high)
    if "ratio_max" in o:
        is_bounded = (advantage < 0) & (rho > o["ratio_max"])
        loss = weight * torch.where(is_bounded, -advantage * o["ratio_max"], loss)
        is_clipped = is_clipped | is_bounded
    if o["name"] == "vimpo":
        loss = o["actor_coef"] * loss

    importance, is_cut = importance_weight(batch, row)
    loss = importance * loss

    kl = torch.zeros_like(loss)
    if o["kl_coef"] > 0:
        kl = kl_estimate(o["kl_estimator"], batch.logprobs[row], batch.frozen_logprobs[row])
    if o["kl_in"] == "loss":
        loss = loss + o["kl_coef"] * kl
    if o["entropy_coef"] > 0:
        loss = loss - o["entropy_coef"] * batch.entropies[row]
    return TokenTerms(
        loss=loss,
        weight=weight,
        is_clipped=is_clipped,
        kl=kl.detach(),
        importance=importance,
        is_cut=is_cut,
    )


def clipped_loss(rho: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """l of PPO (7), GRPO (3), DAPO (8), GSPO (5), and whether the clip takes the gradient."""
    loss = -torch.minimum(rho * advantage, rho.clamp(low, high) * advantage)
    is_too_high = (advantage > 0) & (rho > high)
    is_too_low = (advantage < 0) & (rho < low)
    return loss, is_too_high | is_too_low


def cispo_loss(
    rho: Tensor, advantage: Tensor, logprob: Tensor, high: float
) -> tuple[Tensor, Tensor]:
    """l of CISPO (4), (5), whose clipped ratio is a weight without gradient, and where it clips."""
    weight = rho.detach().clamp(max=high)
    is_clipped = (rho > high) & (advantage != 0)
    return -weight * advantage * logprob, is_clipped


def policy_ratio(batch: Batch, row: int) -> Tensor:
    """rho = pi_theta / pi_step_start of each token, or of its response; [response]."""
    o = batch.options
    logprob = batch.logprobs[row]
    log_ratio = logprob - batch.start_logprobs[row]
    length = len(logprob)
    if o["name"] in ("gspo", "luspo"):
        of_response = log_ratio.mean()  # GSPO (7)
        own = logprob
    elif o["name"] == "rloo":
        of_response = log_ratio.sum()
        own = length * logprob
    else:
        return limited_exp(log_ratio)

    if o["importance_level"] == "token":
        # A weight w for each token needs a term for each token. GSPO-token (section 4.3) gives it
        # the value of the response's ratio and the derivative by the token's own log-prob.
        return limited_exp(of_response.detach() + own - own.detach())
    return limited_exp(of_response.expand(length))


def limited_exp(log_ratio: Tensor) -> Tensor:
    """exp, a constant above MAX_LOG_RATIO."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def importance_weight(batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """w of each token, and whether it is a bound or 0 instead of the ratio; [response] each."""
    o = batch.options
    start = batch.start_logprobs[row]
    if o["importance"] == "none":
        return torch.ones_like(start), torch.zeros_like(start, dtype=torch.bool)

    log_ratio = start - batch.sampler_logprobs[row]
    if o["importance_level"] == "sequence":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    w = limited_exp(log_ratio)
    cap = o["importance_cap"]
    floor = o["importance_floor"] or 0.0

    is_cut = (w > cap) | (w < floor)
    if o["importance"] == "mask":
        return torch.where(is_cut, 0.0, w), is_cut
    return w.clamp(max=cap), is_cut


def kl_estimate(estimator: str, logprob: Tensor, reference: Tensor) -> Tensor:
    """k of each token (joschu.net/blog/kl-approx.html; k3 is GRPO's (4))."""
    q = reference - logprob
    match estimator:
        case "k1":
            return -q
        case "k2":
            return q * q / 2
        case _:
            q = q.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(q) - q


# The mean.


def divisor(o: Options, lens: list[int], length: int) -> float:
    """The divisor of the summed token losses of a sample of `length` tokens.

    Args:
        lens: tokens of each trained sample.
    """
    n = len(lens)
    match loss_mean(o):
        case "sequence":  # GRPO (3), GSPO (5), RLOO
            return n * length
        case "sum":  # LUSPO
            return n
        case "dr_grpo":
            return n * int(o["constant_length"])
        case _:  # DAPO (8)
            return sum(lens)


def loss_mean(o: Options) -> str:
    """The mean of an objective: fixed by its paper, or an option."""
    match o["name"]:
        case "gspo" | "rloo":
            return "sequence"
        case "luspo":
            return "sum"
        case "dr_grpo":
            return "dr_grpo"
        case "w_reinforce":
            return "token"
        case _:
            return str(o["loss_mean"])


def metrics(batch: Batch, advantages: PerSample, terms: dict[int, TokenTerms]) -> Metrics:
    """The metrics of docs/objective.md.

    Args:
        terms: of the trained samples, by row.
    """
    o = batch.options
    has_teacher = o["name"] == "distill"
    has_gradient = o["name"] in ("distill", "vimpo", "ucas")
    sizes = torch.stack([advantage.abs().mean() for advantage in advantages])
    if has_teacher:
        sizes = sample_advantages(batch).abs()
    if o["name"] == "ucas":
        sizes = certain_advantages(batch.step or batch)[batch.rows].abs()
    trained = list(terms.values())
    values = {
        "advantage_abs_mean": mean_and_count(sizes),
        "zero_advantage_frac": mean_and_count(sizes == 0),
        "clip_frac": of_tokens([one.is_clipped for one in trained]),
    }
    if o["name"] == "steer":
        values["weight_mean"] = of_tokens([one.weight for one in trained])
    if o["kl_coef"] > 0:
        values["kl"] = of_tokens([one.kl for one in trained])
    if o["importance"] != "none":
        corrected = [one for row, one in terms.items() if has_gradient or sizes[row] != 0]
        values["importance_mean"] = of_tokens([one.importance for one in corrected])
        values["importance_cut_frac"] = of_tokens([one.is_cut for one in corrected])
    if has_teacher:
        of_samples = zip(batch.logprobs, batch.frozen_logprobs, strict=True)
        values["kl"] = of_tokens([(own - teacher).detach() for own, teacher in of_samples])
    return {f"{o['name']}/{name}": value for name, value in values.items()}


def of_tokens(values: PerSample) -> tuple[float, float]:
    """(mean, count) over the tokens of some samples, of which there may be none."""
    return mean_and_count(torch.cat([torch.zeros(0), *values]))
