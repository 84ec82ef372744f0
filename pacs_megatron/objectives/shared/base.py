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


class CommonOptions(Options):
    """Options of every objective."""

    compares_siblings: ClassVar[bool] = True
    """whether admission drops groups of one sample"""
    trains_on_demonstrations: ClassVar[bool] = False
    """True: `rollout.engine: demonstrations` is required; False: it is rejected"""

    name: str
    """Name of the objective."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. The default depends on the objective
    (docs/measurements/defaults.md)."""

    def refuse_unused(self, key: str, *, is_used: bool, by: str) -> None:
        """Raises ValueError if option `key` is set although not `is_used`, or is null although
        `is_used`.
        """
        if (getattr(self, key) is not None) != is_used:
            raise ValueError(
                f"objective.{key}={getattr(self, key)} does not go with {by}: it is "
                f"{'required there' if is_used else 'not used there'}; "
                f"{'set' if is_used else 'remove'} the key"
            )

    def refuse_updates_per_step(self, updates_per_step: int) -> None:
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
    kl_in_reward: bool = False
    """`prepare_step` needs `SampleFacts.kl_to_reference`"""
    critic: "Objective | None" = None
    """the objective of the critic's updates, whose records have values as `logprobs`.

    None: no critic, no `estimate`
    """

    def __init_subclass__(cls, *, options: type[CommonOptions] | None = None) -> None:
        if options is not None:
            cls.name = get_args(options.model_fields["name"].annotation)[0]
            cls.options_class = options
            other = REGISTRY.setdefault(cls.name, cls)
            if other.__module__ != cls.__module__:
                raise ValueError(
                    f"objective {cls.name} of {cls.__module__} exists in {other.__module__}; "
                    "rename one"
                )

    def __init__(self, options: Any) -> None:
        self.options = options

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        """Log-prob passes that the mini-batch of update `update_index` (0-based in the step) needs
        before the update.
        """
        return frozenset(name for name, first in self.passes.items() if update_index >= first)

    def statistics(self, update_index: int) -> frozenset[Statistic]:
        """Statistics that the coefficients of update `update_index` depend on; empty: they are
        known beforehand.
        """
        return frozenset(name for name, first in self.coupled_by.items() if update_index >= first)

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """float64 [t]; the engine masks it and sums it by sample in float64. Called without grad.

        Raises ValueError if no score is declared."""
        raise ValueError(f"objective: {self.name} has no scores")

    def known(self, facts: SampleFacts, step_inputs: Any) -> dict[str, Tensor]:
        """Per-sample values of the whole mini-batch that no statistic changes, float64 [n]: inputs
        of `couple`.
        """
        return {}

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """`Prepared.per_sample` of coupled samples, from their statistics; every tensor is float64
        [m], on any device.

        The samples are whole groups with coupling `group`, any samples with coupling `sample`.
        `known`: of these samples. Runs between forward and backward: it neither raises for a value
        nor synchronises with the host.
        """
        raise ValueError(f"objective: {self.name} has no coupling")

    def sample_kl(self, step_start: "np.ndarray", reference: "np.ndarray") -> float:
        """A sample's estimate of the KL to the reference, for `kl_in_reward`; log-probs are float32
        [response].
        """
        raise ValueError(f"objective: {self.name} has no KL in the reward")

    def estimate(
        self,
        rewards: Sequence[float],
        values: Sequence["np.ndarray"],
        step_starts: Sequence["np.ndarray"],
        references: Sequence["np.ndarray"],
    ) -> tuple[list["np.ndarray"], list["np.ndarray"]]:
        """(advantages, returns) of samples from a critic's values and the declared log-probs;
        float64 [response] each.

        The engine whitens the advantages over all tokens of the step.
        """
        raise ValueError(f"objective: {self.name} has no critic")

    def prepare_step(self, facts: SampleFacts) -> Any:
        """Inputs of `prepare` from the whole rollout batch (advantages, batch-wide norms), computed
        once a step.
        """

    def prepare(self, scores: Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """The whole mini-batch: coefficients, true loss and metrics.

        `scores` float64 [n] as `facts`; None: not declared.

        Called before the update if no statistics are declared, else after its backward, for loss
        and metrics.
        """
        raise NotImplementedError

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t], dtype of `tokens.logprobs`; the engine masks it and sums it over the mini-batch,
        without any division.

        A token's value depends on no other token's log-prob, because the engine evaluates parts of
        a micro-batch alone. Values that couple tokens or samples are statistics; `prepared` has
        them.
        """
        raise NotImplementedError

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Metrics from the update's own log-probs: name -> [t], already divided by the mini-batch's
        count. The engine masks and sums them like `token_loss`. Called without grad. Every
        micro-batch has the same keys; there may be none.
        """
        return {}


def given(value: T | None, what: str) -> T:
    """`value`, which the engine provides. Raises ValueError (an internal error) if it is None."""
    if value is None:
        raise ValueError(
            f"objective: this objective with its options needs {what} from the engine, got none"
        )
    return value


def at_tokens(per_sample: Tensor, tokens: TokenRecord) -> Tensor:
    """[t], each token's value of a [n] tensor, on the tokens' device."""
    return per_sample.to(tokens.sample_of_token.device)[tokens.sample_of_token]
