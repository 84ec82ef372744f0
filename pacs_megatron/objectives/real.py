"""REAL, rewards as labels (arXiv:2602.05630), and its BCE variant: classification of the mean
log-ratio.

    s = mean_t(log pi_theta - log pi_step_start)

REAL: per group log(1 + sum over correct i of exp(-s_i / tau)) + log(1 + sum over incorrect j of
exp(s_j / tau)), summed over groups with both classes and divided by all groups of the mini-batch.
BCE: cross entropy of sigmoid(s / tau) against the label, mean over the samples of groups with both
classes. tau = 0.5. The formulas are those of the authors' code (Red-RL/REAL:
compute_policy_loss_real, compute_policy_loss_bce). Its scripts have no KL and no entropy term, and
use `delta` in a metric only.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import Field

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import Coupling, LogprobSource, Statistic
from pacs_megatron.objectives.shared.base import (
    CommonOptions,
    Objective,
    StepInputs,
    at_tokens,
    required,
)
from pacs_megatron.objectives.shared.groups import build_table, by_row
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable
from pacs_megatron.objectives.shared.scores import one_class, sample_loss


class RealOptions(CommonOptions):
    """REAL: classification of correct and incorrect responses within a group by their mean
    log-ratio.
    """

    name: Literal["real"]
    """Name of the objective."""
    tau: float = Field(default=0.5, gt=0)
    """Temperature of the classification."""


class Real(Objective, options=RealOptions):
    """REAL; see `Objective` for the protocol."""

    coupling: Coupling = "group"
    passes: Mapping[LogprobSource, int] = {"step_start": 1}
    coupled_by: Mapping[Statistic, int] = {"score": 1}
    """at the first update every s is 0"""
    options: RealOptions

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """Each token's part of s, float64 [t].

        Raises:
            ValueError: the step-start log-probs are missing.
        """
        step_start = required(tokens.step_start_logprobs, "step_start log-probs")
        lens = at_tokens(tokens.response_lens, tokens).clamp(min=1).double()
        return (tokens.logprobs.double() - step_start.double()) / lens

    def known(self, facts: SampleFacts, step_inputs: StepInputs) -> dict[str, Tensor]:
        """`share` 1 / Q of each sample's group, 0 in groups of one class; float64 [n]."""
        table = build_table(facts)
        has_two_classes = ~one_class(table.labels, table)
        counted = has_two_classes.double()[table.group_of_sample]
        return {"share": by_row(counted / self._divisor(counted, table.num_groups), table)}

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Coefficients and losses of coupled samples.

        Args:
            table: m samples in whole groups.
            scores: [m], float64, s; None: the first update, where s is 0.
            sampler_ratios: not used.
            known: `share`, float64 [m].

        Returns:
            float64 [m] each: `coefficient`, the derivative of the loss by each token's log-prob,
            and `loss` of the sample.
        """
        s = torch.zeros_like(table.labels) if scores is None else scores
        loss, slope = self._loss(s / self.options.tau, table)
        lens = table.response_lens.clamp(min=1.0)
        return {
            "coefficient": known["share"] * slope / (self.options.tau * lens),
            "loss": known["share"] * loss,
        }

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Per sample, float64 [n]: `coefficient`; see `couple`."""
        table = build_table(facts)
        known = {
            name: values[table.rows] for name, values in self.known(facts, step_inputs).items()
        }
        table_scores = None if scores is None else scores[table.rows]
        coupled = self.couple(table, table_scores, None, known)

        coefficient = by_row(coupled["coefficient"], table)
        one_class_frac = float(one_class(table.labels, table).double().mean())
        return Prepared(
            per_sample={"coefficient": coefficient},
            loss=float(coupled["loss"].sum()),
            metrics={
                f"{self.name}/one_class_group_frac": one_class_frac,
                f"{self.name}/truncated_frac": float(facts.truncated.sum()) / facts.num_samples,
            },
            denominators={f"{self.name}/one_class_group_frac": float(table.num_groups)},
            zero_gradient=coefficient == 0.0,
        )

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Coefficient times log-prob of each token, [t].

        This is a surrogate, not the loss: the gradient of its sum is the gradient of the loss.
        """
        coefficient = at_tokens(prepared.per_sample["coefficient"], tokens)
        return coefficient.to(tokens.logprobs.dtype) * tokens.logprobs

    def _divisor(self, counted: Tensor, num_groups: int) -> Tensor | int:
        """Number of all groups: groups of one class count, although they have no loss.

        Args:
            counted: [m], 1 for samples of groups with both classes, else 0.
        """
        return num_groups

    def _loss(self, logits: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
        """The loss of each group, and its derivative.

        Args:
            logits: [m], s / tau.

        Returns:
            (each sample's share of its group's loss, derivative of the group's loss by the
            sample's logit), [m] each.
        """
        sign = 1.0 - 2.0 * table.labels
        exponents = sign * logits
        is_correct = table.labels == 1.0

        # exp of the distance to the largest exponent of the class neither overflows nor is 0 in
        # every sample.
        largest = _of_own_class(table.largest, exponents, is_correct, table, absent=float("-inf"))
        terms = (exponents - largest).exp()
        class_sum = _of_own_class(table.total, terms, is_correct, table, absent=0.0)
        log_sum = largest + class_sum.log()

        # log(1 + exp(log_sum)) and its derivative. A sample's part of both is its part of the sum.
        share = terms / class_sum
        loss = log_sum.clamp(min=0.0) + (-log_sum.abs()).exp().log1p()
        return share * loss, sign * share * log_sum.sigmoid()


def _of_own_class(
    reduce: Callable[[Tensor], Tensor],
    values: Tensor,
    is_correct: Tensor,
    table: SampleTable,
    *,
    absent: float,
) -> Tensor:
    """`reduce` by group over the samples of each sample's own class.

    Args:
        reduce: [m] -> [g].
        values: [m].
        is_correct: [m], bool.
        table: of the m samples.
        absent: the value that does not change the result of `reduce`.

    Returns:
        [m].
    """
    of_correct = reduce(torch.where(is_correct, values, absent))[table.group_of_sample]
    of_incorrect = reduce(torch.where(is_correct, absent, values))[table.group_of_sample]
    return torch.where(is_correct, of_correct, of_incorrect)


class RealBceOptions(RealOptions):
    """REAL's BCE variant: cross-entropy of each response's mean log-ratio against its label."""

    name: Literal["real_bce"]  # type: ignore[assignment]
    """Name of the objective."""


class RealBce(Real, options=RealBceOptions):
    """REAL's BCE variant; see `Objective` for the protocol."""

    coupling: Coupling = "sample"

    def _divisor(self, counted: Tensor, num_groups: int) -> Tensor | int:
        """Number of samples of groups with both classes."""
        return counted.sum().clamp(min=1.0)

    def _loss(self, logits: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
        return sample_loss(logits, table.labels)
