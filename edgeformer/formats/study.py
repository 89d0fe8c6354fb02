"""Study: several runs that make one table or figure, as a file says it; and local files that stand in for the hub."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.formats.base import Frozen
from edgeformer.formats.data_config import Name, PositiveInt, Seed
from edgeformer.formats.documents import find, validate
from edgeformer.formats.manifest import Precision
from edgeformer.formats.yaml_text import read_yaml


class Measure(NamedTuple):
    """How people read a figure: what stands above it, decimals, and what it counts."""

    heading: str
    places: int
    meaning: str
    higher_is_better: bool | None = None


MEASURES: dict[str, Measure] = {
    "rows": Measure("n", 0, "rows, or predicted tokens, of the set"),
    "parameters": Measure("parameters", 0, "parameters, each counted once", False),
    "megabytes": Measure("MB", 2, "bytes of the parameters over 2^20, as the papers count: 4 (FP16 2, INT8 1, INT4 ½)",
                         False),
    "size_bytes": Measure("bytes", 0, "bytes of the exported file, with its share of weights beside it", False),
    "accuracy": Measure("accuracy", 4, "share of right answers", True),
    "f1": Measure("F1", 4, "F1 of the second of two labels; macro-averaged where there are more", True),
    "precision": Measure("precision", 4, "precision, of the same", True),
    "recall": Measure("recall", 4, "recall, of the same", True),
    "loss": Measure("loss", 4, "mean cross-entropy per row or token, nats", False),
    "perplexity": Measure("PPL", 3, "exp(loss), per token", False),
    "word_perplexity": Measure("word PPL", 1, "perplexity per word of the text", False),
    "ms_per_sample": Measure("ms/sample", 4, "time in the model over the whole set, batched, over its rows", False),
    "latency_ms": Measure("latency ms", 3, "median time of one call, measured in turns with the other rows", False),
    "speedup": Measure("times as fast", 2, "latency of the reference row over this row's, per round: median", True),
    "loop_ratio": Measure("loop ratio", 2, "loops of the whole model over those computed: no time is measured", True),
    "mean_loops": Measure("mean loops", 2, "loops that a token takes on average", False),
    "minutes": Measure("min", 1, "wall time of training", False),
    "epochs": Measure("epochs", 0, "epochs trained"),
    "best_epoch": Measure("best epoch", 0, "epoch whose weights were kept"),
}  # fmt: skip
"""Figures that a study's table can have."""

_SHARE = re.compile(r"share_([0-9]+)")


def measure(name: str) -> Measure:
    """A figure by its name; ``share_0``: of the first label. Raises KeyError where there is no such figure."""
    if found := _SHARE.fullmatch(name):
        return Measure(f"label {found[1]} %", 2, f"share of the rows with label {found[1]}, in percent")
    return MEASURES[name]


class RunSpec(Frozen):
    """One row's run, trained once for each seed."""

    label: str = Field(description="what tables call it")
    recipe: str = Field(description="a path, or a shipped recipe's name")
    set: dict[str, Any] = Field({}, description="recipe keys that are changed: training.epochs: 3")
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (42,)
    export: Annotated[tuple[Precision, ...], Field(strict=False)] = Field(
        (), description="graphs that are exported and scored; fp32 is always among them"
    )
    exits: bool = Field(False, description="also export a graph of every exit")
    sweep: bool = Field(False, description="also try early exit at several thresholds")
    teacher: str | None = Field(None, description="the row whose run of the same seed teaches this one")
    group: str = Field("", description="rows of another group stand below a line")
    note: str = Field("", description="what a reader must know of this row")


class Published(Frozen):
    """What a paper prints for one row."""

    run: str
    at: str | int | float | None = Field(
        None, description="which of the run's rows: test set, precision, exit or threshold; None: all of them"
    )
    source: str = Field(description="paper, table, page")
    values: dict[str, float] = Field(description="figure → value")


class Timing(Frozen):
    """Times of all rows in turns: A B C A B C …, each in a process of its own."""

    batch: PositiveInt = 1
    seq: PositiveInt = 128
    rounds: PositiveInt = 3
    against: str = Field(description="the row that ratios are of: a run's name and its part, baseline/fp32")


class Choice(Frozen):
    """Which row is recommended, across runs."""

    title: str
    smallest: str = Field(description="the figure whose best value is looked for")
    keep: str | None = Field(None, description="a figure that must stay near its best value of all rows")
    within: Annotated[float, Field(ge=0.0)] = Field(0.0, description="how far it may be from that")
    paper: str = Field("", description="what the paper recommends")


class TableSpec(Frozen):
    """Which rows and columns the table has.

    ``tests``       a row for each run and test set, scored with the run's own weights
    ``artifacts``   a row for each run and exported precision
    ``exits``       a row for each run and exit
    ``thresholds``  a row for each run and threshold of early exit
    ``labels``      a row for each run and set of its data: nothing is trained
    """

    rows: Literal["tests", "artifacts", "exits", "thresholds", "labels"]
    columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    tests: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="test sets by name, or validation; empty: every test set"
    )
    published: Annotated[tuple[Published, ...], Field(strict=False)] = ()
    timing: Timing | None = None
    choices: Annotated[tuple[Choice, ...], Field(strict=False)] = ()


class FigureSpec(Frozen):
    """A picture of the table's rows, or of the runs' curves."""

    kind: Literal["bubbles", "bars", "lines", "curves"]
    title: str
    x: str = Field("", description="bubbles, lines: the figure along x; curves: epoch")
    y: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    size: str = Field("", description="bubbles: the figure that their area shows")
    at: str | int | float | None = Field(None, description="only rows of this test set, precision, exit or threshold")


class Study(Frozen):
    """Runs, what of them is shown, and what was published."""

    name: Name
    title: str
    element: str = Field(description="the table or figure of the papers that it re-runs")
    protocol: str = Field(description="how the runs were made, in a paragraph")
    runs: Annotated[dict[Name, RunSpec], Field(min_length=1)]
    table: TableSpec
    figures: Annotated[tuple[FigureSpec, ...], Field(strict=False)] = ()
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    finding: str = Field(
        "",
        description="what the figures say; a Jinja template: of(run, at, figure) is ours, said(…) the same "
        "as the table shows it, ranked(run, …, at, figure) several, best first; clear(run, run, at, figure) whether "
        "two runs differ beyond what their seeds explain (Welch's t test), apart(run, at, at, figure) whether two "
        "lines of a run do, seed by seed; chance(run, run, at, share) the standard error of a difference of two shares",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        named = {row: spec.teacher for row, spec in self.runs.items() if spec.teacher is not None}
        named |= {f"table.published {number}": known.run for number, known in enumerate(self.table.published)}
        if self.table.timing is not None:
            named["table.timing.against"] = self.table.timing.against.partition("/")[0]
        for where, run in named.items():
            if run not in self.runs or run == where:
                raise ValueError(f"{where}: names the run {run!r}; there are {', '.join(self.runs)}")
        for row, spec in self.runs.items():
            self._row_fits(row, spec)
        bare = next((figure for figure in self.figures if figure.kind in ("bubbles", "lines") and not figure.x), None)
        if bare is not None:
            raise ValueError(f"figures: {bare.title!r} is of kind {bare.kind} and needs x: the figure along x")
        asked = [name for figure in self.figures for name in (*figure.y, figure.x, figure.size) if name]
        asked += [name for choice in self.table.choices for name in (choice.smallest, choice.keep) if name]
        asked += [name for known in self.table.published for name in known.values]
        curves = {name for figure in self.figures if figure.kind == "curves" for name in (figure.x, *figure.y)}
        for name in [*self.table.columns, *(name for name in asked if name not in curves)]:
            try:
                measure(name)
            except KeyError:
                raise ValueError(f"no figure {name!r}; there are {', '.join(MEASURES)}, share_0…") from None
        for choice in self.table.choices:
            if measure(choice.smallest).higher_is_better is None or (
                choice.keep and measure(choice.keep).higher_is_better is None
            ):
                raise ValueError(f"table.choices: of {choice.smallest} and {choice.keep}, one is neither good nor bad")
        return self

    def _row_fits(self, row: str, spec: RunSpec) -> None:
        """Raise ValueError for seeds that would be one, and for a row that teaches itself in the end."""
        if "seed" in spec.set:
            raise ValueError(f"runs.{row}.set: seed would be the same for all of its seeds; write seeds: instead")
        if len(set(spec.seeds)) != len(spec.seeds):
            raise ValueError(f"runs.{row}.seeds: a seed stands there twice, and would be the same run")
        chain = [row]
        while (teacher := self.runs[chain[-1]].teacher) is not None:
            if teacher in chain:
                raise ValueError(f"runs.{row}.teacher: goes in a circle: {', '.join([*chain, teacher])}")
            chain.append(teacher)


class LocalSource(Frozen):
    """Files that stand in for a split of a hub data set."""

    hub: str
    config: str | None = None
    split: str = "train"
    files: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, strict=False)] = Field(
        description="file sources as in a recipe; path is relative to the folder of --data"
    )
    all_rows: bool = Field(False, description="there are fewer than recipes ask for: a source's rows is left out")
    note: str = Field("", description="how they differ from it")


class LocalFile(Frozen):
    """A file or folder that stands in for something else of the hub."""

    hub: str
    path: str


class LocalData(Frozen):
    """What lies where below ``--data DIR``."""

    sources: Annotated[tuple[LocalSource, ...], Field(strict=False)] = ()
    tokenizers: Annotated[tuple[LocalFile, ...], Field(strict=False)] = ()
    models: Annotated[tuple[LocalFile, ...], Field(strict=False)] = ()


def load_study(name: str) -> tuple[Study, Path]:
    """Find, read and validate a study, and where it lies: a path, or a shipped name. Raises RecipeError."""
    path = find("recipes/studies", name)
    return validate(Study, read_yaml(path)), path


def load_local_data(path: Path) -> LocalData:
    """Read and validate a mapping of hub names to local files. Raises RecipeError."""
    return validate(LocalData, read_yaml(path))
