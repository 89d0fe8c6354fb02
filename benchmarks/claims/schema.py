"""What docs/claims.yaml holds: texts, sources of our figures, claims with their rules, and the results written back."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.documents import read_yaml
from edgeformer.artifacts.errors import InputError

MOST_WORDS = 25
Verdict = Literal["reproduced", "not reproduced", "not testable as published", "not tested yet"]
Number = int | float
Published = Number | list[Number]
"""One figure, or [from, to]."""


class Text(Frozen):
    """One of the five texts."""

    title: str
    paper: Literal["A", "B"]


class Counted(Frozen):
    """Exact parameters of a recipe's model, or their size in MiB, which the papers call MB."""

    kind: Literal["count"]
    recipe: str
    set: Annotated[tuple[str, ...], Field(strict=False)] = ()
    bytes_each: int | None = None


class Json(Frozen):
    """A figure of a committed file; studies/NAME.json is also the line NAME of studies/runs/*.jsonl.

    A step of ``path`` is a key, a position, or what one object of a list must hold.
    """

    kind: Literal["json"]
    file: str
    path: list[str | int | dict[str, str | int | bool]]


class Study(Frozen):
    """A cell of a study's committed table, the mean over its seeds; what is missing was not run yet.

    ``run``, ``at``  the row, as in benchmarks/studies: a run's name, and its test set, precision or exit
    ``leaks``        the claim is about a model that sees what it predicts; elsewhere such a row is refused
    ``hub``          a data set that must be the hub's own: a row that files stood in for decides nothing
    """

    kind: Literal["study"]
    study: str
    run: str
    at: str
    figure: str = "$figure"
    leaks: bool = False
    hub: str = ""


class Quoted(Frozen):
    """What another claim publishes: for figures that the papers derive from their own."""

    kind: Literal["published"]
    claim: str
    figure: str = "$figure"


class Setting(Frozen):
    """What a recipe sets."""

    kind: Literal["recipe"]
    recipe: str
    set: Annotated[tuple[str, ...], Field(strict=False)] = ()
    key: str


class Code(Frozen):
    """A constant of the package, ``module:NAME``, or the default of a parameter, ``module:function.parameter``."""

    kind: Literal["code"]
    name: str


class Each(Frozen):
    """Every figure has a source of its own."""

    kind: Literal["each"]
    of: "dict[str, Source | str]"


class Formula(Frozen):
    """Arithmetic on other sources: + - * / **, numbers, exp(), log(), min(), max(). ``of`` may be empty."""

    kind: Literal["formula"]
    formula: str
    of: "dict[str, Source | str]"


Source = Annotated[Counted | Json | Study | Quoted | Setting | Code | Each | Formula, Field(discriminator="kind")]


class Within(Frozen):
    """Ours lies within this much of what is published (or of its range), on either side.

    ``absolute``  for all figures, or figure → how much; ``share`` is of the published figure
    """

    kind: Literal["within"]
    absolute: float | dict[str, float] = 0.0
    share: float = 0.0


class Reached(Frozen):
    """Ours is as good as what is published, less ``absolute``; ``lower`` says that less is better."""

    kind: Literal["reached"]
    absolute: float = 0.0
    lower: bool = False


class Direction(Frozen):
    """Ours has the published sign, and is larger than ``noise``, below which there is no difference to speak of.

    ``noise``      two standard errors of ours; "seeds": half the 95% interval of our figure's mean over the seeds
    ``published``  two standard errors of the published figure, on its test set. Where it is not larger, nothing was
                   shown that could be reproduced, whatever ours is. Default: ``noise``; 0 beside "seeds"
    """

    kind: Literal["direction"]
    noise: float | dict[str, float] | Literal["seeds"]
    published: float | dict[str, float] | None = None

    @property
    def published_noise(self) -> float | dict[str, float]:
        if self.published is not None:
            return self.published
        return 0.0 if isinstance(self.noise, str) else self.noise


class Untestable(Frozen):
    """What is published does not say enough, or is not about the model, so that no figure could decide it."""

    kind: Literal["untestable"]
    because: str


Rule = Annotated[Within | Reached | Direction | Untestable, Field(discriminator="kind")]


class Result(Frozen):
    """Filled in by script.

    ``ours``    figure → value; empty where there is none
    ``noise``   figure → half the 95% interval of ours, where the rule takes it from the seeds
    ``origin``  where they come from
    """

    ours: dict[str, Number]
    noise: dict[str, float] = Field(default_factory=dict)
    origin: list[str]
    verdict: Verdict
    why: str


class Claim(Frozen):
    """One quantitative claim.

    ``text``       a short quotation
    ``where``      text → page, section or table. The first has the quoted words; the others say the same
    ``study``      what tests it; "counts": arithmetic on exact counts or on the papers' own figures
    ``published``  name → figure
    ``ours``       how our figures of the same names are found; "$figure" stands for the name
    ``without``    why it is not testable as long as our figure is not there; left out: it was not tested yet
    ``note``       what a reader of the verdict must know
    ``check``      a text's figure against another of its figures, or the released code. Counted apart
    ``reading_of`` the claim that counts for the same sentence, of which this is another reading or part. Shown apart
    """

    text: str
    where: dict[str, str]
    study: str
    published: dict[str, Published]
    unit: str
    ours: Source | str | None = None
    rule: Rule
    without: str = ""
    note: str = ""
    check: bool = False
    reading_of: str = ""
    result: Result | None = None

    @property
    def is_counted(self) -> bool:
        """Whether it counts as a claim: each sentence, and each quantity of a row of a table, counts once."""
        return not self.check and not self.reading_of

    @field_validator("text")
    @classmethod
    def _short(cls, text: str) -> str:
        if len(text.split()) > MOST_WORDS:
            raise ValueError(f"a quotation has at most {MOST_WORDS} words, not {len(text.split())}")
        return text

    @field_validator("published")
    @classmethod
    def _ranges(cls, published: dict[str, Published]) -> dict[str, Published]:
        for name, value in published.items():
            if isinstance(value, list) and (len(value) != 2 or value[0] >= value[1]):
                raise ValueError(f"{name}: a range is [from, to], not {value}")
        if not published:
            raise ValueError("needs at least one figure")
        return published

    @model_validator(mode="after")
    def _tolerances(self) -> "Claim":
        parameters = {key: getattr(self.rule, key, None) for key in ("absolute", "noise", "published")}
        for key, value in parameters.items():
            if isinstance(value, dict) and value.keys() != self.published.keys():
                raise ValueError(f"rule.{key}: must have {', '.join(self.published)}, as `published`")
        return self

    @model_validator(mode="after")
    def _testable(self) -> "Claim":
        if self.ours is None and self.rule.kind != "untestable":
            raise ValueError("`ours` is missing: how is our figure found? Without one, the rule is untestable")
        return self


class Claims(Frozen):
    """The whole file. ``sources``: name → how the figure is found; of several, the first that is there counts."""

    texts: dict[str, Text]
    studies: dict[str, str]
    sources: dict[str, list[Source]]
    claims: dict[str, Claim]

    @model_validator(mode="after")
    def _names(self) -> "Claims":
        for name, claim in self.claims.items():
            if claim.study not in self.studies:
                raise ValueError(f"claims.{name}.study: {claim.study!r} is none of {', '.join(self.studies)}")
            if isinstance(claim.ours, Each) and claim.ours.of.keys() != claim.published.keys():
                raise ValueError(f"claims.{name}.ours.of: must have {', '.join(claim.published)}, as `published`")
            if not claim.where or not claim.where.keys() <= self.texts.keys():
                raise ValueError(f"claims.{name}.where: must name texts of {', '.join(self.texts)}")
            if claim.reading_of and not getattr(self.claims.get(claim.reading_of), "is_counted", False):
                raise ValueError(f"claims.{name}.reading_of: {claim.reading_of!r} is no claim that counts")
            for used in names_of(claim.ours):
                if used not in self.sources:
                    raise ValueError(f"claims.{name}.ours: there is no source {used!r} under `sources`")
        return self


def names_of(source: Source | str | None) -> list[str]:
    """Named sources that a source uses."""
    if isinstance(source, str):
        return [source]
    parts = source.of.values() if isinstance(source, Formula | Each) else ()
    return [name for part in parts for name in names_of(part)]


def read_claims(path: Path) -> Claims:
    """Read and check the file. Raises InputError with file, line and key."""
    document = read_yaml(path)
    try:
        return Claims.model_validate(document.content)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{document.where(first['loc'])}: {'.'.join(map(str, first['loc']))}: {message}") from None
