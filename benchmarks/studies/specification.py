"""A study's YAML file: its runs, the rows and columns of its table, published values, figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import Name, PositiveInt, Seed
from edgeformer.artifacts.documents import read_yaml, validate
from edgeformer.artifacts.errors import RecipeError, did_you_mean
from edgeformer.artifacts.manifest import Precision

FOLDER = Path(__file__).resolve().parent


class Measure(NamedTuple):
    """How a figure is printed: heading, decimals, meaning, and whether a higher value is better (None: neither)."""

    heading: str
    places: int
    meaning: str
    higher_is_better: bool | None = None


MEASURES: dict[str, Measure] = {
    "rows": Measure("n", 0, "rows, or predicted tokens, of the set"),
    "parameters": Measure("parameters", 0, "parameters, each counted once", False),
    "megabytes": Measure("MB", 2, "bytes of the parameters over 2^20, as the papers count: 4 (FP16 2, INT8 1, INT4 ½)",
                         False),
    "size_bytes": Measure("bytes", 0, "bytes of the exported file, with its share of external weights", False),
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
_SHARE = re.compile(r"share_([0-9]+)")


def measure(name: str) -> Measure:
    """Return a figure by its name; ``share_0``: of the first label. Raises KeyError for an unknown name."""
    if match := _SHARE.fullmatch(name):
        return Measure(f"label {match[1]} %", 2, f"share of the rows with label {match[1]}, in percent")
    return MEASURES[name]


class RunSpec(Frozen):
    """One row's run, trained once for each seed."""

    label: str
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
    columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    tests: Annotated[tuple[str, ...], Field(strict=False)] = ()
    published: Annotated[tuple[Published, ...], Field(strict=False)] = ()
    timing: Timing | None = None
    choices: Annotated[tuple[Choice, ...], Field(strict=False)] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        """The sets on which graphs are scored: those that the table names, else the protocol's own test set."""
        return self.tests or ("validation" if self.rows in ("exits", "thresholds") else "test",)


class FigureSpec(Frozen):
    """A figure of the table's rows, or of the runs' curves."""

    kind: Literal["bubbles", "bars", "lines", "curves"]
    title: str
    x: str = Field("", description="bubbles, lines: the figure along x; curves: epoch")
    y: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    size: str = Field("", description="bubbles: the figure that their area shows")
    at: str | int | float | None = Field(None, description="only rows of this test set, precision, exit or threshold")


class Study(Frozen):
    """Runs, what is shown of them, and what was published. ``finding`` is a Jinja template, see finding.py."""

    name: Name
    title: str
    element: str = Field(description="the table or figure of the papers that it re-runs")
    protocol: str
    runs: Annotated[dict[Name, RunSpec], Field(min_length=1)]
    table: TableSpec
    figures: Annotated[tuple[FigureSpec, ...], Field(strict=False)] = ()
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    finding: str = ""

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        references = {row: spec.teacher for row, spec in self.runs.items() if spec.teacher is not None}
        references |= {f"table.published {number}": row.run for number, row in enumerate(self.table.published)}
        if self.table.timing is not None:
            references["table.timing.against"] = self.table.timing.against.partition("/")[0]
        for place, run in references.items():
            if run not in self.runs or run == place:
                raise ValueError(f"{place}: names the run {run!r}; there are {', '.join(self.runs)}")
        for row, spec in self.runs.items():
            if "seed" in spec.set:
                raise ValueError(f"runs.{row}.set: seed would be the same for all of its seeds; write seeds: instead")
            if len(set(spec.seeds)) != len(spec.seeds):
                raise ValueError(f"runs.{row}.seeds: a seed is listed twice and would be the same run")
            chain = [row]
            while (teacher := self.runs[chain[-1]].teacher) is not None:
                if teacher in chain:
                    raise ValueError(f"runs.{row}.teacher: goes in a circle: {', '.join([*chain, teacher])}")
                chain.append(teacher)
        names = [*self.table.columns, *(name for row in self.table.published for name in row.values)]
        for figure in self.figures:
            if figure.kind in ("bubbles", "lines") and not figure.x:
                raise ValueError(f"figures: {figure.title!r} is of kind {figure.kind} and needs x: the figure along x")
            if figure.kind != "curves":  # whose names are those of metrics.jsonl
                names += [name for name in (*figure.y, figure.x, figure.size) if name]
        ranked = [name for choice in self.table.choices for name in (choice.smallest, choice.keep) if name]
        for name in [*names, *ranked]:
            try:
                measure(name)
            except KeyError:
                raise ValueError(f"no figure {name!r}; there are {', '.join(MEASURES)}, share_0…") from None
        for name in ranked:
            if measure(name).higher_is_better is None:
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
