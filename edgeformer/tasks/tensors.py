"""Tensors: graphs that somebody else made, from any named inputs to any named outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataSection, Parts
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.golden import INPUT, OUTPUT, Golden, GoldenError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn
from edgeformer.tasks.parity import Kind
from edgeformer.tasks.task import Axes, Int64s, Run, Task

# What is known of the inputs of somebody else's graph: it takes the place of a recipe's data section.


Takes = Literal["batch", "seq"]
"""What sizes an axis: the rows of a call, or the length of each."""


class Axis(Frozen):
    """One axis of an input."""

    size: int = Field(ge=1, description="of the golden inputs; of an axis that takes nothing, of every call")
    takes: Takes | None = Field(None, description="what sizes it in a call; None: it is always of this size")
    role: Takes | None = Field(None, description="what it would take if it were not fixed; None: not known")


class TensorData(DataSection):
    """The inputs of a graph, and where its golden inputs come from."""

    called: ClassVar[str] = "inputs of a graph"

    parts: Parts = Field({}, description="there are none: the graph came without data")
    inputs: dict[str, tuple[Axis, ...]] = Field(description="input → its axes")
    drawn: dict[str, str] = Field(description="input → how its golden numbers came to be")

    @property
    def tokens_at_once(self) -> int:
        """Length of the golden inputs."""
        return self.size_of("seq") or 1

    def takes(self, what: Takes) -> bool:
        """Whether any axis is sized by the rows, or by the length, of a call."""
        return any(axis.takes == what for axes in self.inputs.values() for axis in axes)

    def size_of(self, what: Takes) -> int | None:
        """Rows or length of the golden inputs; None where no axis is known to be that."""
        return next((axis.size for axes in self.inputs.values() for axis in axes if axis.role == what), None)


# How far the outputs of one graph are from those of another, whatever they are; the bars are fixed here.
#
# Errors are relative to how much an output varies: its standard deviation over all golden calls (of a constant one,
# its
# root mean square). Noise of a hundredth of that is invisible in whatever is made of the output; a fifth of it leaves
# the
# cosine of the two at 0.98. The states of MiniLM, a sentence encoder that is in wide use in dynamic INT8, are 0.15
# off in
# that form (its embeddings: cosine 0.991), measured on sentences of SST-2. An output of whole numbers or truth values
# has
# no such scale: there the error is the share of the numbers that differ.


TOLERANCES: dict[Precision, tuple[Kind, float]] = {
    "fp32": ("relative", 1e-3),
    "fp16": ("rms", 1e-2),
    "int8": ("rms", 2e-1),
    "int4": ("rms", 3e-1),
}
"""FP32: the largest error over the standard deviation, for other processors add up in another order. The others: the
root mean square error over it, for one number in a million may be far off without any harm."""

_CLASSES = ("logit", "prob", "score", "label", "softmax", "class")
"""What outputs are called of which the largest number is the answer."""
_ONE = 1e-3
"""Probabilities of a row add up to one within this."""


class TensorScore(Score):
    """How close all outputs are to those of the FP32 graph on the golden inputs. 1 and 0: no difference."""

    n: int = Field(description="golden calls")
    loss: float = Field(description="root mean square error over the standard deviation, of the worst output")
    cosine: float = Field(description="cosine of the angle between an output and FP32's, of the worst output")


@dataclass(frozen=True)
class OutputError:
    """How far one output is from its reference. Figures are None where a number is not finite and should be.

    Attributes:
        spread: standard deviation of the reference; of a constant one its root mean square; 1 of integers.
    """

    name: str
    largest: float | None
    mean: float | None
    rms: float | None
    cosine: float | None
    spread: float

    @property
    def relative(self) -> float:
        """The root mean square error over the spread; infinite where it is not known."""
        if self.rms is None:
            return float("inf")
        return self.rms / self.spread if self.spread else (float("inf") if self.rms else 0.0)

    @property
    def worst(self) -> float | None:
        """The largest error over the spread; None where it is not known."""
        if self.largest is None:
            return None
        return self.largest / self.spread if self.spread else (float("inf") if self.largest else 0.0)


def measure_error(name: str, found: Array, reference: Array) -> OutputError:
    """Compare one output with its reference; both have the same shape.

    Where the reference is not finite (a mask of −∞), the other has to be the same there.
    """
    if reference.dtype.kind not in "f":
        share = float((found != reference).mean()) if reference.size else 0.0
        return OutputError(name, share, share, share, 1.0 - share, 1.0)
    wide, wanted = found.astype(np.float64), reference.astype(np.float64)
    counted = np.isfinite(wanted)
    same = np.array_equal(wide[~counted], wanted[~counted], equal_nan=True)
    wide, wanted = wide[counted], wanted[counted]
    spread = float(wanted.std()) or float(np.sqrt(np.square(wanted).mean())) if wanted.size else 1.0
    if not same or not np.isfinite(wide).all():
        return OutputError(name, None, None, None, None, spread)
    error = np.abs(wide - wanted)
    if not error.size:
        return OutputError(name, 0.0, 0.0, 0.0, 1.0, spread)
    lengths = float(np.linalg.norm(wide) * np.linalg.norm(wanted))
    cosine = min(1.0, float(wide @ wanted) / lengths) if lengths else float(not error.any())
    return OutputError(name, float(error.max()), float(error.mean()), _rms(error), cosine, spread)


def _rms(error: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(error).mean()))


def measure_errors(found: Arrays, reference: Arrays) -> list[OutputError]:
    """Every output against its reference, the one that is worst off first."""
    errors = [measure_error(name, found[name], array) for name, array in reference.items()]
    return sorted(errors, key=lambda error: -error.relative)


def as_parity(
    errors: Sequence[OutputError], agreement: float | None, n: int, precision: Precision, provider: str
) -> Parity:
    """The errors of all outputs, worst first, in a manifest's form.

    Args:
        agreement: share of equal answers, where an output has answers.
        n: golden calls.
    """
    (kind, tolerance), first = TOLERANCES[precision], errors[0]
    known = [error for error in errors if error.largest is not None and error.mean is not None]
    finite = len(known) == len(errors)
    relative = [error.worst for error in errors if error.worst is not None]
    # Which one is shown as the worst is by the figure that is judged.
    worst = first if kind == "rms" or not finite else max(errors, key=lambda error: error.worst or 0.0)
    return Parity(
        status="measured",
        n=n,
        provider=provider,
        max_abs_error=max(error.largest or 0.0 for error in known) if finite else None,
        mean_abs_error=max(error.mean or 0.0 for error in known) if finite else None,
        relative_error=_finite(max(relative)) if finite else None,
        rms_error=_finite(first.relative) if finite else None,
        output=worst.name,
        top1_agreement=agreement,
        tolerance=tolerance,
        tolerance_kind=kind,
    )


def _finite(value: float) -> float:
    """JSON has no infinity: an output that is constantly zero in FP32, and is not here."""
    return min(value, 1e9)


def score_of(errors: Sequence[OutputError], n: int) -> TensorScore | None:
    """The errors of all outputs, worst first, as a score; None where a number is not finite."""
    cosines = [error.cosine for error in errors if error.cosine is not None]
    if len(cosines) < len(errors):
        return None
    return TensorScore(n=n, loss=_finite(errors[0].relative), cosine=min(cosines))


def agreement(found: Arrays, reference: Arrays) -> float | None:
    """Share of rows with the same largest number, in outputs that have an answer: probabilities, or called so.

    None where no output has one.
    """
    shares = [
        float((found[name].argmax(-1) == array.argmax(-1)).mean())
        for name, array in reference.items()
        if _has_answers(name, array)
    ]
    return min(shares, default=None)


def _has_answers(name: str, array: Array) -> bool:
    """[…, C] with two or more classes, and either probabilities or called as such outputs are."""
    if array.dtype.kind != "f" or array.ndim < 3 or array.shape[-1] < 2 or not np.isfinite(array).all():
        return False  # the first axis counts golden calls
    if any(word in name.lower() for word in _CLASSES) and array.ndim == 3:
        return True
    return bool((array >= 0).all() and np.abs(array.astype(np.float64).sum(-1) - 1).max() < _ONE)


def differing_shapes(found: Mapping[str, Array], reference: Mapping[str, Array]) -> str | None:
    """What cannot be compared: an output that is missing, or of another shape; None where all can be."""
    for name, array in reference.items():
        if name not in found:
            return f"it has no output {name!r}, but {', '.join(found) or 'none'}"
        if found[name].shape != array.shape:
            shapes = f"{list(found[name].shape[1:])}, FP32's {list(array.shape[1:])}"
            return f"output {name!r} has the shape {shapes}"
    return None


# A task whose models are never trained here: whatever needs a recipe, text or labels is refused in one sentence.


class Untrained(Task):
    """What is left of :class:`Task` are golden inputs, and how outputs compare."""

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"a {self.noun} came without recipe, text and labels: it can be profiled, verified and exported, not scored"
        )

    def prepare(self, *_: Any) -> NoReturn:
        self._refuse()

    def local_data(self, *_: Any) -> NoReturn:
        self._refuse()

    def set_name(self, *_: Any) -> NoReturn:
        self._refuse()

    def read_set(self, *_: Any) -> NoReturn:
        self._refuse()

    def read_file(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def reader(self, *_: Any) -> NoReturn:
        self._refuse()

    def batch(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def weight(self, *_: Any) -> NoReturn:
        self._refuse()

    def example(self, *_: Any) -> NoReturn:
        self._refuse()

    def evaluation_rows(self, *_: Any) -> NoReturn:
        self._refuse()

    def call_batches(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def meter(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def row_figures(self, *_: Any) -> NoReturn:
        self._refuse()

    def metric_of(self, *_: Any) -> NoReturn:
        self._refuse()

    def departures(self, *_: Any) -> NoReturn:
        self._refuse()

    def criterion(self, *_: Any) -> NoReturn:
        self._refuse()

    def record(self, *_: Any) -> NoReturn:
        self._refuse()

    def describe(self, *_: Any) -> NoReturn:
        self._refuse()

    def rows(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def golden_inputs(self, *_: Any) -> NoReturn:
        self._refuse()

    def golden_answers(self, *_: Any) -> NoReturn:
        self._refuse()

    def client_config(self, *_: Any) -> NoReturn:
        self._refuse()

    def tokenizer_config(self, *_: Any) -> NoReturn:
        self._refuse()

    def bundle_facts(self, *_: Any) -> NoReturn:
        self._refuse()

    def card_lines(self, *_: Any) -> NoReturn:
        self._refuse()


# Tensors: what a graph is for is not known, so it is held to what it computes in FP32.


class Tensors(Untrained):
    """Any named inputs, any named outputs."""

    name: ClassVar[str] = "tensors"
    noun: ClassVar[str] = "wrapped graph"
    recipe_type: ClassVar[type[Recipe]] = Recipe
    score_type: ClassVar[type[Score]] = TensorScore
    metric: ClassVar[Metric] = Metric("cosine", True, 4, -1.0, 1.0, "--min-cosine", "golden inputs")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "calls", None),
        ScoreColumn("cosine", "cosine with FP32", 4),
        ScoreColumn("loss", "RMS error", 4),
    )
    unit: ClassVar[str] = "calls"
    phase: ClassVar[Literal["steady", "decode"]] = "steady"
    trained: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    pipeline_tag: ClassVar[str] = "other"
    use: ClassVar[str] = "profile"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (), ()
    score_note: ClassVar[str] = "Of every output, how close it is to the FP32 graph's on the golden inputs; the worst."
    few: ClassVar[str] = "they are few"

    def axes(self, data: TensorData) -> Axes:
        return {name: tuple(axis.takes or "" for axis in axes) for name, axes in data.inputs.items()}

    def fit_shape(self, data: TensorData, batch: int, seq: int) -> tuple[int, int]:
        return (
            batch if data.takes("batch") else data.size_of("batch") or 1,
            seq if data.takes("seq") else data.size_of("seq") or 1,
        )

    def shape_notes(self, data: TensorData) -> list[str]:
        inputs = ", ".join(f"{name} {_shape_text(axes)}" for name, axes in data.inputs.items())
        sized = [what for what, taken in (("B: batch", data.takes("batch")), ("S: seq", data.takes("seq"))) if taken]
        told = f" ({', '.join(sized)} of a row)" if sized else "; all sizes are fixed, whatever --batch and --seq say"
        return [f"inputs: {inputs}{told}"]

    def input_shapes(self, data: TensorData, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        sizes = {"batch": batch, "seq": seq}
        return {name: tuple(sizes.get(a.takes or "", a.size) for a in axes) for name, axes in data.inputs.items()}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Different calls are different golden inputs, as far as there are; axes are cut, or repeated from the start.

        The rows of a batch come from golden calls in turn.
        """
        sizes, inputs = dict(zip(("batch", "seq"), shape, strict=True)), golden.cases(INPUT)
        return [
            {name: _sized(array, number, axes.get(name, ()), sizes) for name, array in inputs.items()}
            for number in range(count)
        ]

    def golden_outputs(self, golden: Golden, run: Run, most: int | None) -> dict[str, Array]:
        """Every output, name → [calls, …]: golden inputs are whole calls, which nothing may cut."""
        inputs = golden.cases(INPUT)
        # A number by itself is an array without axes, not numpy's kind of a float.
        answers = [run({name: np.asarray(array[i]) for name, array in inputs.items()}) for i in range(len(golden))]
        found: dict[str, Array] = {}
        for name in answers[0]:
            pieces = [np.asarray(answer[name]) for answer in answers]
            if len({piece.shape for piece in pieces}) > 1:
                raise GoldenError(f"output {name!r} has another shape in every call, so it cannot be compared")
            found[name] = np.stack(pieces)
        return found

    def golden_score(
        self, exit_: int, logits: Arrays, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> TensorScore:
        """Score outputs, name → [calls, …], against those that ``answers`` holds."""
        errors = measure_errors(logits, answers)
        score = score_of(errors, len(next(iter(answers.values()))))
        if score is None:
            raise GoldenError(f"output {errors[0].name!r} is not finite")
        return score

    def golden_parity(
        self, golden: Arrays, logits: Arrays, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        reference = {name.removeprefix(OUTPUT): array for name, array in golden.items() if name.startswith(OUTPUT)}
        problem = differing_shapes(logits, reference)
        if problem is not None:
            raise GoldenError(f"golden.npz has other outputs: {problem}")
        n = len(next(iter(reference.values())))
        return as_parity(measure_errors(logits, reference), agreement(logits, reference), n, precision, provider)

    def lost(self, found: TensorScore, reference: TensorScore, precision: Precision, *, trimmed: bool) -> str | None:
        """Nothing: the bar is on the outputs themselves."""
        return None


def _shape_text(axes: tuple[Axis, ...]) -> str:
    """``[B, 3, S]``."""
    letters = {"batch": "B", "seq": "S"}
    return f"[{', '.join(letters.get(axis.takes or '', str(axis.size)) for axis in axes)}]"


def _sized(cases: Array, number: int, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """One input of call ``number``: golden calls [calls, …] joined along the rows, every axis as long as it should be.

    Args:
        axes: what sizes each axis of the input.
        sizes: ``batch`` and ``seq`` of the call.
    """
    array = np.asarray(cases[number % len(cases)])
    if "batch" in axes:
        rows = axes.index("batch")
        needed = -(-sizes["batch"] // array.shape[rows])
        array = np.concatenate([cases[(number * needed + more) % len(cases)] for more in range(needed)], axis=rows)
    for place, takes in enumerate(axes):
        if takes:
            array = np.take(array, np.arange(sizes[takes]) % array.shape[place], axis=place)
    return np.asarray(array, order="C")


TASK = Tensors()
