"""Base classes of an objective and of its options. A subclass registers itself; its file needs no other edit.

    class Mine(BaseObjective, options=MineOptions): ...

`MineOptions.name: Literal["mine"]` is its name in the configuration. The schema, its reference, `plan` and the engine
read everything else from these classes (docs/objective.md#adding-an-objective).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, get_args

from pydantic import Field, PositiveInt

from pacs_megatron.contracts import Objective, Prepared, SampleFacts, SampleTable, TokenRecord
from pacs_megatron.contracts.options import Options
from pacs_megatron.contracts.protocols import Coupling, LogprobSource, Statistic
from pacs_megatron.objectives.shared.lazy import Tensor


class CommonOptions(Options):
    """Options of every objective."""

    compares_siblings: ClassVar[bool] = True
    """Groups of one sample are dropped."""
    trains_on_demonstrations: ClassVar[bool] = False
    """`rollout.engine: demonstrations` is required; where this is False, it is rejected."""

    name: str
    """Name of the objective."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. The default depends on the objective
    (docs/measurements/defaults.md)."""

    def refuse_unused(self, key: str, *, is_used: bool, by: str) -> None:
        """Raises ValueError if option `key`, null where it is not used, is set elsewhere or missing."""
        if (getattr(self, key) is not None) != is_used:
            raise ValueError(
                f"objective.{key}={getattr(self, key)} does not go with {by}: it is "
                f"{'required there' if is_used else 'not used there'}; {'set' if is_used else 'remove'} the key"
            )

    def refuse_updates_per_step(self, updates_per_step: int) -> None:
        """Raises ValueError if these options do not allow `updates_per_step` updates."""


class ReferenceOptions(CommonOptions):
    """Options of objectives that may compare with a frozen snapshot of the policy."""

    reset_every: PositiveInt | None = None
    """Interval, in steps, at which the frozen reference is reset to the current policy; null never resets it."""


REGISTRY: dict[str, type["BaseObjective"]] = {}
"""Name -> class of every imported objective."""


class BaseObjective:
    """Defaults of `contracts.Objective`: no passes, no statistics, coefficients that are known before the update."""

    name: str
    options_class: ClassVar[type[CommonOptions]]
    coupling: Coupling = "token"
    kl_in_reward: bool = False
    critic: Objective | None = None

    def __init_subclass__(cls, *, options: type[CommonOptions] | None = None) -> None:
        if options is not None:
            cls.name, cls.options_class = get_args(options.model_fields["name"].annotation)[0], options
            other = REGISTRY.setdefault(cls.name, cls)
            if other.__module__ != cls.__module__:
                raise ValueError(f"objective {cls.name} of {cls.__module__} exists in {other.__module__}; rename one")

    def __init__(self, options: Any) -> None:
        self.options = options

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        return frozenset()

    def statistics(self, update_index: int) -> frozenset[Statistic]:
        return frozenset()

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """Raises ValueError: no score is declared."""
        raise ValueError(f"objective: {self.name} has no scores")

    def known(self, facts: SampleFacts, step_inputs: Any) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def couple(
        self, table: SampleTable, scores: Tensor | None, sampler_ratios: Tensor | None, known: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Raises ValueError: no statistic is declared."""
        raise ValueError(f"objective: {self.name} has no coupling")

    def sample_kl(self, step_start: Any, reference: Any) -> float:
        """Raises ValueError: the reward contains no KL."""
        raise ValueError(f"objective: {self.name} has no KL in the reward")

    def estimate(
        self, rewards: Sequence[float], values: Sequence[Any], step_starts: Sequence[Any], references: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Raises ValueError: there is no critic."""
        raise ValueError(f"objective: {self.name} has no critic")

    def prepare_step(self, facts: SampleFacts) -> Any:
        """Nothing: only the mini-batch is used."""

    def prepare(self, scores: Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        raise NotImplementedError

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        raise NotImplementedError

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """None."""
        return {}


def at_tokens(per_sample: Tensor, tokens: TokenRecord) -> Tensor:
    """[t], each token's value of a [n] tensor, on the tokens' device."""
    return per_sample.to(tokens.sample_of_token.device)[tokens.sample_of_token]
