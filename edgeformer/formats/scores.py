"""How good a model is on one set: what the scores of every task have in common, and how a saved one is recognised.

The scores themselves are each task's own (``tasks/<task>/``); a manifest holds whichever its task gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny

from edgeformer.formats.base import Frozen


class ExitScore(Frozen):
    """What one exit of a language model predicts."""

    loss: float = Field(description="nats per predicted token: the sum over all of them divided by their number")
    perplexity: float = Field(description="exp(loss)")


class EarlyExitScore(ExitScore):
    """Every token answered at the first exit whose confidence reaches the threshold (paper B, eq. 6)."""

    mean_loops: float = Field(description="loops that a token takes on average")
    share: dict[str, float] = Field(description="loop → share of the tokens that leave there; sums to 1")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a token leave")


class Score(Frozen):
    """What every task's scores have. A task's own type is known by its fields once the task was imported."""

    n: int = Field(description="what the loss is a mean over: rows, or predicted tokens")
    loss: float = Field(description="mean cross-entropy, nats")

    known: ClassVar[list[type[Score]]] = []

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        Score.known.append(cls)

    @property
    def by_exit(self) -> dict[int, ExitScore]:
        """Loop → score of the exit after it, in rising order; empty where the task scores one answer only."""
        return {}

    @property
    def leaving_early(self) -> EarlyExitScore | None:
        """The score with early exit; None where that was not scored."""
        return None


def _recognised(value: object) -> object:
    """A saved score as its task's type: the one that has exactly such fields."""
    if not isinstance(value, Mapping):
        return value
    for kind in Score.known:
        fields = kind.model_fields
        needed = {name for name, info in fields.items() if info.is_required()}
        if needed <= value.keys() <= fields.keys():
            return kind.model_validate(dict(value), strict=False)
    raise ValueError(f"scores of no task that is known here: {', '.join(sorted(map(str, value)))}")


AnyScore = Annotated[SerializeAsAny[Score], BeforeValidator(_recognised)]
"""A score of any task, in a manifest."""
