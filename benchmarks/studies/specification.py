"""A study's YAML file: its runs, the rows and columns of its table, published values, figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import Name, PositiveInt, Seed
from edgeformer.artifacts.documents import read_yaml, validate
from edgeformer.artifacts.errors import RecipeError, did_you_mean
from edgeformer.artifacts.manifest import Precision

FOLDER = Path(__file__).resolve().parent
T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(strict=False)]
"""A list in YAML or JSON."""


class Measure(NamedTuple):
    """How a figure is printed: heading, decimals, meaning, whether a higher value is better (None: neither), axis."""

    heading: str
    places: int
    meaning: str
    higher_is_better: bool | None = None
    axis: str = ""  # of a picture, with the unit; empty: the heading


MEASURES: dict[str, Measure] = {
    "rows": Measure("n", 0, "rows, or predicted tokens, of the set"),
    "train_rows": Measure("train rows", 0, "rows of the training set"),
    "cut": Measure("cut", 2, "share of the set's texts that are longer than the model reads"),
    "parameters": Measure("parameters", 0, "parameters, each counted once", False),
    "megabytes": Measure("MiB", 2, "2^20 bytes of the parameters, as the papers count: 4 (FP16 2, INT8 1, INT4 ½) each",
                         False, "MiB of parameters"),
    "size_bytes": Measure("bytes", 0, "bytes of the exported file, with its share of external weights", False,
                          "bytes of the file"),
    "accuracy": Measure("accuracy", 4, "share of right answers", True, "accuracy, share of right answers"),
    "f1": Measure("F1", 4, "F1 of the second of two labels; macro-averaged where there are more", True),
    "precision": Measure("precision", 4, "precision, of the same", True),
    "recall": Measure("recall", 4, "recall, of the same", True),
    "loss": Measure("loss", 4, "mean cross-entropy per row or token, nats", False, "loss, nats per token"),
    "perplexity": Measure("PPL", 3, "exp(loss), per token", False, "perplexity per token"),
    "word_perplexity": Measure("word PPL", 1, "perplexity per word of the text", False),
    "ms_per_sample": Measure("ms/sample", 4, "milliseconds in the model for the whole set, in batches, over its rows",
                             False, "time per text, ms"),
    "latency_ms": Measure("latency ms", 3, "median time of one call, measured in turns with the other rows", False,
                          "latency of one call, ms"),
    "speedup": Measure("times as fast", 2, "latency of the reference over this row's: median (least–most) of rounds",
                       True, "times as fast as the reference"),
    "loop_ratio": Measure("loop ratio", 2, "loops of the whole model over those computed: no time is measured", True,
                          "loops of the whole model over those computed"),
    "mean_loops": Measure("mean loops", 2, "loops that a token takes on average", False, "mean loops per token"),
    "minutes": Measure("min", 1, "minutes of training", False),
    "epochs": Measure("epochs", 0, "epochs trained"),
    "best_epoch": Measure("best epoch", 0, "epoch whose weights were kept"),
    "last_validation": Measure("last validation", 4, "accuracy on the validation set after the last epoch", True),
}  # fmt: skip
_SHARE = re.compile(r"share_([0-9]+)")


def measure(name: str) -> Measure:
    """Return a figure by its name; ``share_0``: of the first label. Raises KeyError for an unknown name."""
    if match := _SHARE.fullmatch(name):
        return Measure(f"% with label {match[1]}", 2, f"share of the rows with label {match[1]}, in percent")
    return MEASURES[name]


class RunSpec(Frozen):
    """One row's run, trained once for each seed."""

    label: str
    recipe: str = Field(description="a path, or a shipped recipe's name")
    set: dict[str, Any] = Field({}, description="recipe keys that are changed: training.epochs: 3")
    like: str | None = Field(None, description="the row to whose data (keys ``data.…``) this row adds its own ``set``")
    seeds: Annotated[Several[Seed], Field(min_length=1)] = (42,)
    export: Several[Precision] = Field((), description="graphs to export and score; fp32 is always among them")
    exits: bool = Field(False, description="also export a graph of every exit")
    sweep: bool = Field(False, description="also try early exit at several thresholds")
    teacher: str | None = Field(None, description="the row whose run of the same seed teaches this one")
    group: str = Field("", description="rows of another group stand below a line")
    note: str = ""


class Published(Frozen):
    """What a paper prints for one row; ``at``: test set, precision, exit or threshold; None: all of the run's rows."""

    run: str
    at: str | int | float | None = None
    source: str
    values: dict[str, float]


class Timing(Frozen):
    """Latency of all graphs in turns (A B C A B C …), each in a process of its own."""

    batch: PositiveInt = 1
    seq: PositiveInt = 128
    rounds: PositiveInt = 3
    against: str = Field(description="the row that ratios are of: a run's name and its part, baseline/fp32")


class Choice(Frozen):
    """A recommendation: the row with the best ``smallest`` of those whose ``keep`` is ``within`` of the best."""

    title: str
    smallest: str
    keep: str | None = None
    within: Annotated[float, Field(ge=0.0)] = 0.0
    paper: str = ""


class TableSpec(Frozen):
    """Rows and columns of the table. A run has a row for each …

    ``tests``       test set, scored with the run's own weights
    ``artifacts``   exported precision
    ``exits``       exit
    ``thresholds``  threshold of early exit
    ``labels``      set of its data: nothing is trained
    """

    rows: Literal["tests", "artifacts", "exits", "thresholds", "labels"]
    columns: Annotated[Several[str], Field(min_length=1)]
    tests: Several[str] = ()
    published: Several[Published] = ()
    timing: Timing | None = None
    choices: Several[Choice] = ()
    paired: dict[str, str] = Field({}, description="run → the run that it is compared with, row by row")

    @property
    def splits(self) -> tuple[str, ...]:
        """The sets on which graphs are scored: those that the table names, else the protocol's own test set."""
        return self.tests or ("validation" if self.rows in ("exits", "thresholds") else "test",)


class FigureSpec(Frozen):
    """A figure of the table's rows, or of the runs' curves."""

    kind: Literal["bubbles", "dots", "lines", "curves"]
    title: str
    panels: Literal["", "group", "run"] = Field("", description="a panel for each; empty: for each figure in ``y``")
    x: str = Field("", description="bubbles, lines: the figure along x; curves: epoch")
    y: Annotated[Several[str], Field(min_length=1)]
    size: str = Field("", description="bubbles: the figure that their area shows")
    at: str | int | float | None = Field(None, description="only rows of this test set, precision, exit or threshold")
    unit: str = Field("nats per token", description="curves: of losses")


class Study(Frozen):
    """Runs, what is shown of them, and what was published. ``finding`` is a Jinja template, see render.py."""

    name: Name
    title: str
    element: str = Field(description="the table or figure of the papers that it re-runs")
    protocol: str
    runs: Annotated[dict[Name, RunSpec], Field(min_length=1)]
    table: TableSpec
    figures: Several[FigureSpec] = ()
    notes: Several[str] = ()
    finding: str = ""

    def changes(self, row: str) -> dict[str, Any]:
        """Return the recipe keys that a row changes."""
        spec = self.runs[row]
        other = self.runs[spec.like].set if spec.like is not None else {}
        return {**{key: value for key, value in other.items() if key.startswith("data.")}, **spec.set}

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        references = {row: spec.teacher for row, spec in self.runs.items() if spec.teacher is not None}
        references |= {f"runs.{row}.like": spec.like for row, spec in self.runs.items() if spec.like is not None}
        references |= {f"table.published {number}": row.run for number, row in enumerate(self.table.published)}
        if self.table.timing is not None:
            references["table.timing.against"] = self.table.timing.against.partition("/")[0]
        references |= self.table.paired | {f"table.paired: {run}": run for run in self.table.paired}
        for place, run in references.items():
            if run not in self.runs or run == place:
                raise ValueError(f"{place}: names the run {run!r}; there are {', '.join(self.runs)}")
        for row, spec in self.runs.items():
            if "seed" in spec.set or len(set(spec.seeds)) != len(spec.seeds):
                raise ValueError(f"runs.{row}.seeds: list each seed once, and there instead of in set:")
            if spec.teacher is not None and self.runs[spec.teacher].teacher is not None:
                raise ValueError(f"runs.{row}.teacher: {spec.teacher} has a teacher of its own; name one without")
        names = [*self.table.columns, *(name for row in self.table.published for name in row.values)]
        for figure in self.figures:
            if figure.kind in ("bubbles", "lines") and not figure.x:
                raise ValueError(f"figures: {figure.title!r} is of kind {figure.kind} and needs x: the figure along x")
            if figure.kind != "curves":  # whose names are those of metrics.jsonl
                names += [name for name in (*figure.y, figure.x, figure.size) if name]
        ranked = [name for choice in self.table.choices for name in (choice.smallest, choice.keep) if name]
        for name in [*names, *ranked]:
            try:
                is_ranked = measure(name).higher_is_better is not None
            except KeyError:
                raise ValueError(f"no figure {name!r}; there are {', '.join(MEASURES)}, share_0…") from None
            if name in ranked and not is_ranked:
                raise ValueError(f"table.choices: {name} is neither good nor bad")
        return self


def study_names() -> list[str]:
    """Return the names of the studies in this folder, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str) -> tuple[Study, Path]:
    """Read and validate a study: a path, or the name of one in this folder. Raises RecipeError."""
    for path in (Path(name), FOLDER / f"{name}.yaml"):
        if path.is_file():
            return validate(Study, read_yaml(path)), path
    hint = did_you_mean(name, study_names())
    raise RecipeError(f"no study {name!r}: no such file, and {hint}the studies are {', '.join(study_names())}")
