"""The text that a chat template writes around a message between two turns of the policy."""

from pydantic import Field, model_validator

from pacs_megatron.contracts.options import Options


class TurnMarkers(Options):
    """An answer, messages and the next answer are written as `answer_end`, then for each message
    `before` + text + `after` of its role, then `generation`.
    """

    answer_end: str
    """Text after an answer, from the token that ends it: `<|im_end|>` and a line end."""

    before: dict[str, str] = Field(min_length=1)
    """Text before a message, by role."""

    after: dict[str, str] = Field(min_length=1)
    """Text after a message, by role."""

    generation: str
    """Text that opens the next answer."""

    strips_text: bool = False
    """Whether a message loses its outer white space."""

    joins: bool = True
    """Whether several messages may follow one another."""

    @model_validator(mode="after")
    def _check_roles(self) -> "TurnMarkers":
        if self.before.keys() != self.after.keys():
            raise ValueError(
                f"turn_markers: before has {sorted(self.before)}, after has "
                f"{sorted(self.after)}; name the same roles"
            )
        return self
