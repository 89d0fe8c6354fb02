"""Tensors: imported graphs without a recipe, with any named inputs and outputs."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataSection, Parts
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.golden import INPUT, OUTPUT, Golden, GoldenError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.tasks.arrays import Array, Arrays, Int64s
from edgeformer.tasks.metric import Kind, Metric, ScoreColumn
from edgeformer.tasks.task import Axes, Run, Task

Takes = Literal["batch", "seq"]
"""Size of an axis: the rows of a call, or the length of each row."""


class Axis(Frozen):
    """One axis of an input."""

    size: int = Field(ge=1, description="size in the golden inputs; for a fixed axis, in every call")
    takes: Takes | None = Field(None, description="what sets its size in a call; None: the size is fixed")
    role: Takes | None = Field(None, description="its role, also if it is fixed; None: unknown")


class TensorData(DataSection):
    """Inputs of a graph and source of its golden inputs, instead of a recipe's data section."""

    called: ClassVar[str] = "inputs of a graph"

    parts: Parts = Field({}, description="empty: the graph has no data")
    inputs: dict[str, tuple[Axis, ...]] = Field(description="input → its axes")
    drawn: dict[str, str] = Field(description="input → origin of its golden values")

    @property
    def tokens_at_once(self) -> int:
        """Length of the golden inputs."""
        return self.size_of("seq") or 1

    def takes(self, role: Takes) -> bool:
        """Return whether the rows (``batch``) or the length (``seq``) of a call set the size of any axis."""
        return any(axis.takes == role for axes in self.inputs.values() for axis in axes)

    def size_of(self, role: Takes) -> int | None:
        """Return the rows or the length of the golden inputs; None if no axis has that role."""
        return next((axis.size for axes in self.inputs.values() for axis in axes if axis.role == role), None)


OUTPUT_TOLERANCES: dict[Precision, tuple[Kind, float]] = {
    "fp32": ("relative", 1e-3), "fp16": ("rms", 1e-2), "int8": ("rms", 2e-1), "int4": ("rms", 3e-1),
}  # fmt: skip
"""Largest allowed error of an output, relative to its standard deviation over all golden calls (root mean square if it
is constant). FP32 limits the largest error, since processors only differ in the order of sums. The other precisions
limit the root mean square error: one far-off number in a million does no harm. An error of 0.2 leaves the cosine of
both outputs at 0.98; MiniLM in dynamic INT8 has 0.15. Integer and boolean outputs have no such scale: their error is
the share of numbers that differ."""


class TensorScore(Score):
    """Agreement of the outputs with the FP32 graph's on the golden inputs. Cosine 1 and loss 0: no difference."""

    n: int = Field(description="golden calls")
    loss: float = Field(description="RMS error / standard deviation, of the worst output")
    cosine: float = Field(description="cosine between an output and FP32's, of the worst output")


@dataclass(frozen=True)
class OutputError:
    """Error of one output against its reference. Figures are None if a number is unexpectedly not finite.

    Relative figures are over the spread: the standard deviation of the reference, or its root mean square if it is
    constant, or 1 for integers.
    """

    name: str
    largest: float | None
    mean: float | None
    cosine: float | None
    relative_rms: float
    relative_largest: float | None


def measure_error(name: str, output: Array, reference: Array) -> OutputError:
    """Compare one output with its reference of the same shape.

    Where the reference is not finite (a mask of −∞), the output must be equal.
    """
    if reference.dtype.kind not in "f":
        share = float((output != reference).mean()) if reference.size else 0.0
        return OutputError(name, share, share, 1.0 - share, share, share)
    wide, expected = output.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(expected)
    masks_equal = np.array_equal(wide[~finite], expected[~finite], equal_nan=True)
    wide, expected = wide[finite], expected[finite]
    if not masks_equal or not np.isfinite(wide).all():
        return OutputError(name, None, None, None, float("inf"), None)
    error = np.abs(wide - expected)
    if not error.any():
        return OutputError(name, 0.0, 0.0, 1.0, 0.0, 0.0)
    norms = float(np.linalg.norm(wide) * np.linalg.norm(expected))
    cosine = min(1.0, float(wide @ expected) / norms) if norms else 0.0
    spread = float(expected.std()) or float(np.sqrt(np.square(expected).mean()))
    rms, largest = float(np.sqrt(np.square(error).mean())), float(error.max())
    relative = [figure / spread if spread else float("inf") for figure in (rms, largest)]
    return OutputError(name, largest, float(error.mean()), cosine, *relative)


_MAX_ERROR = 1e9  # replaces infinity, which JSON lacks: the error of an output that is zero in FP32 only


def agreement(outputs: Arrays, reference: Arrays) -> float | None:
    """Return the smallest share of rows with the same argmax over all outputs of classes; None without such outputs.

    An output [calls, …, C] has classes if its name says so, or if its numbers are probabilities (sums of 1 ± 0.001).
    """
    shares = []
    for name, array in reference.items():
        if array.dtype.kind != "f" or array.ndim < 3 or array.shape[-1] < 2 or not array.size:
            continue
        if not np.isfinite(array).all():
            continue
        class_names = ("logit", "prob", "score", "label", "softmax", "class")
        is_named = array.ndim == 3 and any(word in name.lower() for word in class_names)
        if is_named or ((array >= 0).all() and np.abs(array.astype(np.float64).sum(-1) - 1).max() < 1e-3):
            shares.append(float((outputs[name].argmax(-1) == array.argmax(-1)).mean()))
    return min(shares, default=None)


class TensorTask(Task):
    """Any named inputs and outputs. The reference is the graph in FP32."""

    name = "tensors"
    noun = "graph without a tokenizer"
    recipe_type = Recipe
    score_type = TensorScore
    metric = Metric("cosine", "cosine with FP32", 4, lowest=-1.0, evaluated_on="golden inputs")
    columns = (ScoreColumn("n", "calls", None), metric, ScoreColumn("loss", "RMS error", 4))
    unit = "calls"
    pipeline_tag = "other"
    use = "profile"
    golden_names = (), ()
    score_note = "Agreement of the worst output with the FP32 graph on the golden inputs."
    golden_note = "agreement with the FP32 outputs"

    def _has_no_rows(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(f"a {self.noun} has no rows to score")

    meter = row_answers = row_figures = metric_of = _has_no_rows

    def axes(self, data: TensorData) -> Axes:
        return {name: tuple(axis.takes or "" for axis in axes) for name, axes in data.inputs.items()}

    def fit_shape(self, data: TensorData, batch: int, seq: int) -> tuple[int, int]:
        return (
            batch if data.takes("batch") else data.size_of("batch") or 1,
            seq if data.takes("seq") else data.size_of("seq") or 1,
        )

    def shape_notes(self, data: TensorData) -> list[str]:
        letters = {"batch": "B", "seq": "S"}
        inputs = ", ".join(
            f"{name} [{', '.join(letters.get(axis.takes or '', str(axis.size)) for axis in axes)}]"
            for name, axes in data.inputs.items()
        )
        legend = [f"{letters[role]}: {role}" for role in ("batch", "seq") if data.takes(role)]
        note = (
            f" ({', '.join(legend)} of a row)"
            if legend
            else "; all sizes are fixed, so --batch and --seq have no effect"
        )
        return [f"inputs: {inputs}{note}"]

    def input_shapes(self, data: TensorData, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        sizes = {"batch": batch, "seq": seq}
        return {name: tuple(sizes.get(a.takes or "", a.size) for a in axes) for name, axes in data.inputs.items()}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Make ``count`` inputs of one shape: each begins with another golden call, if there are enough."""
        sizes = dict(zip(("batch", "seq"), shape, strict=True))
        calls: list[dict[str, Array]] = [{} for _ in range(count)]
        for name, cases in golden.cases(INPUT).items():
            roles = axes.get(name, ())
            for number, call in enumerate(calls):
                array = np.asarray(cases[number % len(cases)])
                if "batch" in roles:
                    axis = roles.index("batch")
                    needed = -(-sizes["batch"] // array.shape[axis])
                    start = number * needed
                    rows = [cases[(start + offset) % len(cases)] for offset in range(needed)]
                    array = np.concatenate(rows, axis=axis)
                for axis, role in enumerate(roles):
                    if role:
                        array = np.take(array, np.arange(sizes[role]) % array.shape[axis], axis=axis)
                call[name] = np.asarray(array, order="C")
        return calls

    def golden_outputs(self, golden: Golden, run: Run, max_rows: int | None) -> dict[str, Array]:
        """Run the golden calls, which cannot be split, and return all outputs, name → [calls, …]."""
        inputs = golden.cases(INPUT)
        # np.asarray: indexing a scalar input yields a NumPy scalar instead of an array without axes.
        answers = [run({name: np.asarray(array[i]) for name, array in inputs.items()}) for i in range(len(golden))]
        outputs: dict[str, Array] = {}
        for name in answers[0]:
            pieces = [np.asarray(answer[name]) for answer in answers]
            if len({piece.shape for piece in pieces}) > 1:
                raise GoldenError(f"output {name!r} has a different shape in every call, so it cannot be compared")
            outputs[name] = np.stack(pieces)
        return outputs

    def golden_score(
        self, exit_: int, logits: Arrays, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> TensorScore:
        """Score outputs, name → [calls, …], against those in ``answers``."""
        errors = [measure_error(name, logits[name], array) for name, array in answers.items()]
        cosines = [error.cosine for error in errors if error.cosine is not None]
        if len(cosines) < len(errors):
            worst = max(errors, key=lambda error: error.relative_rms)
            raise GoldenError(f"output {worst.name!r} is not finite")
        loss = min(max(error.relative_rms for error in errors), _MAX_ERROR)
        n = len(next(iter(answers.values())))
        return TensorScore(n=n, loss=loss, cosine=min(cosines))

    def stored_score(self, golden: Golden, exit_: int, outputs: Arrays, data: Any) -> TensorScore:
        return self.golden_score(exit_, outputs, golden.cases(OUTPUT))

    def golden_parity(
        self, golden: Arrays, logits: Arrays, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        reference = {name.removeprefix(OUTPUT): array for name, array in golden.items() if name.startswith(OUTPUT)}
        for name, array in reference.items():
            problem = None
            if name not in logits:
                problem = f"it has no output {name!r} (only {', '.join(logits) or 'none'})"
            elif logits[name].shape != array.shape:
                shapes = f"{list(logits[name].shape[1:])}, in FP32 {list(array.shape[1:])}"
                problem = f"output {name!r} has the shape {shapes}"
            if problem is not None:
                raise GoldenError(f"the outputs differ from those in golden.npz: {problem}; export or import it again")
        kind, tolerance = OUTPUT_TOLERANCES[precision]
        errors = [measure_error(name, logits[name], array) for name, array in reference.items()]
        errors.sort(key=lambda error: -error.relative_rms)
        largest = [error.largest for error in errors if error.largest is not None]
        mean = [error.mean for error in errors if error.mean is not None]
        relative = [error.relative_largest or 0.0 for error in errors]
        finite = len(largest) == len(errors)
        # The output to report is the worst by the figure that is compared with the tolerance.
        worst = errors[0] if kind == "rms" or not finite else errors[int(np.argmax(relative))]
        return Parity(
            status="measured", n=len(next(iter(reference.values()))), provider=provider,
            max_abs_error=max(largest) if finite else None, mean_abs_error=max(mean) if finite else None,
            relative_error=min(max(relative), _MAX_ERROR) if finite else None,
            rms_error=min(errors[0].relative_rms, _MAX_ERROR) if finite else None, output=worst.name,
            top1_agreement=agreement(logits, reference), tolerance=tolerance, tolerance_kind=kind,
        )  # fmt: skip


TASK = TensorTask()
