"""Base classes of an objective and of its options.

A subclass registers itself; its file needs no other edit.

    class Mine(Objective, options=MineOptions): ...

`MineOptions.name: Literal["mine"]` is the objective's name in the configuration. The schema, the
configuration reference, `plan` and the engine read all other properties from these classes
(docs/objective.md#adding-an-objective).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import Field, PositiveInt

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.options import Options
from pacs_megatron.contracts.protocols import Coupling, LogprobSource, Statistic
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.sample_table import SampleTable

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
StepInputs = Mapping[str, "np.ndarray"]
"""Name -> float64 [n], a value of each sample that depends on the whole step"""


class CommonOptions(Options):
    """Options of every objective."""

    compares_siblings: ClassVar[bool] = True
    """whether admission drops groups of one sample"""
    trains_on_demonstrations: ClassVar[bool] = False
    """True: `rollout.engine: demonstrations` is required; False: it is rejected"""

    needs_certainty: ClassVar[bool] = False
    """whether `TokenRecord.estimates` has `logit`, and the facts the certainties of samples"""

    name: str
    """Name of the objective."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. The default depends on the objective
    (docs/measurements/defaults.md)."""

    @property
    def other_models(self) -> dict[str, str]:
        """Configuration key -> folder or hub id of each model beside the policy."""
        return {}

    def check_used(self, key: str, *, is_used: bool, by: str) -> None:
        """Checks that option `key` is set exactly if other options use it.

        Args:
            key: name of the option.
            is_used: whether the other options use it.
            by: these other options, for the message, as `key=value`.

        Raises:
            ValueError: the option is set although it is not used, or null although it is.
        """
        is_set = getattr(self, key) is not None
        if is_set != is_used:
            raise ValueError(
                f"objective.{key}={getattr(self, key)} does not go with {by}: it is "
                f"{'required there' if is_used else 'not used there'}; "
                f"{'set' if is_used else 'remove'} the key"
            )

    def check_updates_per_step(self, updates_per_step: int) -> None:
        """Raises ValueError if these options do not allow `updates_per_step` updates."""


class ReferenceOptions(CommonOptions):
    """Options of objectives that may compare with a frozen snapshot of the policy."""

    reset_every: PositiveInt | None = None
    """Interval, in steps, at which the frozen reference is reset to the current policy; null never
    resets it.
    """


REGISTRY: dict[str, type["Objective"]] = {}
"""Name -> class of every imported objective."""


class Objective:
    """Pure tensor functions; no process groups, no Megatron.

    `updates_per_step` is known at construction.

    An objective declares its coupling and the statistics that its coefficients depend on. The
    engine computes the statistics exactly at the lowest cost: in the update's own forward if the
    coupled samples are in one micro-batch (`couple`), otherwise in a forward-only pass before the
    update. By default an objective has no passes and no statistics, and its coefficients are known
    before the update.

    Shapes: [n] samples of a mini-batch, [m] samples of a SampleTable, [t] packed response tokens.
    """

    name: str
    options_class: ClassVar[type[CommonOptions]]
    coupling: Coupling = "token"
    passes: Mapping[LogprobSource, int] = {}
    """Log-prob pass -> first update of a step (0-based) that needs it.

    The first update's own forward computes the `step_start` log-probs, so the first update needs
    that pass only for its advantages.
    """
    coupled_by: Mapping[Statistic, int] = {}
    """Statistic -> first update whose coefficients depend on it."""
    score_is_maximum: ClassVar[bool] = False
    """The score of a sample is the largest of its `token_scores`, not their sum."""
    score_has_entropy: ClassVar[bool] = False
    """`token_scores` needs the entropies of the tokens."""
    kl_in_reward: bool = False
    """`prepare_step` needs `SampleFacts.kl_to_reference`"""
    has_estimates: bool = False
    """advantages of tokens come from `estimate`"""
    critic: "Objective | None" = None
    """the objective of the critic's updates, whose records have values as `logprobs`.

    None: no critic
    """

    def __init_subclass__(cls, *, options: type[CommonOptions] | None = None) -> None:
        if options is None:
            return

        cls.name = get_args(options.model_fields["name"].annotation)[0]
        cls.options_class = options

        # A reloaded module registers its name again, so only another module is a conflict.
        registered = REGISTRY.setdefault(cls.name, cls)
        if registered.__module__ != cls.__module__:
            raise ValueError(
                f"objective {cls.name} of {cls.__module__} exists in {registered.__module__}; "
                "rename one"
            )

    def __init__(self, options: Any) -> None:
        self.options = options

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        """The log-prob passes that a mini-batch needs before its update.

        Args:
            update_index: number of the update in the step, 0-based.
        """
        return frozenset(name for name, first in self.passes.items() if update_index >= first)

    def statistics(self, update_index: int) -> frozenset[Statistic]:
        """The statistics that the coefficients of an update depend on.

        Args:
            update_index: number of the update in the step, 0-based.

        Returns:
            Names of statistics; empty: the coefficients are known before the update.
        """
        return frozenset(name for name, first in self.coupled_by.items() if update_index >= first)

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """Each token's part of its sample's score. Called without grad.

        Returns:
            [t], float64. The engine masks it and sums it by sample in float64, or takes the largest
            one (`score_is_maximum`), at least 0.

        Raises:
            ValueError: this objective declares no score.
        """
        raise ValueError(f"objective: {self.name} has no scores")

    def known(self, facts: SampleFacts, step_inputs: StepInputs) -> dict[str, Tensor]:
        """Per-sample values of the whole mini-batch that no statistic changes: inputs of `couple`.

        Args:
            facts: of the whole mini-batch.
            step_inputs: the columns of `prepare_step`, [n].

        Returns:
            Name -> [n], float64.
        """
        return {}

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """`Prepared.per_sample` of coupled samples, from their statistics.

        Runs between forward and backward, on any device, so it neither raises for a value nor
        synchronises with the host.

        Args:
            table: whole groups with coupling `group`, any samples with coupling `sample`.
            scores: [m], float64, the statistic `score`; None: not declared.
            sampler_ratios: [m], float64, nats, the statistic `sampler_ratio`; None: not declared.
            known: name -> [m], float64, the values of `self.known` of these samples.

        Returns:
            Name -> [m], float64.
        """
        raise ValueError(f"objective: {self.name} has no coupling")

    def sample_kl(self, step_start: "np.ndarray", reference: "np.ndarray") -> float:
        """The estimate of a sample's KL divergence to the reference, for `kl_in_reward`.

        Args:
            step_start: [response], float32, log-probs at the start of the step.
            reference: [response], float32, log-probs of the frozen reference.

        Returns:
            nats.
        """
        raise ValueError(f"objective: {self.name} has no KL in the reward")

    def estimate(
        self,
        rewards: Sequence[float],
        values: Sequence["np.ndarray"],
        step_starts: Sequence["np.ndarray"],
        references: Sequence["np.ndarray"],
    ) -> tuple[list["np.ndarray"], list["np.ndarray"]]:
        """Advantages of tokens, and returns, with `has_estimates`.

        Args:
            rewards: of each sample.
            values: [response] each, the critic's; empty without a critic.
            step_starts: [response] each, log-probs, if `passes` declares them.
            references: [response] each, log-probs, if `passes` declares them.

        Returns:
            (advantages, returns), float64 [response] each; no returns without a critic. The engine
            whitens the advantages over all tokens of the step.
        """
        raise ValueError(f"objective: {self.name} has no estimates")

    def prepare_step(self, facts: SampleFacts) -> StepInputs:
        """Columns of samples that depend on the whole rollout batch, such as advantages.

        Computed once a step. A mini-batch gets its rows of them.

        Args:
            facts: of the step.

        Returns:
            Name -> float64 [samples of the step], in the order of `facts`.
        """
        return {}

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Coefficients, true loss and metrics of the whole mini-batch.

        Called before the update if no statistics are declared, else after its backward, for loss
        and metrics.

        Args:
            scores: [n], float64, in the order of `facts`; None: not declared.
            facts: of the whole mini-batch.
            step_inputs: the columns of `prepare_step`, [n].
        """
        raise NotImplementedError

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Each token's part of the loss.

        A token's value depends on no other token's log-prob, because the engine evaluates parts of
        a micro-batch alone. Values that couple tokens or samples are statistics; `prepared` has
        them.

        Returns:
            [t], dtype of `tokens.logprobs`. The engine masks it and sums it over the mini-batch,
            without any division.
        """
        raise NotImplementedError

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Metrics from the update's own log-probs. Called without grad.

        Returns:
            Name -> [t], already divided by the mini-batch's count. The engine masks and sums them
            like `token_loss`. Every micro-batch has the same keys; there may be none.
        """
        return {}


def required(value: T | None, description: str) -> T:
    """`value`, which the engine provides.

    Raises:
        ValueError: it is None (an internal error).
    """
    if value is None:
        raise ValueError(
            f"objective: this objective with its options needs {description} from the engine, "
            "got none"
        )
    return value


def at_tokens(per_sample: Tensor, tokens: TokenRecord) -> Tensor:
    """Each token's value of a per-sample tensor.

    Args:
        per_sample: [n].
        tokens: [t].

    Returns:
        [t], dtype of `per_sample`, on the tokens' device.
    """
    return per_sample.to(tokens.sample_of_token.device)[tokens.sample_of_token]
