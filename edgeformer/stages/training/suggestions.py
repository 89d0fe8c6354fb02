"""What to change in a recipe that does not fit into memory, from the cheapest change on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from edgeformer.formats.data_config import DataSection
from edgeformer.formats.recipe import Recipe, TrainingConfig
from edgeformer.formats.report import Suggestion
from edgeformer.formats.units import format_bytes

Peak = Callable[[Recipe], int]
"""The predicted peak of training a recipe, in bytes."""

KINDS_OF_CHANGES = 5

SHORTEST = 64
"""Tokens below which a shorter row is no longer suggested."""


@dataclass(frozen=True)
class Change:
    """Other values for some keys, and what they cost."""

    values: dict[str, Any]
    note: str

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with these values."""
        for key, value in self.values.items():
            section, name = key.split(".")
            changed = getattr(recipe, section).model_copy(update={name: value})
            recipe = recipe.model_copy(update={section: changed})
        return recipe


Changes = tuple[Change, ...]


def _with(changes: Changes, later: Change) -> Changes:
    """``later`` takes the place of an earlier change of the same keys."""
    return (*(change for change in changes if change.values.keys() != later.values.keys()), later)


def _suggestion(changes: Changes, peak_bytes: int, budget_bytes: int) -> Suggestion:
    pairs = tuple(f"{key}={str(value).lower()}" for change in changes for key, value in change.values.items())
    note = "; ".join(change.note for change in changes)
    return Suggestion(set=pairs, peak_bytes=peak_bytes, fits=peak_bytes <= budget_bytes, note=note)


def suggest(recipe: Recipe, budget_bytes: int, peak: Peak, half_precision: str | None) -> tuple[Suggestion, ...]:
    """First the changes that together make ``recipe`` fit, if any do; then each change by itself.

    Args:
        peak: of any recipe; asked about ten times.
        half_precision: the 16-bit format that the device computes fast in; None: it has none, or the recipe is in it.
    """
    known: dict[str, int] = {}

    def peak_of(candidate: Recipe) -> int:
        key = candidate.fingerprint()
        if key not in known:
            known[key] = peak(candidate)
        return known[key]

    fitting = _search(recipe, budget_bytes, peak_of, half_precision)
    firsts = (next(step, None) for step in _steps(recipe, half_precision))
    singles = [
        _suggestion((change,), peak_of(change.applied(recipe)), budget_bytes)
        for change in firsts
        if change is not None
    ]  # fmt: skip
    if fitting is None:
        return tuple(singles)
    return (fitting, *(single for single in singles if single.set != fitting.set))


def _search(recipe: Recipe, budget_bytes: int, peak_of: Peak, half_precision: str | None) -> Suggestion | None:
    """Add one kind of change after the other, from the cheapest on, each as far as needed, until it fits.

    A change that does not lower the peak is not kept.
    """
    kept: Changes = ()
    lowest = peak_of(recipe)
    for number in range(KINDS_OF_CHANGES):
        start, start_recipe = kept, recipe
        secant = _Secant(budget_bytes, start_recipe.training.batch_size, lowest)
        for change in _steps(start_recipe, half_precision)[number]:
            changed = change.applied(start_recipe)
            if secant.hopeless(changed.training.batch_size):
                continue
            found = peak_of(changed)
            secant.learn(changed.training.batch_size, found)
            if found < lowest:
                kept, recipe, lowest = _with(start, change), changed, found
            if found <= budget_bytes:
                return _suggestion(kept, found, budget_bytes)
    return None


@dataclass
class _Secant:
    """Spares predictions of micro-batches that cannot fit.

    What is alive at any one moment grows by a fixed amount per row, and the peak is the largest of such lines: a convex
    function of the rows. Below two known points it lies above the line through them.
    """

    budget_bytes: int
    rows: int
    peak_bytes: int
    slope: float | None = None

    def learn(self, rows: int, peak_bytes: int) -> None:
        """A prediction."""
        if rows == self.rows:  # another kind of change
            return
        self.slope = (self.peak_bytes - peak_bytes) / (self.rows - rows)
        self.rows, self.peak_bytes = rows, peak_bytes

    def hopeless(self, rows: int) -> bool:
        """Is even the lower bound above the budget? (never for a single row, whose peak is wanted in any case)"""
        if self.slope is None or rows == 1:
            return False
        return self.peak_bytes - self.slope * (self.rows - rows) > self.budget_bytes


def _steps(recipe: Recipe, half_precision: str | None) -> tuple[Iterator[Change], ...]:
    """Kinds of changes from the cheapest on, each with its values from the mildest on."""
    return (
        _chunked_loss(recipe.training),
        _smaller_batches(recipe.training),
        _checkpointing(recipe.training),
        _precision(half_precision),
        _shorter_rows(recipe.data),
    )


def _chunked_loss(training: TrainingConfig) -> Iterator[Change]:
    if getattr(training, "chunked_loss", True) is False:
        yield Change(
            {"training.chunked_loss": True}, "the same result; the heads' logits are computed twice, a part at a time"
        )


def _smaller_batches(training: TrainingConfig) -> Iterator[Change]:
    rows, accumulation = training.batch_size, training.accumulation
    for smaller in range(rows // 2, 0, -1):
        if rows % smaller == 0:
            values = {"training.batch_size": smaller, "training.accumulation": accumulation * rows // smaller}
            yield Change(values, f"the same effective batch of {rows * accumulation} rows, fewer at a time")


def _checkpointing(training: TrainingConfig) -> Iterator[Change]:
    """Every kind that keeps less than the present one, where the task's training knows checkpointing."""
    field = type(training).model_fields.get("checkpointing")
    kinds = get_args(field.annotation) if field is not None else ()
    for kind in kinds[kinds.index(getattr(training, "checkpointing")) + 1 :] if kinds else ():  # noqa: B009
        note = "the same result; the forward pass is computed twice, about a third more work per step"
        yield Change({"training.checkpointing": kind}, note)


def _precision(half_precision: str | None) -> Iterator[Change]:
    if half_precision is not None:
        note = "activations in 16 bits, weights stay in 32; usually faster, not bit for bit the same"
        yield Change({"training.precision": half_precision}, note)


def _shorter_rows(data: DataSection) -> Iterator[Change]:
    length = data.tokens_at_once
    while length // 2 >= SHORTEST:
        length //= 2
        yield Change({f"data.{data.length_key}": length}, f"changes the task: the model sees {length} tokens at once")


def in_words(suggestions: tuple[Suggestion, ...]) -> str:
    """The first suggestion that fits, as a sentence for an error message."""
    fitting = next((suggestion for suggestion in suggestions if suggestion.fits), None)
    if fitting is None:
        return "no change of batch, checkpointing, precision or length makes it fit; use a smaller model"
    flags = " ".join(f"--set {pair}" for pair in fitting.set)
    return f"it would fit ({format_bytes(fitting.peak_bytes)}) with {flags} ({fitting.note})"
