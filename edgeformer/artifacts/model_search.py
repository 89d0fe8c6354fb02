"""Result of `edgeformer search`: the models that were tried, all their artifacts, and the recommendation."""

from typing import Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.report import Choice

SEARCH_FILE = "search.json"


class SearchedModel(Frozen):
    """One model of the search."""

    name: str
    description: str
    run: str = Field(description="name of its run")
    status: Literal["waiting", "skipped", "failed", "measured"]
    reason: str | None = Field(None, description="why it was skipped or has failed, or how it was trained differently")
    parameters: int | None = None
    predicted_low_s: float | None = Field(None, description="predicted seconds of training; None: not predictable")
    predicted_high_s: float | None = None
    train_s: float | None = Field(None, description="measured seconds of training; None: not trained")
    deploy_s: float | None = Field(None, description="measured seconds of export and profile")
    score: float | None = Field(None, description="of the run's own weights on the validation rows")
    teacher: str | None = Field(None, description="model of the search that taught it")


class ScoredTest(Frozen):
    """Score of a recommended artifact on the test rows."""

    candidate: str = Field(description="model/artifact")
    score: float
    rows: int = Field(description="rows, or what `unit` says, that the score is of")
    unit: str = Field("rows", description="what `rows` counts: rows or spans")
    low: float | None = Field(None, description="lower end of the 95% interval; None: this metric has none")
    high: float | None = None


class ModelSearch(Frozen):
    """Models in the order of the search, the candidates of all of them, and the recommendation."""

    format_version: Literal[1] = 1
    name: str
    data: str = Field(description="the data file or the recipe that was searched for")
    source: str | None = Field(None, description="pretrained encoder that some models start from")
    device: str
    host: str = Field(description="processor that trained and measured")
    created: str
    models: tuple[SearchedModel, ...]
    search: Choice | None = Field(None, description="None: no model has been measured yet")
    tests: tuple[ScoredTest, ...] = Field((), description="a row for each artifact that was ever recommended")

    @property
    def picked(self) -> str | None:
        """The ``model/artifact`` that keeps all limits."""
        search = self.search
        return search.candidates[search.pick].artifact if search is not None and search.pick is not None else None

    @property
    def best(self) -> str | None:
        """The picked ``model/artifact``, or without one the usable artifact with the best score."""
        search = self.search
        if search is None or search.closest is None:
            return self.picked
        return search.candidates[search.closest].artifact
